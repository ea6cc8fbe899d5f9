"""What a plan makes of the catalogue besides rates: kernels, the host's link, machines that save, rent, a torus."""

import dataclasses
import math

import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import catalogue, parse_targets, rented_devices
from jaxtrain.plan.report.show import table
from jaxtrain.plan.search.analyse import Terms, analyse, run_cost

CATALOGUE = catalogue()


def test_kernels_go_with_the_vendor_and_not_with_the_title(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("h100: {title: our H100 SXM 80 GB}\n")
    (ours,), (shipped,) = parse_targets("h100x8", catalogue(path)), parse_targets("h100x8")
    assert ours.hardware.title != shipped.hardware.title
    for policy in ("bf16", "fp8"):
        config = load_config("llama3_8b", overrides=[f"precision.policy={policy}"]).config
        assert analyse(config, ours).time == analyse(config, shipped).time
    path.write_text("h100: {vendor: null}\n")
    (other,) = parse_targets("h100x8", catalogue(path))
    assert analyse(config, other).time.seconds > 1.2 * analyse(config, shipped).time.seconds


# name: bytes/s to the host; PCIe 3.0 to 5.0 have 16, 32 and 64 GB/s, Grace and two Blackwells 450 between them.
TO_HOST = {"t4": 16e9, "a100-80": 32e9, "h100": 64e9, "h100-pcie": 64e9, "mi300x": 64e9, "b200": 64e9, "gb200": 225e9}


@pytest.mark.parametrize("name", TO_HOST)
def test_the_host_is_behind_the_link_of_the_card(name):
    assert CATALOGUE[name].host_bandwidth == TO_HOST[name]


# target: devices whose rent is paid, by the counts that the catalogue has.
RENTED = {
    "v100-32": 8,
    "b200x4": 8,
    "gb200": 4,
    "gb200x8": 8,
    "gb200x6": 8,
    "h100x4": 4,
    "h100x64": 64,
    "v5e-1": 1,
    "2xv5e-256": 512,
}


@pytest.mark.parametrize("on", RENTED)
def test_rent_is_that_of_a_count_that_can_be_had(on):
    (target,) = parse_targets(on)
    assert rented_devices(target) == RENTED[on]
    policy = "bf16" if "bf16" in target.hardware.peak_flops else "fp16"
    overrides = [f"precision.policy={policy}", "parallel.data=auto", f"train.global_batch_size={target.num_devices}"]
    estimate = analyse(load_config("quickstart", overrides=overrides).config, target)
    hourly = estimate.cost.on_demand_usd / estimate.cost.hours
    assert hourly == pytest.approx(RENTED[on] * target.hardware.on_demand_usd_hour)
    is_said = any(f"the rent is that of {RENTED[on]} devices" in note for note in estimate.notes)
    assert is_said == (RENTED[on] != target.num_devices)


def test_a_name_that_ends_in_an_x_takes_a_count():
    for text in ("mi300x8", "mi300xx8", "mi300x-8"):
        (target,) = parse_targets(text)
        assert (target.hardware.name, target.num_devices, target.name) == ("mi300x", 8, "mi300xx8")
    assert parse_targets("mi300x")[0].num_devices == 1


@pytest.mark.parametrize(("on", "axis_rate"), [("v5e-16", 9e10), ("v6e-16", 1.8e11), ("v5p-64", 1.8e11)])
def test_the_range_holds_traffic_along_one_dim_of_a_torus(on, axis_rate):
    (target,) = parse_targets(on)
    overrides = ["parallel.tensor=4", "parallel.fsdp=auto", "parallel.data=1", "train.accumulation_steps=1"]
    config = load_config("llama3_8b", overrides=[*overrides, "model.num_layers=8"]).config
    time = analyse(config, target).time
    (sent,) = [one for one in time.traffic if one.axis == "tensor"]
    # The facts behind `axis_rate`: scaling-book, 2025, both directions of one dim together.
    assert time.high_seconds > time.seconds - sent.seconds + sent.bytes / axis_rate


# target: machines, all of which write at once.
SAVES = {"v3-1024": 128, "v5p-64": 16, "gb200x72": 18, "4xh100x8": 4, "h100": 1}


@pytest.mark.parametrize("on", SAVES)
def test_every_machine_of_a_slice_or_rack_saves_its_part(on):
    (target,) = parse_targets(on)
    assert math.ceil(target.num_devices / target.hardware.devices_per_host) == SAVES[on]
    hardware = dataclasses.replace(target.hardware, spot_usd_hour=1.0)
    terms = Terms(interruptions_per_node_hour=1.0)
    cost = run_cost(
        load_config("quickstart").config, dataclasses.replace(target, hardware=hardware), 10**13, 1.0, terms
    )
    # Young's interval is the root of twice the time of a save and that between interruptions, of slices and racks.
    save = cost.spot.recommended_interval_seconds**2 / 2 / (3600 / target.num_hosts)
    assert save == pytest.approx(1e13 / SAVES[on] / 1e9)


def test_nodes_that_are_smaller_than_a_host_save_by_themselves(tmp_path):
    (tmp_path / "mine.yaml").write_text("h100:\n  island: 4\n")
    (target,) = parse_targets("h100x16", catalogue(tmp_path / "mine.yaml"))
    assert target.num_hosts == 4
    terms = Terms(interruptions_per_node_hour=1.0)
    save = run_cost(load_config("quickstart").config, target, 10**13, 1.0, terms).spot.recommended_interval_seconds
    assert save**2 / 2 / (3600 / 4) == pytest.approx(1e13 / 4 / 1e9)


def test_nothing_is_said_of_rent_where_there_is_none():
    (target,) = parse_targets("v100-32x2")
    estimate = analyse(load_config("quickstart", overrides=["precision.policy=bf16"]).config, target)
    assert estimate.cost is None
    assert not any("rent" in note for note in estimate.notes)


def test_where_rent_is_free_buying_never_pays():
    (target,) = parse_targets("h100")
    free = dataclasses.replace(target.hardware, on_demand_usd_hour=0.0)
    estimate = analyse(load_config("quickstart").config, dataclasses.replace(target, hardware=free))
    assert "never: rent is $0" in table([estimate])
