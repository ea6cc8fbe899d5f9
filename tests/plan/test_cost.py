"""Cost of a run: published times and prices, the model of interruptions against a simulation, and bad input."""

import dataclasses
import math
import random

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.plan.cost.spot import INTERRUPTIONS_PER_NODE_HOUR, spot_efficiency, young_interval
from jaxtrain.plan.cost.training import steps_for, training_cost, unplanned_downtime
from jaxtrain.plan.search.analyse import Terms

MINUTE, HOUR = 60.0, 3600.0

# A job of 100 hours on two nodes of eight devices.
JOB = dict(
    step_seconds=0.5,
    steps=720_000,
    num_devices=16,
    num_nodes=2,
    watts=700.0,
    on_demand_usd_hour=3.0,
    spot_usd_hour=1.0,
    purchase_usd=30_000.0,
    save_seconds=30.0,
    restart_seconds=300.0,
    usd_per_kwh=0.10,
)


def cost_of(**changes):
    return training_cost(**{**JOB, **changes})


# ResNet-50 v1.5, 90 epochs of ImageNet on one A100 80 GB, at the rates that NVIDIA publishes (DeepLearningExamples,
# PyTorch/Classification/ConvNets/resnet50v1.5, container 21.03). Their hours, about 14 and 36, have validation in them.
# An image is 3 passes x 2 FLOPs x 4.09e9 multiply-adds, so that these rates are a fifth and a seventh of the peaks of
# 312 and 156 TFLOP/s: at a transformer's 50 % it would be 5 hours, and it is not.
@pytest.mark.parametrize(
    ("images_per_second", "peak", "hours", "published_hours", "utilization"),
    [
        pytest.param(2470, 312e12, 12.97, 14, 0.194, id="mixed precision"),
        pytest.param(938, 156e12, 34.15, 36, 0.148, id="tf32"),
    ],
)
def test_resnet50_takes_of_the_order_of_a_day(images_per_second, peak, hours, published_hours, utilization):
    steps = steps_for(epochs=90, rows_per_epoch=1_281_167, rows_per_step=256)
    cost = cost_of(step_seconds=256 / images_per_second, steps=steps, num_devices=1, num_nodes=1)
    assert cost.hours == pytest.approx(hours, abs=0.01)
    # Validation is 4 % as many images, forward only; the hours are rounded.
    assert 0.9 * published_hours < cost.hours < published_hours
    assert images_per_second * 3 * 2 * 4.09e9 / peak == pytest.approx(utilization, abs=0.001)


def test_break_even_of_a_2000_dollar_card_is_near_654_hours():
    # Rent of $3.06 an hour (a V100 on demand at AWS, p3.2xlarge), electricity of the owned card not counted.
    card = cost_of(num_devices=1, purchase_usd=2000.0, on_demand_usd_hour=3.06)
    assert card.break_even_hours == pytest.approx(653.6, abs=0.05)


@pytest.mark.parametrize(("usd_hour", "hours"), [(1.0, 2000.0), (0.1, 20_000.0), (0.0, None)])
def test_break_even(usd_hour, hours):
    found = cost_of(num_devices=1, purchase_usd=2000.0, on_demand_usd_hour=usd_hour).break_even_hours
    assert found == (None if hours is None else pytest.approx(hours))


# (mean time between interruptions, interval that Daly 2006 gives as the best for saves of 5 minutes: figures 3 to 5).
DALY = {
    "rare": (24 * HOUR, 117 * MINUTE),
    "some": (6 * HOUR, 57 * MINUTE),
    "every three saves": (15 * MINUTE, 9.1 * MINUTE),
}


@pytest.mark.parametrize(("mean", "published"), DALY.values(), ids=DALY)
def test_efficiency_is_highest_at_the_interval_of_daly(mean, published):
    save, restart = 5 * MINUTE, 10 * MINUTE
    intervals = [published * (0.2 + 0.005 * i) for i in range(1000)]
    best = max(intervals, key=lambda interval: spot_efficiency(interval, save, restart, mean))
    # Published to two or three digits.
    assert best == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("save", "mean"),
    [
        pytest.param(1.0, 24 * HOUR, id="short saves"),
        pytest.param(60.0, 24 * HOUR, id="saves of a minute"),
        pytest.param(300.0, 6 * HOUR, id="long saves"),
    ],
)
def test_efficiency_is_highest_near_the_interval_of_young(save, mean):
    young = young_interval(save, mean)
    assert young == pytest.approx(math.sqrt(2 * save * mean))
    intervals = [young * 1.01**i for i in range(-400, 401)]
    scanned = {interval: spot_efficiency(interval, save, 120.0, mean) for interval in intervals}
    best = max(scanned, key=scanned.__getitem__)
    # The next order (Daly 2006) takes 2/3 of sqrt(δ / 2 M) off Young's: 6 % in the last row. The scan's step is 1 %.
    assert best == pytest.approx(young * (1 - 2 / 3 * math.sqrt(save / (2 * mean))), rel=0.01)
    assert scanned[best] - spot_efficiency(young, save, 120.0, mean) < 1e-3
    # Falls off on both sides.
    values = list(scanned.values())
    peak = values.index(scanned[best])
    assert values[: peak + 1] == sorted(values[: peak + 1])
    assert values[peak:] == sorted(values[peak:], reverse=True)


