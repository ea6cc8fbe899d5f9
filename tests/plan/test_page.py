"""The plan's page: its figures are those of `plan --json`, what does not fit costs nothing, layouts of any size."""

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest

from jaxtrain.cli import main
from jaxtrain.config.load import load_config
from jaxtrain.layout.rules import AXES
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.compilers.exact import ExactMemory
from jaxtrain.plan.report.page import write_page
from jaxtrain.plan.report.page_html import rate_text, seconds_text, size_text, ticks
from jaxtrain.plan.report.page_layout import device_grid
from jaxtrain.plan.report.show import as_json, table
from jaxtrain.plan.search.layouts import search
from jaxtrain.plan.search.make import analytic_plan


class Elements(HTMLParser):
    """The attributes of all elements of a page, and its text, without style sheet and script."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[dict[str, str]] = []
        self.text = ""
        self.feed(re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL))

    def handle_starttag(self, tag, attrs):
        self.found.append({"tag": tag, **{name: value or "" for name, value in attrs}})

    def handle_data(self, data):
        self.text += data

    def having(self, name: str) -> list[dict[str, str]]:
        return [one for one in self.found if name in one]


def plans(words: str):
    """Estimates by formulas of `CONFIG on TARGETS key=value ...`."""
    config, targets, *overrides = words.split()
    loaded = load_config(config, overrides=overrides).config
    return [analytic_plan(loaded, target) for target in parse_targets(targets)]


def page_of(estimates, path, **more) -> str:
    write_page(estimates, path / "plan.html", **more)
    return (path / "plan.html").read_text(encoding="utf-8")


FITTING = {
    "one host": "gpt2_124m h100x8",
    "a pipeline between hosts": "llama3_8b h100x64 parallel.pipe=2 parallel.fsdp=8 parallel.tensor=4 "
    "train.accumulation_steps=1 parallel.microbatches=4",
    "a ResNet on a TPU": "resnet50_imagenet v5e-8",
}


@pytest.mark.parametrize("words", FITTING.values(), ids=FITTING.keys())
def test_figures_are_those_of_the_json(words, tmp_path):
    (estimate,) = plans(words)
    page = Elements(page_of([estimate], tmp_path))
    answer = json.loads(json.dumps(as_json(estimate)))
    memory, time, cost = answer["memory"], answer["time"], answer["cost"]

    parts = {one["data-part"]: int(one["data-bytes"]) for one in page.having("data-bytes")}
    assert parts == {name: count for name, count in memory["parts_bytes"].items() if count}
    assert sum(parts.values()) == memory["total_bytes"]

    (span,) = page.having("data-likely")
    said = {key: float(span[f"data-{name}"]) for name, key in (("low", "low_seconds"), ("high", "high_seconds"))}
    assert said == {key: time[key] for key in said}
    assert float(span["data-likely"]) == time["seconds"]
    seconds = {one["data-part"]: float(one["data-seconds"]) for one in page.having("data-seconds")}
    blocks = {block["name"]: block["seconds"] for block in time["blocks"] if block["seconds"]}
    assert {name: seconds[name] for name in blocks} == blocks
    # Each is a sum of the same numbers in another order.
    assert math.fsum(seconds.values()) == pytest.approx(time["seconds"], rel=1e-9)

    points = {(float(one["data-hours"]), float(one["data-usd"])) for one in page.having("data-hours")}
    expected = {(cost["hours"], cost["on_demand_usd"])}
    if cost["spot"] is not None:
        expected.add((cost["spot"]["hours"], cost["spot"]["usd"]))
    assert points == expected


def test_the_range_reaches_as_far_as_its_numbers(tmp_path):
    page = page_of(plans("gpt2_124m h100x8"), tmp_path)
    low, likely, high = (float(re.search(rf'data-{name}="([^"]+)"', page)[1]) for name in ("low", "likely", "high"))
    left, width = map(float, re.search(r'class="whisker".*?left:([\d.]+)%;width:([\d.]+)%', page).groups())
    place = float(re.search(r'class="whisker".*?<i style="left:([\d.]+)%', page)[1])
    # The page has percent with three decimals.
    assert (left, width, place) == pytest.approx(
        (100 * low / high, 100 * (high - low) / high, 100 * likely / high), abs=2e-3
    )


NOWHERE = "llama3_8b rtx4090 parallel.fsdp=1"


def test_what_does_not_fit_has_no_time_and_no_cost(tmp_path):
    estimates = plans(NOWHERE)
    assert estimates[0].cost is not None
    page = Elements(page_of(estimates, tmp_path))
    assert page.having("data-bytes")
    for name in ("data-time", "data-seconds", "data-hours", "data-likely"):
        assert page.having(name) == []
    for text in (page.text, table(estimates)):
        assert "does not fit" in text
        assert "$" not in text
        assert "hours" not in text
    assert page.text.count("Not shown, does not fit: rtx4090.") == 3
    # Tools get every figure, with whether it fits.
    answer = as_json(estimates[0])
    assert answer["fits"] is False
    assert answer["cost"]["on_demand_usd"] > 0


def test_what_does_not_fit_is_left_out_beside_what_does(tmp_path):
    estimates = plans("gpt2_124m h100x8,rtx4090,v5e-8")
    assert [one.fits for one in estimates] == [True, False, True]
    page = Elements(page_of(estimates, tmp_path))
    assert [one["data-memory"] for one in page.having("data-memory")] == ["h100x8", "rtx4090", "v5e-8"]
    assert [one["data-time"] for one in page.having("data-time")] == ["h100x8", "v5e-8"]
    assert {one["data-of"] for one in page.having("data-hours")} == {"h100x8", "v5e-8"}
    assert "Not shown, does not fit: rtx4090." in page.text
    (advice,) = re.findall(r"What makes it fit(.*)Layout", page.text, re.DOTALL)
    assert estimates[1].advice[0] in advice


def test_formulas_look_assumed_and_compilers_compiled(tmp_path):
    (estimate,) = plans("gpt2_124m h100x8")
    exact = ExactMemory(2**30, 7 * 2**30, None, None, 1.0)
    page = Elements(page_of([dataclasses.replace(estimate, exact=exact)], tmp_path))
    (compiled,) = page.having("data-compiled")
    assert compiled["class"] == "compiled"
    assert int(compiled["data-compiled"]) == exact.peak_bytes
    assert all("segment" in one["class"] for one in page.having("data-bytes"))
    assert "peak by the hardware's own compiler" in page.text
    assert "by the compiler" in table([dataclasses.replace(estimate, exact=exact)])


def test_candidates_are_sorted_and_the_chosen_one_is_marked(tmp_path):
    (target,) = parse_targets("h100x8")
    found = search(load_config("gpt2_124m").config, target, vary=("mesh", "remat"))
    estimates = list(found.ranked[:2])
    page = page_of(estimates, tmp_path, searches=[(target, found)])
    rows = re.findall(r"<tr[^>]*>(?:(?!</tr>).)*</tr>", page.split("Candidates of the search")[1].split("</table>")[0])
    fitting = [row for row in rows if re.match(r"<tr[^>]*><td>\d+<", row)]
    assert len(fitting) == min(20, len(found.ranked))
    assert [one["class"] for one in Elements("".join(rows)).having("class") if one["tag"] == "tr"][:1] == ["chosen"]
    assert ["<b>chosen</b>" in row for row in fitting] == [True] + [False] * (len(fitting) - 1)
    assert "<b>compared</b>" in fitting[1]
    for row, one in zip(fitting, found.ranked, strict=False):
        assert seconds_text(one.time.seconds) in row
    assert all("$" not in row for row in rows if "does not fit" in row)


def test_a_layout_that_the_compiler_finds_too_large_has_no_cost(tmp_path, monkeypatch, capsys):
    def compiler(estimate, report):
        # Too large for all layouts that keep activations.
        peak = 2**30 if estimate.config.remat.policy == "full" else 2**40
        return dataclasses.replace(estimate, exact=ExactMemory(2**28, peak, None, None, 1.0))

    monkeypatch.setattr("jaxtrain.commands.plan.with_compiler", compiler)
    path = tmp_path / "plan.html"
    words = ["plan", "gpt2_124m", "--on", "h100", "--search", "--vary", "remat", "--html", str(path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.count("too large by the compiler, 1.0 TiB: ") == 2
    page = path.read_text(encoding="utf-8").split("Candidates of the search")[1].split("</table>")[0]
    rows = {row.split("remat=")[1].split(",")[0]: row for row in page.split("<tr")[2:] if "remat=" in row}
    assert "<b>chosen</b>" in rows["full"]
    assert "$" in rows["full"]
    for policy in ("none", "dots"):
        assert "does not fit, by the compiler" in rows[policy]
        assert "1.0 TiB" in rows[policy]
        assert "$" not in rows[policy]
        assert " ms" not in rows[policy]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(
            "gpt2_124m h100x16 parallel.fsdp=2",
            ["data 8 x fsdp 2 = 16 devices on 2 hosts", "Between hosts, over the network: 50 GB/s", "over NVLink: 450"],
            id="an axis between hosts and one inside",
        ),
        pytest.param(
            "gpt2_124m v5e-8 parallel.zero=1",
            ["data 8: 8 devices on 1 slice", "optimizer state (ZeRO 1)", "Inside the slice, over ICI: 200 GB/s"],
            id="ZeRO in a slice",
        ),
        pytest.param("gpt2_124m h100x1024", ["Each box is 16 devices, 2 hosts,"], id="1,024 devices"),
    ],
)
def test_layout_says_what_is_where(words, said, tmp_path):
    page = Elements(page_of(plans(f"{words} train.global_batch_size=4096 train.accumulation_steps=1"), tmp_path))
    for line in said:
        assert line in page.text
    assert sum(one.get("class") == "cell" for one in page.found) <= 64


@pytest.mark.parametrize(
    ("degrees", "island", "boxes", "per_box"),
    [
        pytest.param({}, 8, 1, 1, id="one device"),
        pytest.param({"data": 16, "fsdp": 8}, 8, 64, 2, id="128 devices"),
        pytest.param({"pipe": 4, "fsdp": 32, "tensor": 8}, 8, 64, 16, id="1,024 devices, boxes of hosts"),
        pytest.param({"data": 3, "fsdp": 24}, 72, 36, 2, id="a rack of 72"),
        pytest.param({"data": 509}, 1, 1, 509, id="a prime number of hosts"),
    ],
)
def test_boxes_hold_every_device_once(degrees, island, boxes, per_box):
    grid = device_grid(degrees, island)
    flat = [box for some in grid.islands for box in some]
    assert (len(flat), grid.devices_per_box) == (boxes, per_box)
    total = math.prod(degrees.values())
    assert [number for box in flat for number in range(box.first, box.first + box.count)] == list(range(total))
    for box in flat:
        first, last = box.first // island, (box.first + box.count - 1) // island
        assert first == last or box.count % island == 0
    # Brute force: the devices that share all coordinates but one with device 0.
    sizes = [degrees.get(axis, 1) for axis in AXES]
    for axis, group in grid.first_group.items():
        stride = math.prod(sizes[AXES.index(axis) + 1 :])
        numbers = [index * stride for index in range(degrees[axis])]
        assert group == {number // per_box for number in numbers}


def test_coordinates_of_a_device_follow_the_order_of_the_axes():
    grid = device_grid({"data": 2, "fsdp": 4, "tensor": 2}, 8)
    assert grid.islands[1][3].coordinates == {"data": (1, 1), "fsdp": (1, 1), "tensor": (1, 1)}
    assert len(grid.islands) == 2
    many = device_grid({"data": 4, "fsdp": 64}, 8)
    assert many.islands[0][1].coordinates == {"data": (0, 0), "fsdp": (4, 7)}


def test_numbers_have_units_and_three_digits():
    seconds = [seconds_text(value) for value in (0.1470, 0.00939, 2.5e-5, 107.2, 0.0, math.inf)]
    assert seconds == ["147 ms", "9.39 ms", "25.0 µs", "107 s", "0 ms", "not known"]
    assert rate_text(989e12, "FLOP/s") == "989 TFLOP/s"
    assert [rate_text(value, "B/s") for value in (3.35e12, 1.5625e9, 999.6e9)] == ["3.35 TB/s", "1.56 GB/s", "1 TB/s"]
    assert [size_text(value) for value in (512, 831 * 2**20, 39.3 * 2**30)] == ["512 B", "0.812 GiB", "39.3 GiB"]
    assert ticks(79.11) == [0, 20, 40, 60]
    assert ticks(0) == [0.0]
