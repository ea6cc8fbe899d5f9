"""Estimates as an answer, a table and JSON: what stands there, and that nothing breaks where figures lack."""

import dataclasses
import json
import math
import re

import pytest

from jaxtrain.config.load import load_config
from jaxtrain.config.schema import Config, Parallelism, TrainConfig
from jaxtrain.plan.compile import ExactMemory
from jaxtrain.plan.cost import Cost
from jaxtrain.plan.estimate import Estimate
from jaxtrain.plan.hardware import catalogue
from jaxtrain.plan.memory import Memory
from jaxtrain.plan.plans import analytic_plan
from jaxtrain.plan.show import answer_lines, as_json, labels, table
from jaxtrain.plan.targets import parse_targets, target_of
from jaxtrain.plan.time import BlockTime, StepTime, Traffic
from jaxtrain.plan.workload import Workload

GIB = 2**30
EXACT = ExactMemory(8 * GIB, 22 * GIB, 14 * GIB, None, 12.3)
TIME = StepTime(
    seconds=1.25,
    low_seconds=1.0,
    high_seconds=2.5,
    compute_seconds=0.8,
    blocks=(
        BlockTime("attention projections", 2e14, 1e11, 0.3, "compute"),
        BlockTime("attention scores", 3e13, 1e12, 0.4, "memory"),
        BlockTime("optimizer", 0.0, 3e11, 0.1, "memory"),
    ),
    traffic=(Traffic("fsdp", 12 * GIB, 0.4, 0.2, "fast", "parameters twice, gradients"),),
    bubble_fraction=0.2,
    bound="memory bandwidth",
    model_flops=2e15,
    model_flops_utilization=0.4,
    assumptions=("matmuls at 70% of the peak",),
)
# Traffic over a link of no known speed takes for ever.
NO_LINK = dataclasses.replace(
    TIME,
    seconds=math.inf,
    high_seconds=math.inf,
    traffic=(Traffic("fsdp", GIB, math.inf, math.inf, "network", "gradients"),),
)
COST = Cost(1000, 100.0, 0.01, 800.0, 8, 2400.0, 1200.0)


def estimate_on(name="h100", num_devices=8, **changes) -> Estimate:
    """A plan of round numbers: 20 GiB in two parts, of 79 GiB."""
    made = Estimate(
        config=Config(parallel=Parallelism(data=1, fsdp=num_devices, zero=0), train=TrainConfig(global_batch_size=64)),
        target=target_of(catalogue()[name], num_devices),
        degrees={"pipe": 1, "data": 1, "fsdp": num_devices, "expert": 1, "context": 1, "tensor": 1},
        workload=Workload("tokens", (4096,), 256, None, 64, 1e9, ("256 ids, as bytes have",)),
        num_parameters=8_030_261_248,
        memory=Memory({"parameters": 5 * GIB, "activations": 15 * GIB}, 5 * GIB, 80 * GIB, 4 * GIB),
        time=TIME,
        cost=COST,
    )
    return dataclasses.replace(made, **changes)


def with_memory(**changes) -> Estimate:
    made = estimate_on()
    return dataclasses.replace(made, memory=dataclasses.replace(made.memory, **changes))


def bare() -> Estimate:
    """Nothing is known but the parts."""
    return dataclasses.replace(with_memory(capacity_bytes=None, reserved_bytes=0), time=None, cost=None)


CASES = {
    "one": [estimate_on()],
    "with the compiler": [estimate_on(exact=EXACT)],
    "one known of two": [estimate_on(), bare()],
    "thirteen parts": [with_memory(parts={f"part number {number}": number * GIB for number in range(1, 14)})],
    "ten": [estimate_on(num_devices=8 * count) for count in range(1, 11)],
    "no link": [estimate_on(time=NO_LINK, cost=dataclasses.replace(COST, hours=math.inf, spot_usd=None))],
}


def row(text: str, label: str) -> str:
    """The cells of a row, its further lines left out."""
    (found,) = re.findall(rf"^  {re.escape(label)}  +(.*)$", text, re.MULTILINE)
    return " ".join(found.split())


# label: its cells, spaces aside
SINGLE = {
    "devices": "8 on 1 host",
    "layout": "fsdp 8",
    "batch": "64 rows of 4,096 tokens",
    "activations": "15.00 GiB 75.0 %",
    "total": "20.00 GiB 100.0 %",
    "by the compiler": "22.00 GiB",
    "capacity": "80.00 GiB, 4.00 GiB of it reserved",
    "attention scores": "400 ms 32.0 % bound by memory, 30 FLOPs per byte",
    "traffic over fsdp": "200 ms 16.0 % exposed of 400 ms: 12.00 GiB over the fast link",
    "pipeline bubble": "250 ms 20.0 % 20.0 % of a stage",  # 1.25 - 0.8 - 0.2
}


