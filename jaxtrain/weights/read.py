"""The reader: a published model opened, where our parameters lie in it, and its weights straight into shardings.

Each process reads what its devices hold, once. A stack of layers that is quantized is never whole in floats: one layer
is read into shards of floats, quantized on the devices, and its integers are put beside those of the other layers. What
is stored quantized already is taken as it is, where the format is the one that is asked for.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config.published import read_family
from jaxtrain.errors import CheckpointError
from jaxtrain.families.family import Family
from jaxtrain.formats.gguf_model import GgufSource, open_gguf
from jaxtrain.formats.mxfp4 import with_mxfp4
from jaxtrain.formats.nf4 import BLOCK, QuantizedSource, with_quantized
from jaxtrain.formats.rows import Entry, Position, Shape, Skipped, Tied, Transform, names_of, positions
from jaxtrain.formats.safetensors import FolderSource, open_folder
from jaxtrain.layout.rules import entry_axes
from jaxtrain.layout.sharding import path_name
from jaxtrain.precision.kernels import quantize_kernel
from jaxtrain.precision.nf4 import quantize_magnitudes, quantize_nf4
from jaxtrain.runtime.devices import usable_cores
from jaxtrain.runtime.terminal import print_remark

# Start and stop per dimension.
_Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Place:
    """Where one of our parameters lies in a published model: names of tensors by position of its stack, in order."""

    row: Entry
    names: tuple[str, ...]
    dtype: np.dtype

    @property
    def shape(self) -> Shape:
        """Shape of our parameter."""
        return self.row.shape


@dataclass(frozen=True)
class Places:
    """Where every parameter of the two trees of a model lies: path -> place."""

    params: dict[str, Place]
    model_state: dict[str, Place]


@dataclass(frozen=True)
class PublishedModel:
    """A published model, opened by `open_published`.

    Attributes:
        path: The folder or file.
        source: What its tensors are read from.
        family: Its family.
        settings: Keys of our model group, as its config.json says.
    """

    path: Path
    source: FolderSource | GgufSource
    family: Family
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class StoredParameter:
    """One of our parameters in a published model, read a layer at a time: what is written in the place of an array."""

    published: PublishedModel
    place: Place

    @property
    def shape(self) -> Shape:
        """Shape of the parameter."""
        return self.place.shape

    def read(self, position: Position) -> np.ndarray:
        """Returns what stands at a position of its stack."""
        row = self.place.row
        name = self.place.names[int(np.ravel_multi_index(position, row.stack)) if row.stack else 0]
        return row.transform.read_all(_tensor(self.published, name, row.transform.theirs))


def open_published(path: str | Path) -> PublishedModel:
    """Opens a published folder, or a GGUF file, and reads its config; no tensor is read.

    Raises:
        ConfigError: No such folder or file, a family that is not known, or a key or a value that is not supported.
        CheckpointError: Its files are missing or damaged.
    """
    source = open_gguf(path) if Path(path).suffix == ".gguf" else with_mxfp4(with_quantized(open_folder(path)))
    family, settings = read_family(source.config, Path(path))
    return PublishedModel(Path(path), source, family, settings)


def find_places(published: PublishedModel, settings: Mapping[str, Any]) -> Places:
    """Returns where each parameter of a model lies; `settings` are every key of its group (see `settings_of`).

    Raises:
        CheckpointError: Tensors that are missing, too many or of another shape; names the first three.
    """
    tensors, rows = published.source.tensors, published.family.tensors(settings)
    published_vocabulary = published.settings.get("vocab_size") or 0
    added_tokens = (settings.get("vocab_size") or 0) - published_vocabulary
    if added_tokens > 0:
        print_remark(
            f"the embedding has {added_tokens} rows more than {published.path}: they, and those of an output layer, "
            "begin as the mean of its rows"
        )
    places, used = Places({}, {}), set()
    problems: dict[str, list[str]] = {"lacks": [], "has too many": [], "has other shapes or dtypes": []}
    for row in rows:
        if isinstance(row, Skipped):
            used.update(name for name in tensors if re.fullmatch(row.pattern, name))
            continue
        names = []
        for position in positions(row):
            candidates = names_of(row, position)
            held = [one for one in candidates if one in tensors]
            used.update(held)
            names += held[:1]
            if isinstance(row, Entry) and not held:
                problems["lacks"].append(candidates[0])
        if not isinstance(row, Entry) or not names:
            continue
        expected = row.transform.theirs
        for name in names:
            shape, dtype = tensors[name]
            if shape != expected and shape[:1] == (published_vocabulary,):
                shape = (published_vocabulary + max(added_tokens, 0), *shape[1:])
            if shape != expected or dtype.kind in "iub":
                problems["has other shapes or dtypes"].append(
                    f"{name} is {dtype}{list(shape)}, not floats {list(expected)}"
                )
        (places.model_state if row.state else places.params)[row.path] = Place(row, tuple(names), tensors[names[0]][1])
    problems["has too many"] += (name for name in tensors if name not in used)
    said = [f"{what} ({len(names)}): {', '.join(names[:3])}" for what, names in problems.items() if names]
    if said:
        raise CheckpointError(
            f"the tensors of {published.path} do not fit its config.json by the family {published.family.name}: "
            f"it {'; it '.join(said)}"
        )
    for row in (row for row in rows if isinstance(row, Tied)):
        name, place = next((one for one in names_of(row) if one in tensors), None), places.params.get(row.to)
        if name is None or place is None or name in place.names:
            continue
        # A tensor that repeats another and differs from it: leaving it out would change the model.
        if not np.array_equal(published.source.read(name), published.source.read(place.names[0])):
            raise CheckpointError(
                f"{published.path}: {name} differs from {place.names[0]}, although its config.json ties them; set "
                "model.tie_embeddings=false"
            )
    return places


class _Shards:
    """The shards of one array, of the shape, dtype and sharding of `like`, filled layer by layer."""

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
    """Reads parameters into shardings: path -> array of the shape, dtype and sharding of `wanted`; floats are cast.

    The largest is read first: while it is copied to the devices, nothing else takes memory. Host memory stays within
    what the devices of this process hold, plus the largest tensor of the file.
    """
    largest_first = sorted(wanted, key=lambda path: wanted[path].size, reverse=True)
    found = {path: _read(published, places[path], wanted[path]) for path in largest_first}
    return {path: found[path] for path in wanted}


def _read(published: PublishedModel, place: Place, like: jax.ShapeDtypeStruct) -> jax.Array:
    shards, stacked = _Shards(like), len(place.row.stack)

    def fill(position: Position, name: str) -> None:
        tensor = None
        for bounds, out in shards.holding(position):
            tensor = _tensor(published, name, place.row.transform.theirs) if tensor is None else tensor
            copy_into(out, place.row.transform.read(tensor, [slice(*one) for one in bounds[stacked:]]))

    # NumPy copies without holding the interpreter: tensors are read side by side, as many as there are cores.
    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(fill, positions(place.row), place.names))
    return shards.array()


def _tensor(published: PublishedModel, name: str, shape: Shape) -> np.ndarray:
    """Reads a tensor; to one of fewer tokens than `shape` the mean of its rows is added for each of the others."""
    tensor = published.source.read(name)
    if tensor.shape == shape:
        return tensor
    # In float64, so that a base that is read again is the same on every machine.
    mean = tensor.mean(axis=0, dtype=np.float64, keepdims=True).astype(tensor.dtype)
    return np.concatenate([tensor, mean.repeat(shape[0] - len(tensor), axis=0)])


def copy_into(out: np.ndarray, part: np.ndarray) -> None:
    """Copies a view, of any strides, into an array of its shape, casting to its dtype.

    A transposed view is put in order by jax on the CPU, which is six times as fast as tiles in NumPy (16 bits, 4
    million numbers: 1.2 ms and 7.7 ms on one core); NumPy's own order would bring a line of the cache per number.
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


