"""Weights of a published model straight into shardings, as floats or as quantized kernels.

Each process reads what its devices hold, once. A stack of layers that is quantized is never whole in floats: one layer
is read into shards of floats, quantized on the devices, and its integers are put beside those of the other layers. What
is stored quantized already is taken as it is, where the format is the one that is asked for.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import CheckpointError
from jaxtrain.interop.formats.entries import positions
from jaxtrain.interop.formats.nf4 import BLOCK, QuantizedSource, quantize_magnitudes
from jaxtrain.interop.formats.transforms import Transform
from jaxtrain.interop.weights import Place, PublishedModel
from jaxtrain.layout.rules import entry_axes
from jaxtrain.layout.sharding import path_name
from jaxtrain.precision.kernels import quantize_kernel
from jaxtrain.precision.nf4 import quantize_nf4
from jaxtrain.runtime.devices import usable_cores

Position = tuple[int, ...]
# Start and stop per dimension.
_Bounds = tuple[tuple[int, int], ...]


class _Shards:
    """The shards of one array on the devices of this process, filled layer by layer.

    Args:
        like: Shape, dtype and sharding of the array.
    """

    def __init__(self, like: jax.ShapeDtypeStruct):
        assert like.sharding is not None
        self.like, self.sharding = like, like.sharding
        indices = like.sharding.addressable_devices_indices_map(like.shape)
        self.bounds = {device: self._bounds_of(index or ()) for device, index in indices.items()}
        # Devices that hold the same slice share what is read for it.
        self.shards = {
            bounds: np.empty([stop - start for start, stop in bounds], like.dtype) for bounds in self.bounds.values()
        }

    def _bounds_of(self, index: tuple[slice, ...]) -> _Bounds:
        return tuple(one.indices(size)[:2] for one, size in zip(index, self.like.shape, strict=True))

    def holding(self, position: Position) -> Iterator[tuple[_Bounds, np.ndarray]]:
        """Returns what holds a part of the layer at a position: bounds of the shard, and the layer's place in it."""
        for bounds, out in self.shards.items():
            lead = list(zip(position, bounds, strict=False))
            if all(start <= at < stop for at, (start, stop) in lead):
                yield bounds, out[(*(at - start for at, (start, _) in lead), ...)]

    def array(self) -> jax.Array:
        """Returns the array on its devices."""
        return jax.make_array_from_callback(
            self.like.shape, self.sharding, lambda index: self.shards[self._bounds_of(index or ())]
        )


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
    shards, stacked = _Shards(like), len(place.row.stack)

    def fill(position: Position, name: str) -> None:
        tensor = None
        for bounds, out in shards.holding(position):
            tensor = published.source.read(name) if tensor is None else tensor
            copy_into(out, place.row.transform.read(tensor, [slice(*one) for one in bounds[stacked:]]))

    # NumPy copies without holding the interpreter: tensors are read side by side, as many as there are cores.
    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(fill, positions(place.row), place.names))
    return shards.array()


def copy_into(out: np.ndarray, part: np.ndarray) -> None:
    """Copies a view, of any strides, into an array, casting to its dtype.

    A transposed view is put in order by jax on the CPU, which is six times as fast as tiles in NumPy (16 bits, 4
    million numbers: 1.2 ms and 7.7 ms on one core); NumPy's own order would bring a line of the cache per number.

    Args:
        out: Array to write.
        part: View of the same shape.
    """
    strides = [stride if size > 1 else math.inf for stride, size in zip(part.strides, part.shape, strict=True)]
    in_order = part.size < 1024 or int(np.argmin(strides)) == part.ndim - 1
    # jax has no numbers of 64 bits unless told so.
    cpu = None if in_order or part.dtype.itemsize > 4 else _cpu_device()
    np.copyto(out, part if cpu is None else np.asarray(jax.device_put(part, cpu)), casting="unsafe")


def _cpu_device() -> Any:
    """A CPU device of this process, or None where jax was told to use others only."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def by_path(tree: Any) -> dict[str, Any]:
    """Returns path -> leaf of a tree."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def read_kernel(
    published: PublishedModel, place: Place, wanted: Mapping[str, jax.ShapeDtypeStruct], dims: tuple[int, int]
) -> dict[str, jax.Array]:
    """Reads a kernel into the arrays of a quantized one.

    The result is the same on every mesh. Host memory holds the integers that the devices of this process get, and the
    floats of one layer.

    Args:
        published: The published model.
        place: Where the kernel lies in it.
        wanted: Name of each array of the quantized kernel (of an int8 one `values` and `scale`, of an nf4 one `codes`,
            `absmax`, and with double quantization `nested_absmax` and `offset`) -> shape, dtype and sharding.
        dims: Numbers of input and of output dims of the kernel.

    Returns:
        Name -> array.

    Raises:
        CheckpointError: The tensors are stored in nf4, and cannot be taken as they are.
    """
    quantize, source = _quantizer(published, place, wanted, dims), published.source
    shards = {name: _Shards(like) for name, like in wanted.items()}
    for position, name in zip(positions(place.row), place.names, strict=True):
        if "codes" in wanted and isinstance(source, QuantizedSource) and name in source.quantized:
            for inner, array in _stored_layer(source, place, name, dims, double="offset" in wanted).items():
                for bounds, out in shards[inner].holding(position):
                    out[...] = array[tuple(slice(*one) for one in bounds[len(position) :])]
            continue
        for inner, array in quantize(name).items():
            layer = {shard.device: shard.data for shard in array.addressable_shards}
            devices = {bounds: device for device, bounds in shards[inner].bounds.items()}
            for bounds, out in shards[inner].holding(position):
                out[...] = np.asarray(layer[devices[bounds]])
    return {inner: one.array() for inner, one in shards.items()}