def test_a_single_plan_has_its_rows():
    text = table([estimate_on(exact=EXACT)])
    assert {label: row(text, label) for label in SINGLE} == SINGLE
    # What the answer says is not said again.
    assert not re.findall("^  (step time|MFU|time to train|on demand|spot) ", text, re.MULTILINE)


ANSWER = [
    "step: 1.25 s (1 s to 2.5 s), bound by memory bandwidth",
    "speed: 210k tokens/s (26.2k per device), MFU 40.0 % (20.0 to 50.0 %)",
    "time: 100.0 hours (4 d 4:00) for 262M tokens in 1,000 steps",
    "cost: $2,400 on demand; $1,200 at the spot price, if nothing is interrupted",
]
NOT_KNOWN = "step: not known: no peak for fp32 on this hardware"
ADVICE = ("remat.policy=full: 12.0 GiB", "train.accumulation_steps=2: 14.0 GiB")
CHANGES = [f"to change: {line}" for line in ADVICE]
# id: (estimate, its first line, the others)
ANSWERS = {
    "formulas": (estimate_on(), "h100x8 fits: 20.00 GiB of 76.00 GiB, by formulas", ANSWER),
    "compiler": (
        estimate_on(exact=EXACT),
        "h100x8 fits: 22.00 GiB of 76.00 GiB, by its compiler (by formulas 20.00 GiB)",
        ANSWER,
    ),
    "what is reserved decides": (
        dataclasses.replace(with_memory(capacity_bytes=22 * GIB), advice=ADVICE),
        "h100x8 does not fit: 20.00 GiB of 18.00 GiB, by formulas",
        CHANGES,
    ),
    "the compiler ran out": (
        estimate_on(exact=ExactMemory(5 * GIB, 50 * GIB, None, 16 * GIB, 42.0), advice=ADVICE),
        "h100x8 does not fit: 50.00 GiB of 16.00 GiB, by its compiler (by formulas 20.00 GiB)",
        CHANGES,
    ),
    "no capacity": (bare(), "h100x8 takes 20.00 GiB, by formulas; the capacity is not known", [NOT_KNOWN]),
    "another layout": (
        estimate_on(fitted="planned for h100x8"),
        "h100x8 fits: 20.00 GiB of 76.00 GiB, by formulas",
        [*ANSWER, "layout: planned for h100x8"],
    ),
}


@pytest.mark.parametrize(("estimate", "first", "others"), ANSWERS.values(), ids=ANSWERS)
def test_the_answer_comes_first(estimate, first, others):
    assert answer_lines(estimate) == [first, *others]


def test_several_plans_stand_side_by_side_in_even_tables():
    plans = [estimate_on(), estimate_on("a100-80", 16), estimate_on("v5e", 16)]
    text = table(plans)
    assert text.splitlines()[0].split() == labels(plans) == ["h100x8", "a100-80x16", "v5e-16"]
    assert row(text, "devices") == "8 on 1 host 16 on 2 hosts 16 on 1 slice"
    assert text.count("256 ids, as bytes have") == 1
    heads = [line for line in table(CASES["ten"][:5]).splitlines() if line.lstrip().startswith("h100x")]
    assert [len(line.split()) for line in heads] == [3, 2]
    assert labels([estimate_on(), estimate_on(), estimate_on("v5e")]) == ["h100x8 #1", "h100x8 #2", "v5e-8"]


@pytest.mark.parametrize("estimates", CASES.values(), ids=CASES)
def test_tables_are_narrow_and_json_round_trips(estimates):
    assert max(map(len, table(estimates).splitlines())) <= 120
    for estimate in estimates:
        found = json.loads(json.dumps(as_json(estimate), allow_nan=False))
        assert found == as_json(estimate)
        assert Config.model_validate(found["config"], strict=False) == estimate.config
        assert found["memory"]["total_bytes"] == sum(estimate.memory.parts.values())


def plans(words: str):
    """Estimates by formulas of `CONFIG on TARGETS key=value ...`."""
    config, targets, *overrides = words.split()
    loaded = load_config(config, overrides=overrides).config
    return [analytic_plan(loaded, target) for target in parse_targets(targets)]


def test_what_does_not_fit_has_no_time_and_no_cost():
    _, too_large, _ = estimates = plans("gpt2_124m h100x8,rtx4090,v5e-8")
    assert [one.fits for one in estimates] == [True, False, True]
    assert "$" not in table([too_large])
    # Tools get every figure, with whether it fits.
    answer = as_json(too_large)
    assert answer["fits"] is False
    assert answer["cost"]["on_demand_usd"] > 0