def by_path(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns path -> leaf of a tree."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)}


def read_kernel(
    published: PublishedModel, place: Place, wanted: Mapping[str, jax.ShapeDtypeStruct], dims: tuple[int, int]
) -> dict[str, jax.Array]:
    """Reads a kernel into the arrays of a quantized one: name -> array, the same on every mesh.

    Host memory holds the integers that the devices of this process get, and the floats of one layer.

    `wanted` are name of each array of the quantized kernel (of an int8 one `values` and `scale`, of an nf4 one `codes`,
    `absmax`, and with double quantization `nested_absmax` and `offset`) -> shape, dtype and sharding; `dims` are the
    numbers of input and of output dims of the kernel.

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
    transform, packed = place.row.transform, source.packed(name)
    rows, outputs = rows_of_outputs(transform, dims), transform.ours[dims[0] :]
    whole = rows is not None and np.array_equal(rows, np.arange(len(packed.codes)))
    if rows is None or transform.theirs[1] % BLOCK or (double and packed.offset is not None and not whole):
        raise CheckpointError(
            f"{source.folder}: the blocks of {name} are not those of the nf4 kernel {place.row.path}; take its "
            "scales as float32 (finetune.double_quantization=false), or read it as floats, without finetune.base=nf4"
        )
    found: dict[str, Any] = {"codes": packed.codes[rows], "absmax": packed.magnitudes[rows]}
    if double:
        scales = packed.absmax, packed.nested_absmax, packed.offset
        if packed.offset is None:
            scales = map(np.asarray, quantize_magnitudes(jnp.asarray(found["absmax"]).reshape(-1)))
        absmax, nested, offset = scales
        found |= {"absmax": absmax.reshape(len(rows), -1), "nested_absmax": nested, "offset": np.float32(offset)}
    return found | {one: found[one].T.reshape(-1, *outputs) for one in ("codes", "absmax")}


@functools.lru_cache(maxsize=64)
def rows_of_outputs(transform: Transform, dims: tuple[int, int]) -> np.ndarray | None:
    """Returns which rows of a weight [out, in] of a file the outputs of our kernel are, in our order: int64.

    `dims` are the numbers of its input and output dims. None where the inputs of the two are in another order.
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