def _quantizer(
    published: PublishedModel, place: Place, wanted: Mapping[str, jax.ShapeDtypeStruct], dims: tuple[int, int]
) -> Any:
    """Returns name of a tensor -> arrays of the quantized layer; compiled once for all layers of a kernel."""
    stack, shape = len(place.row.stack), place.row.transform.ours
    like = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=_of_floats(wanted, stack, shape, dims))

    def quantize(kernel: jax.Array) -> dict[str, jax.Array]:
        small: Any = (
            quantize_nf4(kernel, *dims, double="offset" in wanted)
            if "codes" in wanted
            else quantize_kernel(kernel, *dims)
        )
        return {name: getattr(small, name) for name in wanted}

    shardings = {name: _of_layer(one.sharding, stack) for name, one in wanted.items()}
    compiled = jax.jit(quantize, out_shardings=shardings)

    def layer(name: str) -> dict[str, jax.Array]:
        alone = Place(replace(place.row, stack=()), (name,), place.dtype)
        return compiled(read_places(published, {"": alone}, {"": like})[""])

    return layer


def _stored_layer(
    source: QuantizedSource, place: Place, name: str, dims: tuple[int, int], *, double: bool
) -> dict[str, Any]:
    """The arrays of one layer whose tensor is nf4 in the file."""
    transform = place.row.transform
    rows = rows_of_outputs(transform, dims)
    packed = source.packed(name)
    outputs = transform.ours[dims[0] :]
    whole = rows is not None and np.array_equal(rows, np.arange(len(packed.codes)))
    kept = packed.offset is not None and packed.nested_absmax is not None
    if rows is None or transform.theirs[1] % BLOCK or (double and kept and not (whole and packed.has_usual_map)):
        raise CheckpointError(
            f"{source.folder.folder}: the blocks of {name} are not those of the nf4 kernel {place.row.path}; take its "
            "scales as float32 (finetune.double_quantization=false), or read it as floats, without finetune.base=nf4"
        )
    found = {"codes": packed.codes[rows].T.reshape(-1, *outputs)}
    if not double:
        return found | {"absmax": packed.magnitudes[rows].T.reshape(-1, *outputs)}
    absmax, nested, offset = (
        (packed.absmax, packed.nested_absmax, packed.offset) if kept else quantize_magnitudes(packed.absmax[rows])
    )
    return found | {
        "absmax": absmax.T.reshape(-1, *outputs), "nested_absmax": nested, "offset": np.float32(offset)
    }  # fmt: skip


@functools.lru_cache(maxsize=64)
def rows_of_outputs(transform: Transform, dims: tuple[int, int]) -> np.ndarray | None:
    """Returns which rows of a weight [out, in] of a file the outputs of our kernel are, in our order.

    Args:
        transform: How the weight becomes our kernel.
        dims: Numbers of input and of output dims of the kernel.

    Returns:
        int64 [number of our outputs], not to be changed; None where the inputs of the two are in another order.
    """
    out, inputs = transform.theirs
    ours = [math.prod(transform.ours[: dims[0]]), math.prod(transform.ours[dims[0] :])]
    places = (np.arange(out)[:, None], np.arange(inputs)[None])
    rows, columns = (transform.view(np.broadcast_to(one, transform.theirs)).reshape(ours) for one in places)
    in_order = np.array_equal(columns[:, 0], np.arange(inputs)) and len(columns) == inputs
    return rows[0].copy() if in_order else None


def _of_floats(
    wanted: Mapping[str, jax.ShapeDtypeStruct], stack: int, shape: tuple[int, ...], dims: tuple[int, int]
) -> NamedSharding:
    """The sharding of the floats [*D, *F] that one layer of a quantized kernel is made of: where its integers go."""
    if "values" in wanted:
        return _of_layer(wanted["values"].sharding, stack)
    codes = _of_layer(wanted["codes"].sharding, stack)
    first, *outputs = (*codes.spec, *[None] * (1 + dims[1] - len(codes.spec)))
    # The flattened inputs of the codes may divide where the first of several dims does not.
    degree = math.prod(codes.mesh.shape[axis] for axis in entry_axes(first))
    first = first if shape[0] % degree == 0 else None
    return NamedSharding(codes.mesh, PartitionSpec(first, *[None] * (dims[0] - 1), *outputs))


def _of_layer(sharding: Any, stack: int) -> NamedSharding:
    """The sharding of one layer of a stack."""
    assert isinstance(sharding, NamedSharding)
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[stack:]))
