"""Builds the device mesh from degrees of parallelism: always all six axes, whose product is the device count."""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxtrain.config.arguments import check_whole
from jaxtrain.layout.rules import AXES, resolve_degrees

# `jax.Device` is a variable to type checkers, which they refuse in annotations.
Device: TypeAlias = Any

# These axes communicate inside every layer, and no computation hides it: they need the fastest links.
_INSIDE = ("context", "tensor")


def make_mesh(
    *,
    pipe: int | Literal["auto"] = 1,
    data: int | Literal["auto"] = "auto",
    fsdp: int | Literal["auto"] = 1,
    expert: int | Literal["auto"] = 1,
    context: int | Literal["auto"] = 1,
    tensor: int | Literal["auto"] = 1,
    devices: Sequence[Device] | None = None,
) -> Mesh:
    """Returns a mesh over all devices with the six axes of jaxtrain.

    Args:
        pipe: Pipeline stages.
        data: Replicas of the model.
        fsdp: Shards of parameters, gradients and optimizer state.
        expert: Shards of the experts.
        context: Shards of the sequence.
        tensor: Shards of the heads, the MLP width and the vocabulary. One of the six degrees may be "auto": the number
            of devices divided by the product of the others.
        devices: The devices to use, in any order, real or compile-only; None: all devices of the run.

    Returns:
        A `jax.sharding.Mesh` with Auto axis types, axes of size 1 included. The innermost axes stay inside a host (on
        TPUs: inside a slice, along its links) as far as the degrees allow.

    Raises:
        ConfigError: A degree is no whole number from 1, or their product is not the number of devices.

    Example:
        >>> mesh = jt.make_mesh(data="auto", fsdp=1)  # all devices
        >>> one = jt.make_mesh(devices=jax.devices()[:1])
        >>> list(one.shape)
        ['pipe', 'data', 'fsdp', 'expert', 'context', 'tensor']
    """
    devices = jax.devices() if devices is None else list(devices)
    asked: dict[str, Any] = dict(pipe=pipe, data=data, fsdp=fsdp, expert=expert, context=context, tensor=tensor)
    for axis, degree in asked.items():
        if degree != "auto":
            check_whole(degree, what=f"make_mesh: {axis}", least=1, write=f"{axis}=4 or {axis}='auto'")
    degrees = tuple(resolve_degrees(asked, len(devices)).values())
    return Mesh(_lay_out(devices, degrees), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_text(mesh: Mesh) -> str:
    """The axes of a mesh that have more than one device: `data=2 fsdp=4`, or `one device`."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"


def parameters_text(params: Any) -> str:
    """The number of a tree's parameters (arrays or shapes) and arrays: `85,002 parameters in 6 arrays`."""
    leaves = jax.tree.leaves(params)
    arrays = f"{len(leaves)} array{'' if len(leaves) == 1 else 's'}"
    return f"{sum(math.prod(leaf.shape) for leaf in leaves):,} parameters in {arrays}"


def _islands(devices: Sequence[Device]) -> list[int]:
    """Returns, for each device, the number of its island: a group joined by fast links (a TPU slice, or a host).

    `slice_index` is the number of a TPU slice, or of a GPU host. CPU devices and a single TPU slice may have none, and
    for compile-only GPUs it is always 0.
    """
    slices = [getattr(device, "slice_index", None) for device in devices]
    processes = [device.process_index for device in devices]
    if devices[0].platform == "tpu":
        return [index or 0 for index in slices]
    # Slurm starts one process per GPU: then the devices of a host have one slice index and many process indices.
    own_process = len(set(processes)) == len(devices)
    if None not in slices and (len(set(slices)) > 1 or own_process):
        return [int(index) for index in slices if index is not None]
    return processes


def _lay_out(devices: Sequence[Device], shape: tuple[int, ...]) -> np.ndarray:
    """Arranges devices in the shape of the mesh, so that the outermost axes cross islands and the innermost do not."""
    where = dict(zip(devices, _islands(devices), strict=True))
    ordered = sorted(devices, key=lambda device: (where[device], device.process_index, device.id))
    islands: dict[int, list[Device]] = {}
    for device in ordered:
        islands.setdefault(where[device], []).append(device)
    if len({len(island) for island in islands.values()}) > 1:
        # Islands of different sizes fit no shape of a mesh.
        return _array(ordered, shape)
    across, left = [], len(islands)
    for degree in shape:
        across.append(math.gcd(degree, left))
        left //= across[-1]
    # num_devices = num_islands x devices per island, so that the degrees take up all islands: left is 1.
    inside = tuple(degree // outer for degree, outer in zip(shape, across, strict=True))
    blocks = [_lay_out_island(island, inside) for island in islands.values()]
    # From dims (outer 0, ..., outer n, inner 0, ..., inner n) to (outer 0, inner 0, outer 1, ...).
    stacked = np.stack(blocks).reshape(*across, *inside)
    pairs = [axis for pair in zip(range(len(shape)), range(len(shape), 2 * len(shape)), strict=True) for axis in pair]
    return stacked.transpose(pairs).reshape(shape)


def _lay_out_island(devices: list[Device], shape: tuple[int, ...]) -> np.ndarray:
    if devices[0].platform != "tpu":
        # Every pair of devices in a host has equally fast links.
        return _array(devices, shape)
    try:
        # Mesh axes follow the rings and tori of the slice.
        return mesh_utils.create_device_mesh(shape, devices)
    except NotImplementedError:
        # The degrees do not factor as the dims of the torus do; then several rings share links.
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _array(devices: Sequence[Device], shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(len(devices), object)
    array[:] = devices
    return array.reshape(shape)


def crossing_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes along which neighbouring devices belong to different hosts (TPU: slices), in mesh order."""
    islands = np.reshape(_islands(list(mesh.devices.flat)), mesh.devices.shape)
    return tuple(name for axis, name in enumerate(mesh.axis_names) if np.diff(islands, axis=axis).any())


def mesh_notes(mesh: Mesh) -> list[str]:
    """Returns warnings about a mesh: one line for each of context and tensor that crosses hosts, which is slow."""
    islands = _islands(list(mesh.devices.flat))
    size = min(islands.count(island) for island in set(islands))
    kind = "slices" if mesh.devices.flat[0].platform == "tpu" else "hosts"
    return [
        f"parallel.{axis}={mesh.shape[axis]} crosses {kind} of {size} devices: its traffic, several times per layer, "
        f"takes the slow links between them; use a degree of {axis} that divides {size}, "
        f"with context x tensor at most {size}"
        for axis in crossing_axes(mesh)
        if axis in _INSIDE
    ]
