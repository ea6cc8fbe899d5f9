"""Cost of a run: published times and prices, the model of interruptions against a simulation, and bad input."""

import dataclasses

import pytest

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.plan.cost import (
    INTERRUPTIONS_PER_NODE_HOUR,
    run_cost,
    spot_efficiency,
    unplanned_downtime,
    with_steps,
    with_tokens,
    young_interval,
)
from jaxtrain.plan.estimate import analyse
from jaxtrain.plan.hardware import find
from jaxtrain.plan.targets import target_of
from jaxtrain.plan.workload import describe_workload

MINUTE, HOUR = 60.0, 3600.0

# A job of 100 hours on two nodes of eight devices, whose saves take 30 seconds.
STEPS = 720_000
H100 = dataclasses.replace(find("h100"), on_demand_usd_hour=3.0, spot_usd_hour=1.0)


def cost_of(*, devices=16, steps=STEPS, save_seconds=30.0, **prices):
    target = target_of(dataclasses.replace(H100, **prices), devices)
    return run_cost(steps, 0.5, target, round(save_seconds * 1e9 * target.num_hosts))


# (mean time between interruptions, interval that Daly 2006 gives as the best for saves of 5 minutes: figures 3 to 5).
DALY = [(24 * HOUR, 117 * MINUTE), (6 * HOUR, 57 * MINUTE), (15 * MINUTE, 9.1 * MINUTE)]


@pytest.mark.parametrize(("mean", "published"), DALY)
def test_efficiency_is_highest_at_the_interval_of_daly(mean, published):
    save, restart = 5 * MINUTE, 10 * MINUTE
    intervals = [published * (0.2 + 0.005 * i) for i in range(1000)]
    best = max(intervals, key=lambda interval: spot_efficiency(interval, save, restart, mean))
    # Published to two or three digits.
    assert best == pytest.approx(published, rel=0.01)


def test_efficiency_stays_between_0_and_1():
    # Nearly never interrupted: what is left is the time of saves.
    assert spot_efficiency(600, 60, 300, 1e12) == pytest.approx(600 / 660, rel=1e-6)
    # The first-order cost is negative here: 1 - 60/600 - 600/600 - 300/300.
    assert 0 < spot_efficiency(600, 60, 300, 300) < 0.1
    assert spot_efficiency(600, 60, 300, 0.1) == 0  # too small for a float, and no overflow


def test_cost_of_devices_that_stay():
    cost, trained = cost_of(), 100 / (1 - unplanned_downtime(16))
    assert cost.steps == 720_000
    assert cost.hours == pytest.approx(trained)
    assert cost.device_hours == pytest.approx(16 * trained)
    assert cost.on_demand_usd == pytest.approx(48 * trained)
    # Llama 3's report; less on fewer devices.
    assert unplanned_downtime(16_384) == pytest.approx(0.1)
    assert unplanned_downtime(8) < 1e-4
    unknown = cost_of(on_demand_usd_hour=None, spot_usd_hour=None)
    assert unknown == dataclasses.replace(cost, on_demand_usd=None, spot=None)


def test_cost_of_spot():
    spot = cost_of().spot
    # Two nodes, each taken once a day.
    mean = HOUR / (2 * INTERRUPTIONS_PER_NODE_HOUR)
    assert spot.checkpoint_interval_seconds == pytest.approx(young_interval(30, mean))
    assert spot.efficiency == pytest.approx(spot_efficiency(young_interval(30, mean), 30, 300, mean))
    assert spot.hours == pytest.approx(100 / spot.efficiency)
    assert spot.usd == pytest.approx(spot.hours * 16 * 1.0)
    assert spot.interruptions == pytest.approx(spot.hours / 12)
    # A run shorter than the interval saves at its end.
    assert cost_of(steps=120).spot.efficiency == pytest.approx(spot_efficiency(60, 30, 300, mean))
    # Interrupted more often than it saves, a run gets nothing done.
    assert spot.is_sensible
    assert not cost_of(devices=8 * 16_384).spot.is_sensible


# id: (config, overrides, bytes of a checkpoint: 12 per trained number with AdamW, and 4 per frozen one that it holds)
SAVES = {
    "adapters over nf4": ("llama2_13b_nf4", ["finetune.lora.rank=512"], 12 * 32 * 62_586_880),
    "frozen blocks": ("llama3_8b", ["optimizer.freeze=['blocks/*']"], 12 * 1_050_677_248 + 4 * 6_979_584_000),
}


@pytest.mark.parametrize(("name", "overrides", "saved"), SAVES.values(), ids=SAVES)
def test_a_save_of_adapters_is_without_their_base(name, overrides, saved, monkeypatch):
    monkeypatch.setattr("jaxtrain.plan.cost.INTERRUPTIONS_PER_NODE_HOUR", 1e-9)
    long = ("parallel.fsdp=8", "train.accumulation_steps=1", "train.steps=1000000")
    config = load_config(name, overrides=[*overrides, *long], weights=False).config
    spot = analyse(config, target_of(find("h100"), 8)).cost.spot
    # An interval's work, and what the save after it takes: all that is lost where nothing is interrupted.
    lost = (1 / spot.efficiency - 1) * spot.checkpoint_interval_seconds
    assert lost == pytest.approx(saved / 1e9, rel=1e-3)


# 8 rows of 128 tokens at a time, rounded up; 4 pairs, the two answers of which are 2 rows of 128 tokens.
@pytest.mark.parametrize(("name", "tokens", "steps"), [("quickstart", 1025, 2), ("smollm2_dpo", 2 * 4 * 128 * 50, 50)])
def test_steps_of_a_plan_are_those_of_its_batch(name, tokens, steps):
    config = load_config(name, weights=False).config
    estimate = analyse(with_tokens(config, describe_workload(config), tokens), target_of(find("h100"), 1))
    assert estimate.cost.steps == estimate.config.train.steps == steps


def test_rows_without_tokens_have_no_number_of_them():
    config = load_config("resnet50_imagenet").config
    with pytest.raises(ConfigError, match=r"tokens 1e\+09, but data.kind=.* has none; set train.steps instead"):
        with_tokens(config, describe_workload(config), 1e9)


# id: (settings of the schedule of a run of 800 steps, its warmup and decay in one of 200)
SCHEDULES = {
    "decay that ends before the run": (["warmup_steps=80", "decay_steps=400"], (20, 100)),
    "final decay": (["kind=wsd", "warmup_steps=1", "decay_steps=799"], (1, 199)),
    "decay just above the warmup": (["warmup_steps=4", "decay_steps=5"], (1, 2)),
}


@pytest.mark.parametrize(("settings", "lengths"), SCHEDULES.values(), ids=SCHEDULES)
def test_lengths_of_a_schedule_go_with_the_steps(settings, lengths):
    config = load_config("quickstart", overrides=[f"optimizer.schedule.{one}" for one in settings]).config
    schedule = with_steps(config, 200).optimizer.schedule
    assert (schedule.warmup_steps, schedule.decay_steps) == lengths
    assert with_steps(config, 800) == config
    assert with_steps(config, 1).optimizer.schedule.warmup_steps == 0
