"""Degrees of parallelism: what they resolve to, what a mesh looks like, and every mistake as one exact line."""

import random
from dataclasses import dataclass

import jax
import pytest
from jax.sharding import AxisType

from jaxtrain.config.schema import ParallelConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout.degrees import AXES, config_degrees, resolve_degrees
from jaxtrain.layout.mesh import crossing_axes, make_mesh, mesh_notes

# degrees asked for, devices, degrees that are not 1
RESOLVED = {
    "nothing on one device": ({}, 1, {}),
    "auto on one device": (dict(data="auto"), 1, {}),
    "auto takes all": (dict(data="auto"), 8, dict(data=8)),
    "auto takes the rest": (dict(data="auto", tensor=2), 8, dict(data=4, tensor=2)),
    "auto finds nothing left": (dict(data="auto", fsdp=8), 8, dict(fsdp=8)),
    "auto on another axis": (dict(fsdp="auto", data=2), 8, dict(data=2, fsdp=4)),
    "all fixed": (dict(data=2, fsdp=2, tensor=2), 8, dict(data=2, fsdp=2, tensor=2)),
    "every axis": (
        dict(pipe=2, data=2, fsdp=2, expert=2, context=2, tensor=2),
        64,
        dict(pipe=2, data=2, fsdp=2, expert=2, context=2, tensor=2),
    ),
    "six devices": (dict(data="auto", tensor=2), 6, dict(data=3, tensor=2)),
}


@pytest.mark.parametrize(("degrees", "num_devices", "large"), RESOLVED.values(), ids=RESOLVED)
def test_resolve_degrees(degrees, num_devices, large):
    found = resolve_degrees(degrees, num_devices)
    assert tuple(found) == AXES
    assert {axis: degree for axis, degree in found.items() if degree != 1} == large


WRONG = {
    "two autos": (
        dict(data="auto", fsdp="auto"),
        8,
        "parallel.data and parallel.fsdp are both auto; at most one axis can be",
    ),
    "more than there are": (
        dict(data=16),
        8,
        "parallel: data=16 makes 16, which is not the number of devices (8); "
        "lower a degree, or use 16 devices (on CPU: --emulate 16)",
    ),
    "more than one": (
        dict(data=2),
        1,
        "parallel: data=2 makes 2, which is not the number of devices (1); "
        "lower a degree, or use 2 devices (on CPU: --emulate 2)",
    ),
    "fewer than there are": (
        dict(data=2, tensor=3),
        8,
        "parallel: data=2 x tensor=3 makes 6, which is not the number of devices (8); "
        "use degrees that multiply to 8, or parallel.data=auto for what the other axes leave",
    ),
    "nothing asked": (
        {},
        8,
        "parallel: all degrees 1 makes 1, which is not the number of devices (8); "
        "use degrees that multiply to 8, or parallel.data=auto for what the other axes leave",
    ),
    "auto that does not divide": (
        dict(data="auto", tensor=3),
        8,
        "parallel: tensor=3 makes 3, which does not divide the number of devices (8); "
        "use 2 or 4",
    ),
    "auto beside too many": (
        dict(data="auto", tensor=16),
        8,
        "parallel: tensor=16 makes 16, which does not divide the number of devices (8); "
        "lower a degree, or use 16 devices (on CPU: --emulate 16)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("degrees", "num_devices", "message"), WRONG.values(), ids=WRONG)
def test_wrong_degrees(degrees, num_devices, message):
    with pytest.raises(ConfigError) as caught:
        resolve_degrees(degrees, num_devices)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "data", "fsdp"),
    [
        pytest.param({}, "auto", 1, id="data is auto by default"),
        pytest.param({"fsdp": "auto"}, 1, "auto", id="and stands back for another auto"),
        pytest.param({"fsdp": "auto", "data": "auto"}, "auto", "auto", id="but not when it was asked for"),
        pytest.param({"fsdp": 4}, "auto", 4, id="and takes what fixed ones leave"),
    ],
)
def test_config_degrees(settings, data, fsdp):
    degrees = config_degrees(ParallelConfig(**settings))
    assert (degrees["data"], degrees["fsdp"]) == (data, fsdp)


@pytest.mark.parametrize(
    ("degrees", "num_devices"),
    [({}, 8), (dict(data=2, fsdp=2), 4), (dict(tensor=8), 8), ({}, 1)],
    ids=["default", "half of the devices", "tensor", "one device"],
)
def test_a_mesh_has_all_six_auto_axes(degrees, num_devices):
    mesh = make_mesh(**degrees, devices=jax.devices()[:num_devices])
    assert mesh.axis_names == AXES
    assert mesh.axis_types == (AxisType.Auto,) * 6
    assert sorted(device.id for device in mesh.devices.flat) == list(range(num_devices))


