"""Estimates shown as a table, as JSON and as a page: what stands there, and that nothing breaks where figures lack."""

import dataclasses
import itertools
import json
import math
import re

import pytest

from jaxtrain.config.schema import Config, ParallelConfig, TrainConfig
from jaxtrain.plan.catalogue.hardware import Hardware, Target, find, target_of
from jaxtrain.plan.compilers.exact import ExactMemory
from jaxtrain.plan.cost.spot import Spot
from jaxtrain.plan.cost.training import Cost
from jaxtrain.plan.memory.record import Memory
from jaxtrain.plan.report.page import write_page
from jaxtrain.plan.report.page_plots import spread
from jaxtrain.plan.report.rows import labels, merged
from jaxtrain.plan.report.show import as_json, table
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.time.record import BlockTime, StepTime, Traffic
from jaxtrain.plan.workload.record import Workload

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


@pytest.mark.parametrize(
    ("label", "cells"),
    [
        pytest.param("devices", "8 on 1 host", id="devices"),
        pytest.param("layout", "fsdp 8", id="degrees above 1 only"),
        pytest.param("parameters", "8.03B (8,030,261,248)", id="parameters"),
        pytest.param("batch", "64 rows of 4,096 tokens", id="batch"),
        pytest.param("activations", r"15.00 GiB +75.0 %", id="part with its share"),
        pytest.param("total", r"20.00 GiB +100.0 %", id="total"),
        pytest.param("of capacity", "25.0 % of 80.00 GiB", id="of capacity"),
        pytest.param("peak", "analytic 20.00 GiB, compiler 22.00 GiB (compiled in 12.3 s)", id="both peaks"),
        pytest.param("verdict", "fits: 22.00 GiB of 76.00 GiB, by the compiler", id="verdict"),
        pytest.param("step time", "1,250.0 ms (1,000.0 to 2,500.0)", id="step with its range"),
        pytest.param("tokens/s", "210k (26.2k per device)", id="64 x 4096 / 1.25"),
        pytest.param("MFU", "40.0 % (20.0 to 50.0 %)", id="MFU with its range"),
        pytest.param("bound by", "memory bandwidth", id="bound"),
        pytest.param("attention scores", r"400.0 ms, bound by memory, 30 FLOPs per byte +32.0 %", id="block"),
        pytest.param("pipeline bubble", r"20.0 % of the pipeline, 250.0 ms +20.0 %", id="bubble, 1.25 - 0.8 - 0.2"),
        pytest.param("time to train", "100.0 hours (4 d 4:00)", id="hours"),
        pytest.param("on demand", "$2,400", id="rent"),
        pytest.param("spot", "$1,224 in 102.0 hours", id="spot"),
        pytest.param("spot checkpoints", "every 24.1 minutes", id="interval"),
        pytest.param("spot efficiency", "98.0 %, 4.4 interruptions expected", id="efficiency"),
        pytest.param("energy", "560 kWh, $67.20", id="energy"),
        pytest.param("break-even", "after 4,360 hours of rent", id="break-even"),
    ],
)
def test_a_single_plan_has_the_row(label, cells):
    text = table([estimate_on(exact=EXACT)])
    setup, rest = text.split("\nmemory of one device")
    found = row(setup if label == "parameters" else rest if label not in setup else setup, label)
    pattern = cells if " +" in cells else re.escape(cells)
    assert re.fullmatch(pattern, found.strip()), found


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


def test_several_plans_stand_side_by_side():
    plans = [estimate_on(), estimate_on("a100", 16), estimate_on("v5e", 16)]
    text = table(plans)
    assert text.splitlines()[0].split() == ["h100x8", "a100-80x16", "v5e-16"]
    assert row(text, "devices").split("  ")[0] == "8 on 1 host"
    assert "16 on 2 hosts" in row(text, "devices")
    assert "share" not in text.splitlines()[0]


@pytest.mark.parametrize(("count", "tables"), [(4, [4]), (5, [3, 2]), (9, [3, 3, 3]), (13, [4, 3, 3, 3])])
def test_many_plans_wrap_into_even_tables(count, tables):
    text = table([estimate_on(num_devices=8 * (index + 1)) for index in range(count)])
    heads = [line for line in text.splitlines() if line.lstrip().startswith("h100x")]
    assert [len(line.split()) for line in heads] == tables


def test_rows_of_some_plans_only_keep_their_place():
    assert merged([["a", "c", "total"], ["a", "b", "c", "total"]]) == ["a", "b", "c", "total"]
    assert merged([["a", "total"], ["a", "b", "total"], ["x"]]) == ["x", "a", "b", "total"]


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


@pytest.mark.parametrize("estimates", CASES.values(), ids=CASES.keys())
def test_tables_stay_within_120_columns(estimates):
    lines = table(estimates).splitlines()
    assert max(map(len, lines)) <= 120
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("estimates", CASES.values(), ids=CASES.keys())
def test_json_round_trip(estimates):
    for estimate in estimates:
        found = json.loads(json.dumps(as_json(estimate), allow_nan=False))
        assert found == as_json(estimate)
        assert Config.model_validate(found["config"], strict=False) == estimate.config
        assert found["memory"]["total_bytes"] == sum(estimate.memory.parts.values())
        assert found["memory"]["parts_bytes"] == estimate.memory.parts


def test_json_holds_every_field_of_the_records():
    found = as_json(estimate_on(exact=EXACT))
    owners = {
        "": (Estimate, found),
        "target": (Target, found["target"]),
        "hardware": (Hardware, found["target"]["hardware"]),
        "time": (StepTime, found["time"]),
        "cost": (Cost, found["cost"]),
        "spot": (Spot, found["cost"]["spot"]),
        "exact": (ExactMemory, found["exact"]),
        "workload": (Workload, found["workload"]),
    }
    for name, (record, values) in owners.items():
        assert {field.name for field in dataclasses.fields(record)} <= set(values), name
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
        ("one", (1, 0, 1, 1, 2)),
        ("with the compiler", (1, 1, 1, 1, 2)),
        ("nothing known", (1, 0, 0, 0, 0)),
        ("one known of two", (2, 0, 1, 1, 2)),
        # 91 GiB of 80: no time and no cost of what does not fit.
        ("thirteen parts", (1, 0, 0, 0, 0)),
        ("empty memory", (1, 0, 1, 1, 2)),
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


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param([0.1, 0.5, 0.9], id="far apart"),
        pytest.param([0.5] * 8, id="all in one place"),
        pytest.param([0.0, 0.01, 0.99, 1.0, 1.0], id="at both ends"),
        pytest.param([0.3] * 60, id="more than there is room for"),
    ],
)
def test_names_of_points_do_not_lie_over_each_other(wanted):
    places = spread(wanted, 0.04)
    gaps = [after - before for before, after in itertools.pairwise(places)]
    # The sums of places differ from each other by rounding.
    assert min(gaps) >= min(0.04, 0.96 / len(wanted)) - 1e-9
    assert places[0] >= 0.02 - 1e-9
    assert places[-1] <= 0.98 + 1e-9
    if len(wanted) == 3:
        assert places == pytest.approx(wanted)
