"""Degrees of parallelism to a device mesh: six axes, always all present, that multiply to the device count."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxtrain.layout.degrees import AXES, resolve_degrees

# These communicate inside every layer, and nothing hides it: they belong on the fastest links.
_INSIDE = ("context", "tensor")


def make_mesh(
    *,
    pipe: int | Literal["auto"] = 1,
    data: int | Literal["auto"] = "auto",
    fsdp: int | Literal["auto"] = 1,
    expert: int | Literal["auto"] = 1,
    context: int | Literal["auto"] = 1,
    tensor: int | Literal["auto"] = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over all devices with the six axes of jaxtrain.

    Args:
        pipe, data, fsdp, expert, context, tensor: degrees; one may be "auto" and takes what is left.
        devices: jax devices to use, in any order, real or compile-only; None: all of the run.

    Returns:
        A `jax.sharding.Mesh` with Auto axis types; axes of size 1 included. The innermost axes stay inside a host (TPU:
        inside a slice, laid along its links) as far as the degrees allow: see `crossing_axes`.

    Raises:
        ConfigError: the degrees do not multiply to the device count.
    """
    devices = list(devices) if devices is not None else jax.devices()
    degrees = resolve_degrees(
        {"pipe": pipe, "data": data, "fsdp": fsdp, "expert": expert, "context": context, "tensor": tensor},
        len(devices),
    )
    layout = _lay_out(devices, tuple(degrees.values()))
    return Mesh(layout, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _islands(devices: Sequence[Any]) -> list[int]:
    """For each device the group, joined by fast links, that it belongs to: a TPU slice, or a host.

    jax numbers TPU slices and, by what each says of itself, GPU hosts as `slice_index`. CPU devices have none, a single
    TPU slice may have none, and for compile-only GPUs it is always 0.
    """
    slices = [getattr(device, "slice_index", None) for device in devices]
    processes = [device.process_index for device in devices]
    if devices[0].platform == "tpu":
        return [index or 0 for index in slices]
    # Slurm starts a process for each GPU: then those of one host are one slice and many processes.
    own_process = len(set(processes)) == len(devices)
    if None not in slices and (len(set(slices)) > 1 or own_process):
        return [int(index) for index in slices if index is not None]
    return processes


def _lay_out(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Devices in the shape of the mesh, so that the outermost axes cross islands and the innermost do not."""
    where = dict(zip(devices, _islands(devices), strict=True))
    ordered = sorted(devices, key=lambda device: (where[device], device.process_index, device.id))
    islands: dict[int, list[Any]] = {}
    for device in ordered:
        islands.setdefault(where[device], []).append(device)
    if len({len(island) for island in islands.values()}) > 1:
        return _array(ordered, shape)  # no shape fits islands of different sizes
    across, left = [], len(islands)
    for degree in shape:
        across.append(math.gcd(degree, left))
        left //= across[-1]
    # The number of devices is that of islands times that of devices in each, so what is left is 1.
    inside = tuple(degree // outer for degree, outer in zip(shape, across, strict=True))
    blocks = [_lay_out_island(island, inside) for island in islands.values()]
    # Axes (outer 0, ..., outer n, inner 0, ..., inner n) to (outer 0, inner 0, outer 1, ...).
    stacked = np.stack(blocks).reshape(*across, *inside)
    pairs = [axis for pair in zip(range(len(shape)), range(len(shape), 2 * len(shape)), strict=True) for axis in pair]
    return stacked.transpose(pairs).reshape(shape)


def _lay_out_island(devices: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    if devices[0].platform != "tpu":
        return _array(devices, shape)  # all are equally far from one another
    try:
        # Along the rings and tori of the slice.
        return mesh_utils.create_device_mesh(shape, devices)
    except NotImplementedError:
        # The degrees do not factor as the torus does; then rings share links.
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _array(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(len(devices), object)
    array[:] = devices
    return array.reshape(shape)


def crossing_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which neighbours sit in different hosts (TPU: slices), in mesh order."""
    islands = np.reshape(_islands(list(mesh.devices.flat)), mesh.devices.shape)
    return tuple(name for axis, name in enumerate(mesh.axis_names) if np.diff(islands, axis=axis).any())


def mesh_notes(mesh: Mesh) -> list[str]:
    """What to know about a mesh before a run: a line for each axis that is slow because it crosses hosts."""
    islands = _islands(list(mesh.devices.flat))
    size = min(islands.count(island) for island in set(islands))
    kind = "slices" if mesh.devices.flat[0].platform == "tpu" else "hosts"
    return [
        f"parallel.{axis}={mesh.shape[axis]} crosses {kind} of {size} devices: its traffic, several times a layer, "
        f"takes the slow links between them; use a degree of {axis} that divides {size}, "
        f"with context x tensor at most {size}"
        for axis in crossing_axes(mesh)
        if axis in _INSIDE
    ]
