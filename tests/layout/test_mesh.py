"""Degrees of parallelism: what they resolve to, what a mesh looks like, and every mistake as one exact line."""

import random
from dataclasses import dataclass

import jax
import pytest
from jax.sharding import AxisType

from jaxtrain.config.schema import Parallelism
from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import crossing_axes, make_mesh, mesh_notes
from jaxtrain.layout.rules import AXES, config_degrees, resolve_degrees

# degrees asked for, devices, degrees that are not 1
RESOLVED = [
    (dict(data="auto"), 1, {}),
    (dict(data="auto", tensor=2), 6, dict(data=3, tensor=2)),
    (dict(fsdp="auto", data=2), 8, dict(data=2, fsdp=4)),
]


def test_resolve_degrees():
    for degrees, num_devices, large in RESOLVED:
        found = resolve_degrees(degrees, num_devices)
        assert tuple(found) == AXES
        assert {axis: degree for axis, degree in found.items() if degree != 1} == large


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (dict(data="auto", fsdp="auto"), "parallel.data and parallel.fsdp are both auto; at most one axis can be"),
        (dict(data=16), r"data=16 makes 16, .* devices \(8\); lower a degree, or use 16 devices"),
        (dict(data=2, tensor=3), r"data=2 x tensor=3 makes 6, .* multiply to 8, or parallel.data=auto for what"),
        (dict(data="auto", tensor=3), r"tensor=3 makes 3, which does not divide .*; use 2 or 4"),
    ],
    ids=["two autos", "too many", "too few", "does not divide"],
)
def test_wrong_degrees(degrees, message):
    with pytest.raises(ConfigError, match=message):
        resolve_degrees(degrees, 8)


def test_data_is_auto_unless_another_axis_is():
    for settings, data, fsdp in (
        ({}, "auto", 1),
        ({"fsdp": "auto"}, 1, "auto"),
        ({"fsdp": "auto", "data": "auto"}, "auto", "auto"),
        ({"fsdp": 4}, "auto", 4),
    ):
        degrees = config_degrees(Parallelism(**settings))
        assert (degrees["data"], degrees["fsdp"]) == (data, fsdp)


def test_a_mesh_has_all_six_auto_axes():
    for degrees, num_devices in (({}, 8), (dict(data=2, fsdp=2), 4)):
        mesh = make_mesh(**degrees, devices=jax.devices()[:num_devices])
        assert mesh.axis_names == AXES
        assert mesh.axis_types == (AxisType.Auto,) * 6
        assert sorted(device.id for device in mesh.devices.flat) == list(range(num_devices))


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
    "data crosses": (gpu_hosts(2, 8), dict(data=2, fsdp=8), ("data",), ()),
    "pipe and data": (gpu_hosts(4, 8), dict(pipe=2, data=2, expert=2, tensor=4), ("pipe", "data"), ()),
    "fsdp must": (gpu_hosts(2, 8), dict(fsdp=8, tensor=2), ("fsdp",), ()),
    "both cross": (gpu_hosts(4, 2), dict(context=2, tensor=4), ("context", "tensor"), ("context", "tensor")),
    "three stages on two hosts": (gpu_hosts(2, 6), dict(pipe=3, data=2, tensor=2), ("data",), ()),
    "hosts that are not there": (compile_only_gpus(2, 8), dict(data=2, tensor=8), ("data",), ()),
    "CPU processes of one device": (cpu_processes(4, 1), dict(data=2, tensor=2), ("data", "tensor"), ("tensor",)),
    "hosts of different sizes": (gpu_hosts(1, 4) + gpu_hosts(2, 4)[6:], dict(data=3, tensor=2), ("data",), ()),
}


def test_what_talks_most_stays_inside_a_host():
    for name, (devices, degrees, crossing, noted) in CROSSING.items():
        shuffled = random.Random(0).sample(devices, len(devices))
        mesh = make_mesh(**{"data": 1, **degrees}, devices=shuffled)
        assert crossing_axes(mesh) == crossing, name
        assert sorted(mesh.devices.flat, key=lambda device: device.id) == devices, name
        if degrees.get("pipe") != 3:
            # Where the degrees nest as the hosts do, it is row-major by process and id.
            assert list(mesh.devices.flat) == devices, name
        notes = mesh_notes(mesh)
        assert [note.split("=")[0] for note in notes] == [f"parallel.{axis}" for axis in noted], name