def simulated_efficiency(interval, save, restart, mean, *, segments):
    """Work over wall time of a job that is interrupted at random, also while it saves and restarts."""
    generator = random.Random(0)
    wall = 0.0
    for _ in range(segments):
        needed = interval + save
        while (until_interruption := generator.expovariate(1 / mean)) < needed:
            wall += until_interruption
            needed = restart + interval + save
        wall += needed
    return segments * interval / wall


@pytest.mark.parametrize(
    ("interval", "save", "restart", "mean"),
    [
        pytest.param(1200, 30, 300, 12 * HOUR, id="rare"),
        pytest.param(600, 60, 300, HOUR, id="often"),
        pytest.param(300, 120, 200, 300, id="as often as saves"),
        pytest.param(60, 300, 0, 300, id="saves outweigh work"),
    ],
)
def test_efficiency_agrees_with_a_simulation(interval, save, restart, mean):
    simulated = simulated_efficiency(interval, save, restart, mean, segments=20_000)
    # The scatter of 20,000 segments.
    assert spot_efficiency(interval, save, restart, mean) == pytest.approx(simulated, rel=0.03)


def test_efficiency_falls_with_interruptions_and_stays_between_0_and_1():
    means = [10.0**exponent for exponent in range(7, 0, -1)]
    found = [spot_efficiency(600, 60, 300, mean) for mean in means]
    assert found == sorted(found, reverse=True)
    assert all(0 < efficiency < 1 for efficiency in found)
    # Nearly never interrupted: what is left is the time of saves.
    assert spot_efficiency(600, 60, 300, 1e12) == pytest.approx(600 / 660, rel=1e-6)
    # The first-order cost is negative here: 1 - 60/600 - 600/600 - 300/300.
    assert 0 < spot_efficiency(600, 60, 300, 300) < 0.1
    assert spot_efficiency(600, 60, 300, 0.1) == 0  # too small for a float, and no overflow


def test_cost_without_interruptions():
    cost = cost_of()
    assert cost.steps == 720_000
    assert cost.hours == pytest.approx(100)
    assert cost.device_hours == pytest.approx(1600)
    assert cost.on_demand_usd == pytest.approx(4800)
    assert cost.energy_kwh == pytest.approx(1120)
    assert cost.energy_usd == pytest.approx(112)
    assert cost.purchase_usd == pytest.approx(480_000)
    assert cost.break_even_hours == pytest.approx(10_000)


def test_cost_of_spot():
    spot = cost_of().spot
    # Two nodes, each taken once a day.
    mean = 12 * HOUR
    assert mean == pytest.approx(HOUR / (2 * INTERRUPTIONS_PER_NODE_HOUR))
    assert spot.recommended_interval_seconds == pytest.approx(young_interval(30, mean))
    assert spot.checkpoint_interval_seconds == spot.recommended_interval_seconds
    assert spot.efficiency == pytest.approx(spot_efficiency(young_interval(30, mean), 30, 300, mean))
    assert spot.hours == pytest.approx(100 / spot.efficiency)
    assert spot.hours > 100
    assert spot.usd == pytest.approx(spot.hours * 16 * 1.0)
    assert spot.interruptions == pytest.approx(spot.hours / 12)


def test_a_given_interval_is_used_and_costs_more_than_the_recommended():
    given = cost_of(checkpoint_interval_seconds=6 * HOUR).spot
    assert given.checkpoint_interval_seconds == 6 * HOUR
    assert given.recommended_interval_seconds == cost_of().spot.recommended_interval_seconds
    assert given.usd > cost_of().spot.usd


def test_more_nodes_are_interrupted_more_often():
    hours = [cost_of(num_nodes=nodes).spot.hours for nodes in (1, 2, 4, 16)]
    assert hours == sorted(hours)
    # Only the rate of the whole job counts.
    assert cost_of(num_nodes=4, interruptions_per_node_hour=0.01).spot == (
        cost_of(num_nodes=1, interruptions_per_node_hour=0.04).spot
    )