def test_six_of_eight_devices_is_an_error():
    # jax.make_mesh((3, 2)) would silently leave two devices idle.
    with pytest.raises(ConfigError, match="makes 6, which is not the number of devices"):
        make_mesh(data=3, tensor=2)


@dataclass(frozen=True)
class Device:
    """What a mesh needs to know of a device."""

    id: int
    process_index: int
    platform: str
    device_kind: str
    slice_index: int | None


def gpu_hosts(hosts, devices, *, processes=1):
    """GPUs as jax numbers them: a `slice_index` for each host, whether it runs one process or several."""
    return [Device(i, i // (devices // processes), "gpu", "NVIDIA H100", i // devices) for i in range(hosts * devices)]


def compile_only_gpus(hosts, devices):
    return [Device(i, i // devices, "gpu", "NVIDIA H100", 0) for i in range(hosts * devices)]


def cpu_processes(processes, devices):
    """Emulated devices of several processes; their ids start at 2048 times the process."""
    return [Device(2048 * p + i, p, "cpu", "cpu", None) for p in range(processes) for i in range(devices)]


# id: (devices, degrees, axes that cross, axes that mesh_notes names)
CROSSING = {
    "one host": (gpu_hosts(1, 8), dict(fsdp=4, tensor=2), (), ()),
    "one host, a process for each GPU": (gpu_hosts(1, 8, processes=8), dict(fsdp=4, tensor=2), (), ()),
    "data crosses": (gpu_hosts(2, 8), dict(data=2, fsdp=8), ("data",), ()),
    "data of both kinds": (gpu_hosts(2, 8), dict(data=16), ("data",), ()),
    "pipe crosses before data": (gpu_hosts(2, 8), dict(pipe=2, data=2, tensor=4), ("pipe",), ()),
    "pipe and data": (gpu_hosts(4, 8), dict(pipe=2, data=2, expert=2, tensor=4), ("pipe", "data"), ()),
    "fsdp must": (gpu_hosts(2, 8), dict(fsdp=8, tensor=2), ("fsdp",), ()),
    "all six": (
        gpu_hosts(8, 8),
        dict(pipe=2, data=2, fsdp=2, expert=2, context=2, tensor=2),
        ("pipe", "data", "fsdp"),
        (),
    ),
    "expert must": (gpu_hosts(2, 4), dict(expert=8), ("expert",), ()),
    "context crosses": (gpu_hosts(2, 8), dict(context=4, tensor=4), ("context",), ("context",)),
    "tensor crosses": (gpu_hosts(2, 8), dict(tensor=16), ("tensor",), ("tensor",)),
    "both cross": (gpu_hosts(4, 2), dict(context=2, tensor=4), ("context", "tensor"), ("context", "tensor")),
    "three stages on two hosts": (gpu_hosts(2, 6), dict(pipe=3, data=2, tensor=2), ("data",), ()),
    "several processes of a host": (gpu_hosts(2, 8, processes=8), dict(data=2, tensor=8), ("data",), ()),
    "hosts that are not there": (compile_only_gpus(2, 8), dict(data=2, tensor=8), ("data",), ()),
    "CPU processes": (cpu_processes(2, 4), dict(data=2, fsdp=2, tensor=2), ("data",), ()),
    "CPU processes of one device": (cpu_processes(4, 1), dict(data=2, tensor=2), ("data", "tensor"), ("tensor",)),
    "hosts of different sizes": (gpu_hosts(1, 4) + gpu_hosts(2, 4)[6:], dict(data=3, tensor=2), ("data",), ()),
}


@pytest.mark.parametrize(("devices", "degrees", "crossing", "noted"), CROSSING.values(), ids=CROSSING)
def test_what_talks_most_stays_inside_a_host(devices, degrees, crossing, noted):
    shuffled = random.Random(0).sample(devices, len(devices))
    mesh = make_mesh(**{"data": 1, **degrees}, devices=shuffled)
    assert crossing_axes(mesh) == crossing
    assert sorted(mesh.devices.flat, key=lambda device: device.id) == devices
    if degrees.get("pipe") != 3:
        # Where the degrees nest as the hosts do, it is row-major by process and id.
        assert list(mesh.devices.flat) == devices
    notes = mesh_notes(mesh)
    assert [note.split("=")[0] for note in notes] == [f"parallel.{axis}" for axis in noted]


def test_a_note_is_one_line_with_the_remedy():
    [note] = mesh_notes(make_mesh(data=1, tensor=16, devices=gpu_hosts(2, 8)))
    assert note == (
        "parallel.tensor=16 crosses hosts of 8 devices: its traffic, several times per layer, takes the slow links "
        "between them; use a degree of tensor that divides 8, with context x tensor at most 8"
    )
