"""The hardware catalogue: sources of figures, what `--on` may be, a user's own prices, what a plan makes of it all."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.plan.estimate import analyse
from jaxtrain.plan.hardware import FIGURES, catalogue, hardware_json, hardware_of, hardware_table
from jaxtrain.plan.targets import parse_targets, rented_devices
from jaxtrain.runtime.devices import device_peaks

ROOT = Path(__file__).resolve().parent.parent.parent
CATALOGUE = catalogue()
MEASURED_LATER = "cpu"


def test_every_figure_has_a_source_with_a_date():
    for entry in CATALOGUE.values():
        known = {figure for figure in FIGURES if getattr(entry, figure) not in (None, {})}
        assert set(entry.sources) == known, entry.name
        assert "hardware.yaml" not in entry.sources.values()
        # A standard, an assumption and what is measured later have no date; everything else is of some year.
        undated = {key for key, text in entry.sources.items() if not re.search(r"\b(19|20)\d\d\b", text)}
        allowed = ("assumed", "one machine", "libtpu", "Google Cloud")
        assert all(entry.sources[key].startswith(allowed) for key in undated), entry.name
        for key in ("on_demand_usd_hour", "spot_usd_hour"):
            assert re.search(r"\b20\d\d-\d\d\b", entry.sources.get(key, "2026-01")), f"{key} of {entry.name}"


# kind of device: (name, format, TFLOP/s of the vendor's datasheet, without sparsity)
PEAKS = {
    "NVIDIA H100 80GB HBM3": ("h100", "bf16", 989.4),
    "NVIDIA A100-SXM4-80GB": ("a100-80", "tf32", 156.0),
    "TPU v5 lite": ("v5e", "bf16", 197.0),
    "TPU v6 lite": ("v6e", "bf16", 918.0),
}


def test_peaks_are_those_of_the_vendors():
    for kind, (name, number_format, tera) in PEAKS.items():
        assert device_peaks(kind)[number_format] == pytest.approx(tera * 1e12)
        assert CATALOGUE[name].peak_flops[number_format] == pytest.approx(tera * 1e12)
        assert hardware_of(kind).name == name
    kinds = [kind for entry in CATALOGUE.values() for kind in entry.device_kinds]
    assert len(set(kinds)) == len(kinds) >= 24
    # One name, less compute and no NVLink: they must not pass for the SXM modules.
    assert hardware_of("Tesla V100-PCIE-16GB") is None


# what is asked for: name, devices, islands and topology of each target
FORMS = {
    "2xh100x8": [("h100x16", 16, 2, "h100:2x8")],
    "gb200x144": [("gb200x144", 144, 2, None)],
    "a100-40": [("a100-40", 1, 1, None)],
    "a100-8": [("a100-80x8", 8, 1, None)],
    "h100x8, v5e-16,rtx4090": [("h100x8", 8, 1, "h100:1x8"), ("v5e-16", 16, 1, "v5e:4x4"), ("rtx4090", 1, 1, None)],
    "2xv5e-256": [("v5e-512", 512, 2, "v5e:16x16")],
    "trillium-64": [("v6e-64", 64, 1, "v6e:8x8")],
    "v5p-16": [("v5p-16", 16, 1, "v5p:2x2x4")],
    "v7x-8": [("v7x-8", 8, 1, "tpu7x:2x2x1")],  # two devices a chip
    "cpux8": [("cpux8", 8, 1, None)],
    # As people write them.
    "8xH100-SXM5": [("h100x8", 8, 1, "h100:1x8")],
    "A100-40GB": [("a100-40", 1, 1, None)],
    "tpu-v5e-16": [("v5e-16", 16, 1, "v5e:4x4")],
    "mi300x8": [("mi300xx8", 8, 1, None)],
    "8 x A100 40 GB": [("a100-40x8", 8, 1, None)],
    "RTX 4070 Ti": [("rtx4070ti", 1, 1, None)],
    "v100-32gb": [("v100-32", 1, 1, None)],
    # Counts that cannot be had become the next larger ones.
    "h100x12": [("h100x16", 16, 2, "h100:2x8")],
    "v5p": [("v5p-4", 4, 1, "v5p:2x2x1")],
}


@pytest.mark.parametrize("text", FORMS)
def test_forms(text):
    told = []
    targets = parse_targets(text, told=told.append)
    assert [(one.name, one.num_devices, one.num_hosts, one.topology) for one in targets] == FORMS[text]
    assert parse_targets(",".join(target.name for target in targets)) == targets
    assert len(told) == (text in ("h100x12", "v5p"))


def test_names_that_drivers_print_are_read():
    for entry in CATALOGUE.values():
        for kind in entry.device_kinds:
            assert parse_targets(kind)[0].hardware is entry, kind
            assert parse_targets(f"{kind} x 256")[0].hardware is entry, kind


# Other cards than those of the catalogue: memory, form or variant that it does not have.
OTHER_CARDS = {
    **dict.fromkeys(("NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB", "A100X", "A800-SXM4-80GB"), "a100-40"),
    **dict.fromkeys(("H100 NVL", "NVIDIA H100 64GB HBM2", "8xH100-96GB", "H800", "H100 80GB MIG 1g.10gb"), "h100"),
    **dict.fromkeys(("Tesla V100-PCIE-16GB", "V100-SXM3-32GB"), "v100-16"),
    **dict.fromkeys(("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 D", "4090D"), "rtx4090"),
    **{"L40": "l4", "B300": "b200", "GH200 480GB": "h200", "NVIDIA H20": "h200", "MI300A": "mi300x", "T4G": "t4"},
    **{"RTX 4070 Ti SUPER": "rtx4070ti", "TPU v4 lite": "v4", "TPU v5x": "v5p", "NVIDIA A10": "a10g"},
}


@pytest.mark.parametrize("name", OTHER_CARDS)
def test_another_card_is_refused_with_near_ones(name):
    with pytest.raises(ConfigError, match=rf"no '{re.escape(name.lower())}' in .* mean .*\b{OTHER_CARDS[name]}\b"):
        parse_targets(name)


BAD = {
    "h10x8": "did you mean h100",
    "gaudi": "add a row with --hardware FILE",
    ",": "write NAME",
    "h100x8x2": "no 'h100x8x2' in the catalogue: did you mean h100",
    f"h100x{10**20}": "N at most 999999",
    "4000xh100x4000": "N at most 999999",
    "h100x0": "cannot read the hardware 'h100x0'",
    "2xv5e-16": "cannot read the hardware '2xv5e-16'",  # several slices are each the largest there is
}


@pytest.mark.parametrize("text", BAD)
def test_what_cannot_be_had_is_one_line_with_what_can(text):
    with pytest.raises(ConfigError, match=re.escape(BAD[text])):
        parse_targets(text)


def test_a_file_of_the_user_is_laid_over_the_catalogue(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(
        "h100:\n  on_demand_usd_hour: 2.5\n  spot_usd_hour: null\n  peak_flops: {fp8: 1.5e15}\n"
        "v5e:\n  on_demand_usd_hour: 0.6\n  sources: {on_demand_usd_hour: 'our contract, 2026-10'}\n"
        "v3: {on_demand_usd_hour: 0.2}\n"
    )
    ours = catalogue(path)
    assert set(ours) == set(CATALOGUE)
    h100, shipped = ours["h100"], CATALOGUE["h100"]
    assert (h100.on_demand_usd_hour, h100.spot_usd_hour) == (2.5, None)
    assert h100.peak_flops == shipped.peak_flops | {"fp8": 1.5e15}
    assert h100.sources["on_demand_usd_hour"] == "prices.yaml"
    assert "spot_usd_hour" not in h100.sources
    assert h100.sources["memory_bytes"] == shipped.sources["memory_bytes"]
    assert (h100.memory_bytes, h100.shapes) == (shipped.memory_bytes, shipped.shapes)
    assert ours["v5e"].sources["on_demand_usd_hour"] == "our contract, 2026-10"
    assert ours["v3"].spot_usd_hour is None, "that of the catalogue is above our price"
    assert parse_targets("h100x8", ours)[0].hardware == h100


def test_a_row_that_the_page_shows_is_all_that_a_laptop_needs(tmp_path):
    page = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
    path = tmp_path / "my.yaml"
    path.write_text(textwrap.dedent(re.search(r"^    m3-max:\n(?:    .+\n)+", page, re.MULTILINE)[0]))
    ours = catalogue(path)
    (target,) = parse_targets("m3-max", ours)
    assert analyse(load_config("smollm2_lora", weights=False).config, target).fits
    assert ours["m3-max"].sources["host_bandwidth"] == "assumed"
    assert ours["m3-max"].sources["memory_bytes"] == "my.yaml"


MISTAKES = {
    "h100: {on_demand_usd: 2}": "no key 'on_demand_usd'; the nearest is on_demand_usd_hour",
    "h100: {on_demand_usd_hour: -1}": "on_demand_usd_hour: -1: Input should be greater than or equal to 0",
    "h100: {kind: fpga}": "kind: 'fpga': Input should be 'gpu', 'tpu' or 'cpu'",
    "h300: {kind: gpu}": "h300 is not in the catalogue, so it needs ",
    "- h100": "mapping",
}


@pytest.mark.parametrize("text", MISTAKES, ids=list(MISTAKES.values()))
def test_mistakes_in_a_file_of_the_user(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"mine\.yaml.*{re.escape(MISTAKES[text])}"):
        catalogue(path)


def test_listings():
    lines = hardware_table(CATALOGUE.values()).splitlines()
    assert max(map(len, lines)) <= 120
    rows = {line.split()[0]: line.split() for line in lines[2 : 2 + len(CATALOGUE)]}
    assert rows["h100"][1:8] == ["79.11", "3.35", "989", "1979", "450", "50.0", "6.88"]
    entries = json.loads(json.dumps(hardware_json(CATALOGUE.values())))
    assert [entry["name"] for entry in entries] == list(rows) == list(CATALOGUE)


def test_kernels_go_with_the_vendor(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("h100: {vendor: null}\n")
    (other,), (shipped,) = parse_targets("h100x8", catalogue(path)), parse_targets("h100x8")
    config = load_config("llama3_8b", overrides=["precision.policy=fp8"]).config
    assert analyse(config, other).time.seconds > 1.2 * analyse(config, shipped).time.seconds


def test_a_card_without_bf16_names_fp16():
    (card,) = parse_targets("Tesla T4")
    notes = analyse(load_config("llama2_13b_nf4", weights=False).config, card).notes
    assert any(note.endswith("no time; set precision.policy=fp16") for note in notes)


# target: devices whose rent is paid, by the counts that the catalogue has.
RENTED = {"h100x3": 4, "b200x4": 8, "gb200x6": 8, "2xv5e-256": 512}


@pytest.mark.parametrize("on", RENTED)
def test_rent_is_that_of_a_count_that_can_be_had(on):
    (target,) = parse_targets(on)
    assert rented_devices(target) == RENTED[on]
    overrides = ["precision.policy=bf16", "parallel.data=auto", f"train.global_batch_size={target.num_devices}"]
    estimate = analyse(load_config("quickstart", overrides=overrides).config, target)
    hourly = estimate.cost.on_demand_usd / estimate.cost.hours
    assert hourly == pytest.approx(RENTED[on] * target.hardware.on_demand_usd_hour)
    spot = target.hardware.spot_usd_hour
    assert estimate.cost.spot_usd == (None if spot is None else pytest.approx(RENTED[on] * spot * estimate.cost.hours))
    is_said = any(f"the cost is for {RENTED[on]} devices" in note for note in estimate.notes)
    assert is_said == (RENTED[on] != target.num_devices)
