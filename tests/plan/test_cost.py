"""Cost of a run: hours and rent, the steps of a number of tokens, and bad input."""

import dataclasses

import pytest

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.plan.cost import run_cost, unplanned_downtime, with_steps, with_tokens
from jaxtrain.plan.estimate import analyse
from jaxtrain.plan.hardware import catalogue
from jaxtrain.plan.targets import target_of
from jaxtrain.plan.workload import describe_workload

# A job of 100 hours on two nodes of eight devices.
H100 = dataclasses.replace(catalogue()["h100"], on_demand_usd_hour=3.0, spot_usd_hour=1.0)


def cost_of(**prices):
    return run_cost(720_000, 0.5, target_of(dataclasses.replace(H100, **prices), 16))


def test_hours_and_rent():
    cost, trained = cost_of(), 100 / (1 - unplanned_downtime(16))
    assert cost.steps == 720_000
    assert cost.hours == pytest.approx(trained)
    assert cost.device_hours == pytest.approx(16 * trained)
    assert (cost.on_demand_usd, cost.spot_usd) == pytest.approx((48 * trained, 16 * trained))
    # Llama 3's report; less on fewer devices.
    assert unplanned_downtime(16_384) == pytest.approx(0.1)
    assert unplanned_downtime(8) < 1e-4
    unknown = cost_of(on_demand_usd_hour=None, spot_usd_hour=None)
    assert unknown == dataclasses.replace(cost, on_demand_usd=None, spot_usd=None)


# 8 rows of 128 tokens at a time, rounded up; 4 pairs, the two answers of which are 2 rows of 128 tokens.
@pytest.mark.parametrize(("name", "tokens", "steps"), [("quickstart", 1025, 2), ("smollm2_dpo", 2 * 4 * 128 * 50, 50)])
def test_steps_of_a_plan_are_those_of_its_batch(name, tokens, steps):
    config = load_config(name, weights=False).config
    estimate = analyse(with_tokens(config, describe_workload(config), tokens), target_of(catalogue()["h100"], 1))
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