def test_a_run_shorter_than_the_interval_saves_at_its_end():
    spot = cost_of(steps=120, checkpoint_interval_seconds=HOUR).spot
    assert spot.checkpoint_interval_seconds == HOUR
    assert spot.efficiency == pytest.approx(spot_efficiency(60, 30, 300, 12 * HOUR))


def test_unknown_prices_leave_out_what_depends_on_them():
    unknown = cost_of(on_demand_usd_hour=None, spot_usd_hour=None, purchase_usd=None)
    known = cost_of()
    assert unknown == dataclasses.replace(
        known, on_demand_usd=None, spot=None, purchase_usd=None, break_even_hours=None
    )
    assert cost_of(purchase_usd=None).break_even_hours is None
    assert cost_of(on_demand_usd_hour=None).break_even_hours is None


@pytest.mark.parametrize(
    ("goal", "steps"),
    [
        pytest.param(dict(tokens=300e9, tokens_per_step=1536 * 2048, rows_per_step=1536), 95_368, id="tokens"),
        pytest.param(dict(tokens=4096, tokens_per_step=1024, rows_per_step=8), 4, id="tokens, whole"),
        pytest.param(dict(tokens=4097, tokens_per_step=1024, rows_per_step=8), 5, id="tokens, rounded up"),
        pytest.param(dict(epochs=90, rows_per_epoch=1_281_167, rows_per_step=256), 450_411, id="epochs"),
        # As floats, 0.1 x 30 / 1 is a little more than 3.
        pytest.param(dict(epochs=0.1, rows_per_epoch=30, rows_per_step=1), 3, id="part of an epoch"),
        pytest.param(dict(epochs=1e-5, rows_per_epoch=10, rows_per_step=8), 1, id="at least one"),
    ],
)
def test_steps_for(goal, steps):
    assert steps_for(**goal) == steps


MISTAKES = {
    "no interruptions": (lambda: Terms(interruptions_per_node_hour=0.0), "interruptions_per_node_hour is 0.0;"),
    "negative interval": (lambda: Terms(checkpoint_interval_seconds=-1.0), "checkpoint_interval_seconds is -1.0;"),
    "negative price of power": (lambda: Terms(usd_per_kwh=-1.0), "usd_per_kwh is -1.0; give a positive number"),
    "nothing but downtime": (lambda: Terms(downtime=1.0), "downtime is 1.0; give a share of the time, as in 0.1"),
    "no epochs": (lambda: Terms(epochs=0), "epochs is 0;"),
    "endless tokens": (lambda: Terms(tokens=math.inf), "tokens is inf;"),
    "tokens and epochs": (
        lambda: steps_for(tokens=1, epochs=2, rows_per_step=1),
        "tokens 1 and epochs 2; give one of the two",
    ),
    "no goal": (lambda: steps_for(rows_per_step=1), "tokens None and epochs None; give one of the two"),
    "tokens alone": (lambda: steps_for(tokens=5, rows_per_step=1), "tokens 5 without tokens_per_step;"),
    "epochs alone": (lambda: steps_for(epochs=5, rows_per_step=1), "epochs 5 take the number of rows"),
}


@pytest.mark.parametrize(("mistake", "says"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_said_in_one_line(mistake, says):
    with pytest.raises(ConfigError) as error:
        mistake()
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_unplanned_downtime_is_that_of_llama_3_and_less_of_fewer_devices():
    assert unplanned_downtime(16_384) == pytest.approx(0.1)
    assert unplanned_downtime(8) < 1e-4
    stopped = cost_of(downtime=0.1)
    assert stopped.hours == pytest.approx(cost_of().hours / 0.9)
    assert stopped.on_demand_usd == pytest.approx(cost_of().on_demand_usd / 0.9)
    assert stopped.spot == cost_of().spot  # which has interruptions of its own


@pytest.mark.parametrize(
    ("nodes", "least", "most"),
    [pytest.param(128, 300, 300, id="1,024 cards"), pytest.param(1, 600, 3600, id="one node")],
)
def test_saves_are_not_recommended_every_other_minute(nodes, least, most):
    spot = cost_of(num_devices=8 * nodes, num_nodes=nodes, save_seconds=5.0).spot
    assert least <= spot.recommended_interval_seconds <= most
    assert cost_of(interruptions_per_node_hour=1e-9).spot.recommended_interval_seconds == 6 * HOUR
