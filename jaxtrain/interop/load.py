"""Weights of a published model straight into shardings: each process reads what its devices hold, once."""

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxtrain.interop.weights import Place, PublishedModel
from jaxtrain.published.entries import positions
from jaxtrain.published.parts import part_of
from jaxtrain.runtime.devices import usable_cores

# Numbers of a row and of a column that are copied together.
_TILE = 32

# Start and stop per dimension.
_Index = tuple[tuple[int, int], ...]


def read_places(
    published: PublishedModel, places: Mapping[str, Place], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads parameters into shardings.

    The largest is read first: while it is copied to the devices, nothing else takes memory. Host memory stays within
    what the devices of this process hold, plus the largest tensor of the file.

    Args:
        published: The published model.
        places: Path -> where it lies.
        wanted: Path -> shape, dtype and sharding of what is read; floats are cast.

    Returns:
        Path -> array.
    """
    largest_first = sorted(wanted, key=lambda path: wanted[path].size, reverse=True)
    found = {path: _read(published, places[path], wanted[path]) for path in largest_first}
    return {path: found[path] for path in wanted}


def _read(published: PublishedModel, place: Place, like: jax.ShapeDtypeStruct) -> jax.Array:
    assert like.sharding is not None
    indices = like.sharding.addressable_devices_indices_map(like.shape).values()
    # Devices that hold the same slice share what is read for it.
    slices: dict[_Index, np.ndarray] = {}
    for index in indices:
        bounds = _bounds(index or (), like.shape)
        if bounds not in slices:
            slices[bounds] = np.empty([stop - start for start, stop in bounds], like.dtype)
    stacked = len(place.row.stack)

    def fill(position: tuple[int, ...], name: str) -> None:
        held = {bounds: out for bounds, out in slices.items() if _holds(bounds, position)}
        if not held:
            return
        # What the devices of this process hold of the tensor, as one box: a GGUF file dequantizes that and no more.
        part = part_of(place.row.transform, [_around(dim) for dim in zip(*held, strict=True)][stacked:])
        tensor = published.source.read(name, part.box)
        for bounds, out in held.items():
            inside = tuple(at - start for at, (start, _) in zip(position, bounds, strict=False))
            own = zip(bounds[stacked:], part.origin, strict=True)
            copy_into(out[inside], part.transform.read(tensor, [slice(a - at, b - at) for (a, b), at in own]))

    # NumPy copies without holding the interpreter: tensors are read side by side, as many as there are cores.
    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(fill, positions(place.row), place.names))
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: slices[_bounds(index or (), like.shape)]
    )


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Index:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _around(bounds: Iterable[tuple[int, int]]) -> tuple[int, int]:
    starts, stops = zip(*bounds, strict=True)
    return min(starts), max(stops)


def _holds(bounds: _Index, position: tuple[int, ...]) -> bool:
    return all(start <= at < stop for at, (start, stop) in zip(position, bounds, strict=False))


def copy_into(out: np.ndarray, part: np.ndarray) -> None:
    """Copies a view, of any strides, into an array, casting to its dtype.

    A transposed view is put in order by jax on the CPU, which is six times as fast as tiles in NumPy (16 bits, 4
    million numbers: 1.2 ms and 7.7 ms on one core); NumPy's own order would bring a line of the cache per number.

    Args:
        out: Array to write.
        part: View of the same shape.
    """
    last = part.ndim - 1
    strides = [stride if size > 1 else math.inf for stride, size in zip(part.strides, part.shape, strict=True)]
    dense = int(np.argmin(strides)) if strides else last
    if part.size < _TILE * _TILE or dense == last:
        np.copyto(out, part, casting="unsafe")
        return
    cpu = _cpu_device()
    # jax has no numbers of 64 bits unless told so.
    if cpu is not None and part.dtype.itemsize <= 4:
        np.copyto(out, np.asarray(jax.device_put(part, cpu)), casting="unsafe")
        return
    copy_in_tiles(out, part, dense)


def _cpu_device() -> Any:
    """A CPU device of this process, or None where jax was told to use others only."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def copy_in_tiles(out: np.ndarray, part: np.ndarray, dense: int) -> None:
    """Copies a transposed view tile by tile, so that what a line of the cache brings is used before it leaves.

    Args:
        out: Array to write.
        part: View of the same shape.
        dense: Its dimension of the smallest stride, which is not the last.
    """
    last = part.ndim - 1
    rows = np.empty((_TILE, part.shape[last]), part.dtype)
    outer = [1 if dim in (dense, last) else size for dim, size in enumerate(part.shape)]
    for place in np.ndindex(*outer):
        index: list[int | slice] = list(place)
        index[last] = slice(None)
        for start in range(0, part.shape[dense], _TILE):
            index[dense] = slice(start, start + _TILE)
            band = part[tuple(index)]
            for first in range(0, band.shape[1], _TILE):
                rows[: len(band), first : first + _TILE] = band[:, first : first + _TILE]
            out[tuple(index)] = rows[: len(band)]


def by_path(tree: Any) -> dict[str, Any]:
    """Returns path -> leaf of a tree."""
    from jaxtrain.layout.sharding import path_name

    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
