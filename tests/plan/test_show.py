"""Estimates shown as a table, as JSON and as a page: what stands there, and that nothing breaks where figures lack."""

import dataclasses
import itertools
import json
import math
import re

import pytest
from jaxtrain.plan.report.page_plots import spread

from jaxtrain.config.schema import Config, ParallelConfig, TrainConfig
from jaxtrain.plan.compile import ExactMemory
from jaxtrain.plan.cost import Cost, Spot
from jaxtrain.plan.estimate import Estimate
from jaxtrain.plan.hardware import find
from jaxtrain.plan.memory import Memory
from jaxtrain.plan.page import write_page
from jaxtrain.plan.show import as_json, labels, table
from jaxtrain.plan.targets import target_of
from jaxtrain.plan.time import BlockTime, StepTime, Traffic
from jaxtrain.plan.workload import Workload

GIB = 2**30
SPOT = Spot(1.5, 1443.0, 1443.0, 0.98, 102.0, 1224.0, 4.4)
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
COST = Cost(1000, 100.0, 0.01, 800.0, 8, 2400.0, SPOT, 560.0, 67.2, 240_000.0, 4360.0)


def estimate_on(name="h100", num_devices=8, **changes) -> Estimate:
    """A plan of round numbers: 20 GiB in two parts, of 79 GiB."""
    hardware = find(name)
    config = Config(
        parallel=ParallelConfig(data=1, fsdp=num_devices, zero=0),
        train=TrainConfig(global_batch_size=64),
    )
    made = Estimate(
        config=config,
        target=target_of(hardware, num_devices),
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


THIRTEEN_PARTS = {f"part number {number}": number * GIB for number in range(1, 14)}
CASES = {
    "one": [estimate_on()],
    "with the compiler": [estimate_on(exact=EXACT)],
    "nothing known": [bare()],
    "one known of two": [estimate_on(), bare()],
    "thirteen parts": [with_memory(parts=THIRTEEN_PARTS)],
    "empty memory": [with_memory(parts={})],
    "ten": [estimate_on(num_devices=8 * count) for count in range(1, 11)],
    "no prices": [estimate_on(cost=dataclasses.replace(COST, on_demand_usd=None, spot=None, energy_kwh=None))],
    "no link": [estimate_on(time=NO_LINK, cost=dataclasses.replace(COST, hours=math.inf, spot=None))],
}


def row(text: str, label: str) -> str:
    """The cells of a row, its further lines left out."""
    (found,) = re.findall(rf"^  {re.escape(label)}  +(.*)$", text, re.MULTILINE)
    return found


# label: its cells, spaces aside
SINGLE = {
    "devices": "8 on 1 host",
    "layout": "fsdp 8",
    "batch": "64 rows of 4,096 tokens",
    "activations": "15.00 GiB 75.0 %",
    "total": "20.00 GiB 100.0 %",
    "of capacity": "25.0 % of 80.00 GiB",
    "peak": "analytic 20.00 GiB, compiler 22.00 GiB (compiled in 12.3 s)",
    "verdict": "fits: 22.00 GiB of 76.00 GiB, by the compiler",
    "step time": "1,250.0 ms (1,000.0 to 2,500.0)",
    "tokens/s": "210k (26.2k per device)",  # 64 x 4096 / 1.25
    "MFU": "40.0 % (20.0 to 50.0 %)",
    "bound by": "memory bandwidth",
    "attention scores": "400.0 ms, bound by memory, 30 FLOPs per byte 32.0 %",
    "pipeline bubble": "20.0 % of the pipeline, 250.0 ms 20.0 %",  # 1.25 - 0.8 - 0.2
    "time to train": "100.0 hours (4 d 4:00)",
    "on demand": "$2,400",
    "spot": "$1,224 in 102.0 hours",
    "spot checkpoints": "every 24.1 minutes",
    "spot efficiency": "98.0 %, 4.4 interruptions expected",
    "energy": "560 kWh, $67.20",
    "break-even": "after 4,360 hours of rent",
}


def test_a_single_plan_has_its_rows():
    text = table([estimate_on(exact=EXACT)])
    assert {label: " ".join(row(text, label).split()) for label in SINGLE} == SINGLE
    # Of the model, and below it of the memory.
    assert re.findall("^  parameters  +(8.03B.*)$", text, re.MULTILINE) == ["8.03B (8,030,261,248)"]


@pytest.mark.parametrize(
    ("estimate", "peak", "verdict"),
    [
        pytest.param(
            estimate_on(exact_missing="no compiler"),
            "20.00 GiB, analytic only: no compiler",
            "fits: 20.00 GiB of 76.00 GiB (4.00 GiB more is reserved)",
            id="analytic only",
        ),
        pytest.param(
            with_memory(capacity_bytes=22 * GIB),
            "20.00 GiB, analytic only",
            "does not fit: 20.00 GiB of 18.00 GiB (4.00 GiB more is reserved)",
            id="what is reserved decides",
        ),
        pytest.param(
            estimate_on(exact=ExactMemory(5 * GIB, 50 * GIB, None, 16 * GIB, 42.0)),
            "analytic 20.00 GiB, compiler 50.00 GiB (ran out of memory after",
            "does not fit: 50.00 GiB of 16.00 GiB, by the compiler",
            id="the compiler ran out",
        ),
        pytest.param(
            bare(),
            "20.00 GiB, analytic only",
            "takes 20.00 GiB; the capacity is not known",
            id="no capacity",
        ),
    ],
)
def test_verdict_has_both_numbers(estimate, peak, verdict):
    text = table([estimate])
    assert row(text, "peak") == peak
    assert row(text, "verdict") == verdict


def test_several_plans_stand_side_by_side_in_even_tables():
    plans = [estimate_on(), estimate_on("a100", 16), estimate_on("v5e", 16)]
    text = table(plans)
    assert text.splitlines()[0].split() == ["h100x8", "a100-80x16", "v5e-16"]
    assert row(text, "devices").split("  ")[0] == "8 on 1 host"
    assert "16 on 2 hosts" in row(text, "devices")
    text = table([estimate_on(num_devices=8 * (index + 1)) for index in range(5)])
    heads = [line for line in text.splitlines() if line.lstrip().startswith("h100x")]
    assert [len(line.split()) for line in heads] == [3, 2]


def test_plans_on_one_target_are_told_apart_by_layout():
    one = estimate_on()
    other = dataclasses.replace(one, config=one.config.model_copy(update={"parallel": ParallelConfig(data=8, fsdp=1)}))
    named = ["h100x8 fsdp=8, remat=dots", "h100x8 data=8, remat=dots", "v5e-8"]
    assert labels([one, other, estimate_on("v5e")]) == named
    assert labels([one, one]) == [f"{named[0]} #1", f"{named[0]} #2"]


def test_remarks_are_said_once_and_name_their_targets():
    text = table([estimate_on(advice=("remat.policy=full: 12 GiB",)), estimate_on("v5e", 8)])
    assert "- h100x8: remat.policy=full: 12 GiB" in text
    assert text.count("256 ids, as bytes have") == 1


@pytest.mark.parametrize("estimates", CASES.values(), ids=CASES)
def test_tables_are_narrow_and_json_round_trips(estimates):
    assert max(map(len, table(estimates).splitlines())) <= 120
    for estimate in estimates:
        found = json.loads(json.dumps(as_json(estimate), allow_nan=False))
        assert found == as_json(estimate)
        assert Config.model_validate(found["config"], strict=False) == estimate.config
        assert found["memory"]["total_bytes"] == sum(estimate.memory.parts.values())
        assert found["memory"]["parts_bytes"] == estimate.memory.parts


def test_json_has_what_follows_from_the_figures():
    found = as_json(estimate_on(exact=EXACT))
    assert found["fits"] is True
    assert found["time"]["tokens_per_second"] == pytest.approx(64 * 4096 / 1.25)
    assert found["time"]["bubble_seconds"] == pytest.approx(0.25)


def fetches(page: str) -> list[str]:
    """What a browser would get from elsewhere: links of any kind but those within the page."""
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')>\s]+)""", page)
    return [link for link in links if not link.startswith(("#", "data:"))]


# Bars of memory, bars of compilers, bars of time, roofs, points of cost: memory always, the others where there is
# something to draw.
@pytest.mark.parametrize(
    ("case", "pictures"),
    [
        ("with the compiler", (1, 1, 1, 1, 2)),
        ("nothing known", (1, 0, 0, 0, 0)),
        ("one known of two", (2, 0, 1, 1, 2)),
        # 91 GiB of 80: no time and no cost of what does not fit.
        ("thirteen parts", (1, 0, 0, 0, 0)),
        ("ten", (10, 0, 10, 10, 20)),
        ("no prices", (1, 0, 1, 1, 0)),
        ("no link", (1, 0, 0, 1, 0)),
    ],
)
def test_page_has_its_pictures_and_fetches_nothing(case, pictures, tmp_path):
    path = tmp_path / "plan.html"
    write_page(CASES[case], path)
    page = path.read_text(encoding="utf-8")
    marks = ("data-memory=", "data-compiled=", "data-time=", 'class="roof"', "data-hours=")
    assert tuple(page.count(mark) for mark in marks) == pictures
    assert fetches(page) == []
    assert "http" not in page
    assert page.count("<script>") == 1, "the hover values"
    assert len(set(re.findall(r'\bid="([^"]+)"', page))) == len(re.findall(r'\bid="([^"]+)"', page))
    for name in labels(CASES[case]):
        assert name in page


def test_page_escapes_what_others_wrote(tmp_path):
    evil = '<script>alert("1")</script> & $x_1$'
    made = estimate_on(notes=(evil,), advice=(evil,), exact_missing=evil)
    memory = dataclasses.replace(made.memory, parts={evil: GIB})
    config = made.config.model_copy(update={"name": evil})
    write_page([dataclasses.replace(made, memory=memory, config=config)], tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    # Title, heading, row and picture of the part, peak, note, advice.
    assert page.count("&lt;script&gt;") >= 7
    assert "$x_1$" in page


def test_names_of_points_do_not_lie_over_each_other():
    for wanted in ([0.1, 0.5, 0.9], [0.5] * 8, [0.0, 0.01, 0.99, 1.0, 1.0], [0.3] * 60):
        places = spread(wanted, 0.04)
        gaps = [after - before for before, after in itertools.pairwise(places)]
        # The sums of places differ from each other by rounding.
        assert min(gaps) >= min(0.04, 0.96 / len(wanted)) - 1e-9
        assert places[0] >= 0.02 - 1e-9
        assert places[-1] <= 0.98 + 1e-9
        if len(wanted) == 3:
            assert places == pytest.approx(wanted)
