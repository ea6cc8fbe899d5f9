"""The hardware catalogue: every figure has a source and is possible, what `--on` may be, a user's own prices."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.plan.catalogue import hardware_file
from jaxtrain.plan.catalogue.hardware import (
    Hardware,
    catalogue,
    find,
    hardware_of,
    measured_cpu,
    parse_targets,
    target_of,
)
from jaxtrain.plan.catalogue.listing import hardware_json, hardware_table
from jaxtrain.plan.search.analyse import analyse
from jaxtrain.runtime.peaks import device_peaks

ROOT = Path(__file__).resolve().parent.parent.parent
CATALOGUE = catalogue()
MEASURED_LATER = "cpu"
ENTRIES = [entry for name, entry in CATALOGUE.items() if name != MEASURED_LATER]
FIGURES = tuple(hardware_file._FIGURES)
SHIPPED = yaml.safe_load((ROOT / "jaxtrain/plan/catalogue/hardware.yaml").read_text(encoding="utf-8"))

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'jaxtrain[aot-tpu]'"
)


def entry_id(entry):
    return entry.name


def test_all_of_the_asked_hardware_is_there():
    gpus = "t4 p100 v100-16 v100-32 a10g a100-40 a100-80 l4 l40s h100 h100-pcie h200 b200 gb200"
    others = "rtx3090 rtx4070ti rtx4090 mi300x v3 v4 v5e v5p v6e v7x cpu"
    assert set(CATALOGUE) == set(f"{gpus} {others}".split())


def test_keys_of_the_file_are_the_fields():
    assert ["name", *hardware_file._KEYS] == [field.name for field in dataclasses.fields(Hardware)]


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=entry_id)
def test_every_figure_has_a_source_with_a_date(entry):
    known = {figure for figure in FIGURES if getattr(entry, figure) not in (None, {})}
    assert set(entry.sources) == known
    assert "hardware.yaml" not in entry.sources.values()
    # A standard, an assumption and what is measured later have no date; everything else is of some year.
    undated = {key for key, text in entry.sources.items() if not re.search(r"\b(19|20)\d\d\b", text)}
    assert all(entry.sources[key].startswith(("assumed", "one machine", "libtpu", "Google Cloud")) for key in undated)
    for key in ("on_demand_usd_hour", "spot_usd_hour", "purchase_usd"):
        if key in entry.sources:
            date = re.search(r"\b20\d\d-\d\d\b", entry.sources[key])
            assert date, f"{key} of {entry.name}: a price without a month"
            assert date[0] <= "2026-11"


@pytest.mark.parametrize("entry", ENTRIES, ids=entry_id)
def test_figures_are_possible(entry):
    flops = entry.peak_flops
    # A narrower format is never slower where hardware has both: no accelerator is built so.
    for wide, narrow in (("fp32", "tf32"), ("tf32", "bf16"), ("fp32", "fp16"), ("bf16", "fp8"), ("bf16", "int8")):
        assert flops.get(wide, 0) <= flops.get(narrow, math.inf)
    assert flops.get("bf16", flops.get("fp16")) == flops.get("fp16", flops.get("bf16"))
    assert 8e12 <= max(flops.values()) <= 6e15
    assert 10 * 2**30 <= entry.memory_bytes <= 200 * 2**30
    # Memory is read in between 5 ms (HBM of a small card) and 100 ms (GDDR6 of an inference card).
    assert 0.005 <= entry.memory_bytes / entry.memory_bandwidth <= 0.1
    assert entry.network_bandwidth < entry.link_bandwidth < entry.memory_bandwidth
    assert entry.board_watts is None or 30 <= entry.board_watts <= 1200
    assert entry.shapes[-1] <= entry.island
    if entry.kind == "tpu":
        assert entry.shapes[-1] == entry.island
    if None not in (entry.spot_usd_hour, entry.on_demand_usd_hour):
        assert entry.spot_usd_hour < entry.on_demand_usd_hour


PEAKS = [(kind, entry) for entry in ENTRIES for kind in entry.device_kinds if device_peaks(kind)]


@pytest.mark.parametrize(("kind", "entry"), PEAKS, ids=[kind for kind, _ in PEAKS])
def test_a_peak_that_runs_are_compared_with_stands_once(kind, entry):
    written = SHIPPED[entry.name]["peak_flops"]
    assert not set(written) & set(device_peaks(kind))
    assert entry.peak_flops == {**device_peaks(kind), **{name: float(peak) for name, peak in written.items()}}


@pytest.mark.parametrize(
    ("kind", "name", "number_format", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", "bf16", 989.4),  # NVIDIA H100 datasheet: 1,979 with sparsity
        ("NVIDIA A100-SXM4-80GB", "a100-80", "bf16", 312.0),  # NVIDIA A100 datasheet
        ("NVIDIA A100-SXM4-80GB", "a100-80", "tf32", 156.0),
        ("TPU v5 lite", "v5e", "bf16", 197.0),  # Google Cloud TPU documentation
        ("TPU v5", "v5p", "bf16", 459.0),
        ("TPU v6 lite", "v6e", "bf16", 918.0),
    ],
)
def test_peaks_are_those_of_the_vendors(kind, name, number_format, tera):
    assert device_peaks(kind)[number_format] == pytest.approx(tera * 1e12)
    assert CATALOGUE[name].peak_flops[number_format] == pytest.approx(tera * 1e12)


def test_kinds_of_device():
    assert len(PEAKS) >= 24
    kinds = [kind for entry in CATALOGUE.values() for kind in entry.device_kinds]
    assert len(set(kinds)) == len(kinds)
    assert {kind: hardware_of(kind).name for kind in kinds} == {
        kind: entry.name for entry in CATALOGUE.values() for kind in entry.device_kinds
    }
    assert hardware_of("TPU v99") is None
    # One name, less compute and no NVLink: they must not pass for the SXM modules.
    assert hardware_of("Tesla V100-PCIE-16GB") is None


# what is asked for: (names, devices, islands, topologies)
FORMS = {
    "h100": (["h100"], [1], [1], ["h100:1x1"]),
    "h100x8": (["h100x8"], [8], [1], ["h100:1x8"]),
    "h100-8": (["h100x8"], [8], [1], ["h100:1x8"]),
    "8xh100": (["h100x8"], [8], [1], ["h100:1x8"]),
    "2xh100x8": (["h100x16"], [16], [2], ["h100:2x8"]),
    "h100x3": (["h100x3"], [3], [1], ["h100:1x3"]),
    "H100-SXM x 8": (["h100x8"], [8], [1], ["h100:1x8"]),
    "h100-pcie-2": (["h100-pciex2"], [2], [1], [None]),
    "gb200x144": (["gb200x144"], [144], [2], [None]),
    "a100-40": (["a100-40"], [1], [1], [None]),
    "a100-40x8": (["a100-40x8"], [8], [1], [None]),
    "a100-80-8": (["a100-80x8"], [8], [1], [None]),
    "a100": (["a100-80"], [1], [1], [None]),
    "a100-8": (["a100-80x8"], [8], [1], [None]),
    "v100-32x8": (["v100-32x8"], [8], [1], [None]),
    "h100x8, v5e-16,rtx4090": (["h100x8", "v5e-16", "rtx4090"], [8, 16, 1], [1, 1, 1], ["h100:1x8", "v5e:4x4", None]),
    "v5e": (["v5e-1"], [1], [1], ["v5e:1x1"]),
    "v5e-8": (["v5e-8"], [8], [1], ["v5e:2x4"]),
    "v5ex8": (["v5e-8"], [8], [1], ["v5e:2x4"]),
    "2xv5e-256": (["v5e-512"], [512], [2], ["v5e:16x16"]),
    "trillium-64": (["v6e-64"], [64], [1], ["v6e:8x8"]),
    "v5p-8": (["v5p-8"], [8], [1], ["v5p:2x2x2"]),
    "v5p-16": (["v5p-16"], [16], [1], ["v5p:2x2x4"]),
    "v7x-8": (["v7x-8"], [8], [1], ["tpu7x:2x2x1"]),  # two devices a chip
    "v4-32": (["v4-32"], [32], [1], [None]),
    "cpux8": (["cpux8"], [8], [1], [None]),
    # As people write them.
    "4090x2": (["rtx4090x2"], [2], [1], [None]),
    "RTX 4090:2": (["rtx4090x2"], [2], [1], [None]),
    "H100-80GB": (["h100"], [1], [1], ["h100:1x1"]),
    "8xH100-SXM5": (["h100x8"], [8], [1], ["h100:1x8"]),
    "a100-80gb:8": (["a100-80x8"], [8], [1], [None]),
    "A100-40GB": (["a100-40"], [1], [1], [None]),
    "NVIDIA L4:4": (["l4x4"], [4], [1], [None]),
    "tpu-v5e-16": (["v5e-16"], [16], [1], ["v5e:4x4"]),
}


@pytest.mark.parametrize("text", FORMS)
def test_forms(text):
    targets = parse_targets(text)
    found = tuple([getattr(target, key) for target in targets] for key in ("name", "num_devices", "num_hosts"))
    assert (*found, [target.topology for target in targets]) == FORMS[text]
    again = parse_targets(",".join(target.name for target in targets))
    assert [target.name for target in again] == [target.name for target in targets]


BAD = {
    "h1000": "did you mean h100",
    "h10x8": "did you mean h100",
    "v9p-8": "did you mean v5p",
    "gaudi": "add a row with --hardware FILE",
    "m3-max": "it has no Macs and no cards of laptops; add a row",
    "rtx3070": "no 'rtx3070' in the catalogue: did you mean",
    "h100-40gb": "no 'h100-40gb' in the catalogue",
    "": "write NAME",
    ",": "write NAME",
    "h100x": "did you mean h100",
    "h100x8x2": "cannot read the hardware 'h100x8x2'",
    "h100x0": "0 devices of h100: ask for 1 or more",
    "0xh100": "ask for 1 or more",
    "2xv5e-16": "v5e-256",
}
LARGER = {
    "h100x12": "h100x16",
    "gb200-100": "gb200x144",
    "v5e-2": "v5e-4",
    "v5e-300": "v5e-512",
    "v5p": "v5p-4",
    "v7x-4": "v7x-8",
    "v3-16": "v3-32",
}


@pytest.mark.parametrize("text", LARGER)
def test_a_count_that_cannot_be_had_is_the_next_larger_and_said(text):
    told = []
    (target,) = parse_targets(text, told=told.append)
    assert target.name == LARGER[text]
    assert [line.endswith(f"the next larger is {target.name}") for line in told] == [True]


@pytest.mark.parametrize("text", BAD)
def test_what_cannot_be_had_is_one_line_with_what_can(text):
    with pytest.raises(ConfigError, match=re.escape(BAD[text])) as error:
        parse_targets(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a100", "Trillium", "ironwood", "v5litepod", " h200 "])
def test_aliases(name):
    assert find(name).name in {"a100-80", "h100", "v6e", "v7x", "v5e", "h200"}


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.kind == "tpu" and e.compiler], ids=entry_id)
def test_shape_of_a_slice_has_its_chips(entry):
    chips_per_device = 0.5 if entry.compiler == "tpu7x" else 1
    for num_devices in entry.shapes:
        shape = target_of(entry, num_devices).topology.removeprefix(f"{entry.compiler}:")
        assert math.prod(map(int, shape.split("x"))) == num_devices * chips_per_device


# Prints {topology: devices}, in a process of its own because a plugin cannot be unloaded.
DEVICES = """
import json, sys
from jaxtrain.plan.compilers.topology import topology_devices
print(json.dumps({name: len(topology_devices(name)) for name in sys.argv[1:]}))
"""


@needs_libtpu
def test_libtpu_takes_the_shapes_and_counts_devices_alike():
    targets = [target_of(e, n) for e in ENTRIES if e.kind == "tpu" and e.compiler for n in e.shapes]
    ran = subprocess.run(
        [sys.executable, "-c", DEVICES, *(target.topology for target in targets)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {target.topology: target.num_devices for target in targets}


def test_a_file_of_the_user_is_laid_over_the_catalogue(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(
        "h100:\n  on_demand_usd_hour: 2.5\n  spot_usd_hour: null\n  peak_flops: {fp8: 1.5e15}\n"
        "v5e:\n  on_demand_usd_hour: 0.6\n  sources: {on_demand_usd_hour: 'our contract, 2026-10'}\n"
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
    assert parse_targets("h100x8", ours)[0].hardware == h100
    # Neither the file nor what a caller does to the result reaches the shipped catalogue.
    ours.clear()
    assert catalogue()["h100"] == shipped


OWN = """
h300:
  title: a card of ours
  kind: gpu
  vendor: nvidia
  memory_bytes: 100e9
  memory_bandwidth: 5e12
  peak_flops: {bf16: 1e15}
  island: 4
  devices_per_host: 4
  link_bandwidth: 450e9
  network_bandwidth: 50e9
  host_bandwidth: 64e9
  board_watts: 700
  on_demand_usd_hour: 0
  spot_usd_hour: null
  purchase_usd: null
  shapes: [4]
  compiler: null
  device_kinds: []
  sources: {memory_bytes: x, memory_bandwidth: x, peak_flops: x, island: x, link_bandwidth: x, network_bandwidth: x,
    devices_per_host: x, host_bandwidth: x, board_watts: x, on_demand_usd_hour: x, shapes: x}
