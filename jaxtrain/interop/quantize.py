"""Weights of a published model straight into quantized kernels, one layer at a time.

A stack of layers is never whole in floats: one layer is read into shards of floats, quantized on the devices, and its
integers are put beside those of the other layers. What is stored quantized already is taken as it is, where the format
is the one that is asked for.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.interop.load import read_places
from jaxtrain.interop.weights import Place, PublishedModel
from jaxtrain.layout.rules import entry_axes
from jaxtrain.precision.kernels import quantize_kernel
from jaxtrain.precision.nf4 import quantize_nf4
from jaxtrain.published.bitsandbytes import QuantizedSource
from jaxtrain.published.entries import positions
from jaxtrain.published.nf4_blocks import quantize_magnitudes
from jaxtrain.published.transforms import Transform

_Bounds = tuple[tuple[int, int], ...]
# What takes the place of one layer of a kernel: name of an array ("codes") -> its shards, by device.
_Shards = Mapping[str, Mapping[Any, np.ndarray]]


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
    floats = _FloatLayers(published, place, wanted, dims)
    source = published.source
    parts = {name: _Parts(like) for name, like in wanted.items()}
    for position, name in zip(positions(place.row), place.names, strict=True):
        if "codes" in wanted and isinstance(source, QuantizedSource) and name in source.quantized:
            layer = _stored_layer(source, place, name, wanted, dims)
            for inner, array in layer.items():
                parts[inner].fill(position, array)
        else:
            for inner, shards in floats.layer(name).items():
                parts[inner].fill_shards(position, shards)
    return {inner: part.array() for inner, part in parts.items()}


class _Parts:
    """The shards of one array on the devices of this process, filled layer by layer.

    Args:
        like: Its shape, dtype and sharding.
    """

    def __init__(self, like: jax.ShapeDtypeStruct):
        assert like.sharding is not None
        self.like = like
        indices = like.sharding.addressable_devices_indices_map(like.shape)
        self.bounds = {device: _bounds(index or (), like.shape) for device, index in indices.items()}
        # Devices that hold the same shard share it.
        self.shards = {
            bounds: np.empty([stop - start for start, stop in bounds], like.dtype) for bounds in self.bounds.values()
        }

    def fill(self, position: tuple[int, ...], layer: np.ndarray) -> None:
        """Puts a whole layer in its place."""
        for bounds, out in self.shards.items():
            if _holds(bounds, position):
                rest = tuple(slice(*one) for one in bounds[len(position) :])
                out[_inside(bounds, position)] = layer[rest]

    def fill_shards(self, position: tuple[int, ...], layer: Mapping[Any, np.ndarray]) -> None:
        """Puts the shards of a layer in their places."""
        for device, bounds in self.bounds.items():
            if _holds(bounds, position):
                self.shards[bounds][_inside(bounds, position)] = layer[device]

    def array(self) -> jax.Array:
        """Returns the array on its devices."""
        like = self.like
        assert like.sharding is not None
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: self.shards[_bounds(index or (), like.shape)]
        )


class _FloatLayers:
    """Reads layers in floats and quantizes them on the devices; compiled once for all layers of a kernel."""

    def __init__(
        self,
        published: PublishedModel,
        place: Place,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        dims: tuple[int, int],
    ):
        self.published, self.place = published, place
        stack = len(place.row.stack)
        shape = place.row.transform.ours
        sharding = _of_floats(wanted, stack, shape, dims)
        self.like = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

        def quantize(kernel: jax.Array) -> dict[str, jax.Array]:
            if "codes" in wanted:
                small: Any = quantize_nf4(kernel, *dims, double="offset" in wanted)
                found = {name: getattr(small, name) for name in ("codes", "absmax", "nested_absmax", "offset")}
            else:
                small = quantize_kernel(kernel, *dims, activations=False)
                found = {"values": small.values, "scale": small.scale}
            return {name: found[name] for name in wanted}

        shardings = {name: _of_layer(like.sharding, stack) for name, like in wanted.items()}
        self.quantize = jax.jit(quantize, out_shardings=shardings)

    def layer(self, name: str) -> _Shards:
        """The quantized kernel of the layer that a tensor holds."""
        alone = Place(replace(self.place.row, stack=()), (name,), self.place.dtype)
        kernel = read_places(self.published, {"": alone}, {"": self.like})[""]
        quantized = self.quantize(kernel)
        return {
            inner: {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
            for inner, array in quantized.items()
        }


def _stored_layer(
    source: QuantizedSource,
    place: Place,
    name: str,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    dims: tuple[int, int],
) -> dict[str, np.ndarray]:
    """The arrays of one layer whose tensor is nf4 in the file."""
    packed, transform = source.packed(name), place.row.transform
    rows = rows_of_outputs(transform, dims)
    if rows is None:
        raise CheckpointError(
            f"{source.folder.folder}: {name} holds its inputs in another order than our kernel {place.row.path}, so "
            "that its blocks are others; read it as floats, without finetune.base=nf4"
        )
    outputs = transform.ours[dims[0] :]
    found = {"codes": packed.codes[rows].T.reshape(-1, *outputs)}
    if "offset" not in wanted:
        found["absmax"] = packed.magnitudes[rows].T.reshape(-1, *outputs)
        return found
    whole = np.array_equal(rows, np.arange(len(packed.codes)))
    if packed.offset is None or packed.nested_absmax is None:
        absmax, nested, offset = quantize_magnitudes(packed.absmax[rows])
    elif whole and packed.has_usual_map:
        absmax, nested, offset = packed.absmax, packed.nested_absmax, packed.offset
    else:
        why = "is a part of a tensor whose scales are quantized together" if not whole else "has another 8-bit map"
        raise ConfigError(
            f"{source.folder.folder}: {name} (for {place.row.path}) {why}; take its scales as float32, with "
            "finetune.double_quantization=false"
        )
    found["absmax"] = absmax.T.reshape(-1, *outputs)
    return found | {"nested_absmax": nested, "offset": np.float32(offset)}


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


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Bounds:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _holds(bounds: _Bounds, position: tuple[int, ...]) -> bool:
    return all(start <= at < stop for at, (start, stop) in zip(position, bounds, strict=False))


def _inside(bounds: _Bounds, position: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(at - start for at, (start, _) in zip(position, bounds, strict=False))