"""


def test_an_entry_of_the_user(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    ours = catalogue(path)
    assert ours["h300"].memory_bytes == 100_000_000_000
    assert parse_targets("2xh300x4", ours)[0].num_hosts == 2
    with pytest.raises(ConfigError, match="h300"):
        parse_targets("h301", ours)


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
    "h100: {on_demand_usd_hour: cheap}": "on_demand_usd_hour: 'cheap' is not US dollars",
    "h100: {on_demand_usd_hour: -1}": "-1 is not US dollars",
    "h100: {memory_bytes: null}": "None is not a count of bytes",
    "h100: {memory_bytes: 1.5}": "1.5 is not a count of bytes",
    "h100: {memory_bandwidth: 0}": "0 is not bytes/s",
    "h100: {board_watts: true}": "True is not watts",
    "h100: {peak_flops: {bf8: 1e15}}": "is not FLOP/s by format",
    "h100: {shapes: [8, 1]}": "is not counts of devices, the smallest first",
    "h100: {kind: fpga}": "'fpga' is not one of gpu, tpu, cpu",
    "h100: {compiler: b200}": "'b200' is not one of",
    "h100: {sources: {price: x}}": "is not text by figure",
    "h100: 2.5": "an entry is a mapping",
    "h101: {on_demand_usd_hour: 2}": "did you mean h100?",
    "H100: {on_demand_usd_hour: 2}": "a name is of small letters",
    OWN.replace("  memory_bytes: 100e9\n", ""): "h300 is not in the catalogue, so it needs memory_bytes too",
    "h100: {vendor: ours}": "'ours' is not one of nvidia, amd, google, or null",
    "- h100": "mapping",
}


@pytest.mark.parametrize("text", MISTAKES, ids=list(MISTAKES.values()))
def test_mistakes_in_a_file_of_the_user(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(MISTAKES[text])) as error:
        catalogue(path)
    assert "mine.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_cpu_is_measured():
    shipped = CATALOGUE["cpu"]
    assert (shipped.memory_bytes, shipped.memory_bandwidth, shipped.peak_flops) == (None, None, {})
    cpu = measured_cpu({"fp32": 1e11}, memory_bandwidth=2e10, memory_bytes=2**33, num_devices=8)
    assert (cpu.name, cpu.kind, cpu.island, cpu.memory_bytes) == ("cpu", "cpu", 8, 2**33)
    assert cpu.link_bandwidth == cpu.network_bandwidth == cpu.host_bandwidth == cpu.memory_bandwidth == 2e10
    assert cpu.board_watts == 65 / 8
    assert cpu.sources["board_watts"].startswith("assumed")
    assert set(cpu.sources) == {figure for figure in FIGURES if getattr(cpu, figure) is not None}


def test_table():
    cpu = measured_cpu({"bf16": 1e11}, memory_bandwidth=2e10, memory_bytes=2**33, num_devices=8)
    lines = hardware_table([*CATALOGUE.values(), cpu]).splitlines()
    assert max(map(len, lines)) <= 120
    rows = {line.split()[0]: line.split() for line in lines[2 : 2 + len(CATALOGUE)]}
    assert list(rows) == list(CATALOGUE)
    assert len({len(row) for row in rows.values()}) == 1
    assert rows["h100"][1:8] == ["79.11", "3.35", "989", "1979", "450", "50.0", "700"]
    assert rows["h100"][-4:] == ["6.88", "3.44", "2025-06", "yes"]
    assert rows["v5e"][7] == "-"  # its board power is not published
    assert rows["cpu"][1:] == ["-"] * 11
    assert "v5p-8 is 8 chips" in lines[-2]


def test_json():
    entries = hardware_json(CATALOGUE.values())
    assert json.loads(json.dumps(entries)) == entries
    assert [entry["name"] for entry in entries] == list(CATALOGUE)
    assert entries[0]["sources"]["memory_bytes"] == CATALOGUE["t4"].sources["memory_bytes"]


def test_reading_it_takes_no_jax_and_it_is_installed():
    code = "import sys; from jaxtrain.plan.catalogue import hardware as h; h.catalogue(); "
    code += "print({'jax', 'numpy', 'flax'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.stdout.strip(), ran.returncode) == ("set()", 0), ran.stderr
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "hardware.yaml" in settings["package-data"]["jaxtrain.plan.catalogue"]
