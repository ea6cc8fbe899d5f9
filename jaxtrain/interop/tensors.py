"""The tensors of a published folder that is written: what each is made of, gathered, and as floats or as nf4.

In nf4, floats are quantized as they are written, as bitsandbytes would quantize the same folder in floats. A kernel
that is in nf4 already is written as it is. Where several kernels are one tensor of the file (Phi-3, GPT-NeoX), their
scales come from double quantizations of their own, which one tensor cannot hold: such a tensor gets float32 scales.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.interop.formats.hub import SINGLE
from jaxtrain.interop.formats.nf4 import (
    BLOCK,
    PackedTensor,
    QuantizedSource,
    dequantize_magnitudes,
    pack_floats,
    packed_kinds,
    packed_parts,
    quantization_config,
    state_name,
)
from jaxtrain.interop.formats.rows import Constant, Entry, Kind, Row, Shape, Tied, names_of, positions
from jaxtrain.interop.formats.safetensors import DTYPES
from jaxtrain.interop.load import rows_of_outputs
from jaxtrain.interop.weights import StoredParameter
from jaxtrain.layout.sharding import path_name
from jaxtrain.precision.kernels import is_kernel
from jaxtrain.precision.nf4 import Nf4Kernel
from jaxtrain.runtime.distributed import is_main_process

Position = tuple[int, ...]
# What may be written, by the name that a config.json has for it.
SAVED_DTYPES = {"float32": DTYPES["F32"], "float16": DTYPES["F16"], "bfloat16": DTYPES["BF16"]}
# Arrays that are written: path -> array, of params (False) and of model_state (True).
Held = Mapping[bool, Mapping[str, Any]]
# Family -> ends of names of weights that transformers keeps in float32, whatever the folder says.
_KEPT = {"t5": (".wo.weight",)}


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor to write: its shape, dtype, and the rows and positions that it is made of.

    Attributes:
        double: None: it is written in its dtype; else it is quantized, and this says whether its scales are, too.
    """

    shape: Shape
    dtype: np.dtype
    parts: tuple[tuple[Entry | Constant, Position], ...]
    double: bool | None = None

    def kinds(self, name: str) -> dict[str, Kind]:
        """Name -> shape and dtype of what stands for it in the file."""
        if self.double is None:
            return {name: (self.shape, self.dtype)}
        return packed_kinds(name, self.shape, double=self.double)


def plan_tensors(rows: tuple[Row, ...], dtypes: Mapping[str, str]) -> dict[str, WrittenTensor]:
    """Returns name -> tensor to write, in the order of the layers; `dtypes` as those of `Origin`."""
    found: dict[str, WrittenTensor] = {}
    placed: list[tuple[Position, str]] = []
    for row in rows:
        if not isinstance(row, Entry | Constant):
            continue
        for position in positions(row):
            name = names_of(row, position)[0]
            if name not in found:
                placed.append((position, name))
            before = found[name].parts if name in found else ()
            if isinstance(row, Constant):
                found[name] = WrittenTensor(row.shape, np.dtype(row.dtype), ((row, position),))
            else:
                dtype = SAVED_DTYPES[dtypes.get(name, dtypes[""])]
                found[name] = WrittenTensor(row.transform.theirs, dtype, (*before, (row, position)))
    # Stable: within a layer, in the order of the rows.
    return {name: found[name] for _, name in sorted(placed, key=lambda one: one[0])}


def parameters_by_path(params: Any) -> dict[str, Any]:
    """Returns path -> float array, kernel in the place of one, or parameter of a published model."""
    flat = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda leaf: is_kernel(leaf) or isinstance(leaf, StoredParameter)
    )
    return {path_name(path): leaf for path, leaf in flat}


def check_held(tensors: Mapping[str, WrittenTensor], held: Held) -> None:
    """Raises where the arrays are not those of the model, or no floats where floats are written.

    Raises:
        ConfigError: Names the array.
    """
    for name, tensor in tensors.items():
        for row, _ in tensor.parts:
            if isinstance(row, Constant):
                continue
            array = held[row.state].get(row.path)
            if array is None or tuple(array.shape) != row.shape:
                tree, has = "model_state" if row.state else "params", None if array is None else list(array.shape)
                raise ConfigError(
                    f"{tree} holds {has} at {row.path}, where the model has {list(row.shape)}; give the {tree} of that "
                    "model"
                )
            if tensor.double is None and is_kernel(array):
                raise ConfigError(
                    f"params holds {row.path} as {type(array).__name__}, and {name} is written in floats; give floats "
                    "(jt.merge_adapters makes them), or write nf4 kernels with base='nf4'"
                )


def packed_tensors(
    tensors: Mapping[str, WrittenTensor], held: Mapping[str, Any], linears: Mapping[str, tuple[int, int]], family: str
) -> dict[str, WrittenTensor]:
    """Returns the tensors with those of linear layers to be quantized.

    Args:
        tensors: From `plan_tensors`.
        held: Path -> array of params.
        linears: `Model.linears` of the model that is written: path of a kernel -> numbers of its input and output dims.
        family: The family's name.

    Raises:
        ConfigError: One of them cannot be quantized as other readers want it.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        rows = [row for row, _ in tensor.parts if isinstance(row, Entry) and row.path in linears]
        if len(rows) < len(tensor.parts) or name.endswith(_KEPT.get(family, "\0")):
            continue
        ours = {isinstance(held.get(row.path), Nf4Kernel) for row in rows}
        inputs = tensor.shape[1]
        turned = any(rows_of_outputs(row.transform, linears[row.path]) is None for row in rows)
        if turned or len(ours) > 1 or math.prod(tensor.shape) % 2 or (ours == {True} and inputs % BLOCK):
            raise ConfigError(
                f"{name} {list(tensor.shape)} cannot be written in nf4 as transformers quantizes it (a Conv1D, an odd "
                "number of weights, rows that do not divide into blocks of ours, or floats beside nf4); leave --base "
                "(base=) out"
            )
        kept = held.get(rows[0].path)
        whole = len(rows) == 1 and _is_whole(rows[0], linears)
        found[name] = replace(tensor, double=not isinstance(kept, Nf4Kernel) or (whole and kept.offset is not None))
    if found == dict(tensors):
        raise ConfigError("base='nf4' is for linear layers, and the model has none; leave --base (base=) out")
    return found


def quantization_of(
    tensors: Mapping[str, WrittenTensor], rows: tuple[Row, ...], *, dtype: str, has_head: bool
) -> dict[str, Any]:
    """Returns the `quantization_config` of a config.json.

    Args:
        tensors: From `packed_tensors`.
        rows: The family's name table.
        dtype: Dtype of what is written in floats, and of what readers turn the rest into.
        has_head: Whether the model's last layer is one over its vocabulary, which readers leave out unasked.
    """
    names = [name for name, one in tensors.items() if one.double is None and len(one.shape) == 2]
    names += [names_of(row)[0] for row in rows if isinstance(row, Tied) and len(row.transform.theirs) == 2]
    skipped = None if has_head else sorted(name.removesuffix(".weight") for name in names)
    return quantization_config(double=True, dtype=dtype, skipped=skipped)


def kinds_of(tensors: Mapping[str, WrittenTensor]) -> dict[str, Kind]:
    """Returns name -> shape and dtype of what is stored in one file, in its order.

    What stands for quantized tensors is in the order of the sizes of its numbers, so that each number lies at a
    multiple of its size although descriptions and codes have any number of bytes.
    """
    found = {part: kind for name, tensor in tensors.items() for part, kind in tensor.kinds(name).items()}
    if all(tensor.double is None for tensor in tensors.values()):
        return found
    texts = {state_name(name) for name in tensors}
    return dict(sorted(found.items(), key=lambda one: (-one[1][1].itemsize, one[0] in texts)))


def in_files(tensors: Mapping[str, WrittenTensor], most: int) -> dict[str, list[str]]:
    """Returns file name -> tensors; one file where they fit, else numbered shards of at most `most` bytes."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensor.kinds(name).values())
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def gathered(tensors: Mapping[str, WrittenTensor], held: Held) -> Iterator[tuple[str, WrittenTensor, list[Any]]]:
    """Returns each tensor with what it is made of, on the main process; None per part on the others."""
    for name, tensor in tensors.items():
        packed = _as_stored(tensor, held)
        yield name, tensor, [packed] if packed else [_part(row, at, held) for row, at in tensor.parts]


def _as_stored(tensor: WrittenTensor, held: Held) -> PackedTensor | None:
    """A tensor that is quantized already as it is to be written: another quantization would round its scales again."""
    if tensor.double is None or not is_main_process():
        return None
    arrays = [(held[row.state][row.path], at) for row, at in tensor.parts if isinstance(row, Entry)]
    if not all(isinstance(one, StoredParameter) for one, _ in arrays):
        return None
    source, names = arrays[0][0].published.source, {one.name_at(at) for one, at in arrays}
    if len(names) > 1 or not isinstance(source, QuantizedSource) or (name := names.pop()) not in source.quantized:
        return None
    shape, _, offset = source.quantized[name]
    return source.packed(name) if (shape, offset is not None) == (tensor.shape, tensor.double) else None


def _part(row: Entry | Constant, position: Position, held: Held) -> Any:
    if isinstance(row, Constant):
        return None
    array = held[row.state][row.path]
    if isinstance(array, StoredParameter):
        return array.read(position) if is_main_process() else None
    if not isinstance(array, Nf4Kernel):
        return on_main_host(array, position)
    names = ("codes", "absmax") if array.offset is None else ("codes", "absmax", "nested_absmax", "offset")
    return {name: on_main_host(getattr(array, name), position) for name in names}


def assembled(
    parts: Iterable[tuple[str, WrittenTensor, list[Any]]], linears: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Returns name and array of what stands in a file for tensors; descriptions of quantized ones come last.

    Args:
        parts: From `gathered`, on the main process.
        linears: Path of a kernel -> numbers of input and output dims, of what is quantized.
    """
    texts: dict[str, np.ndarray] = {}
    for name, tensor, found in parts:
        if tensor.double is None:
            yield name, floats_of(tensor, found)
            continue
        if isinstance(found[0], PackedTensor):
            packed = found[0]
        elif isinstance(found[0], Mapping):
            rows = [row for row, _ in tensor.parts if isinstance(row, Entry)]
            packed = _joined(list(zip(rows, found, strict=True)), linears)
        else:
            packed = pack_floats(floats_of(tensor, found), double=tensor.double)
        for part, array in packed_parts(name, packed, tensor.shape, tensor.dtype.name):
            if part == state_name(name):
                texts[part] = array
            else:
                yield part, array
    yield from texts.items()


def floats_of(tensor: WrittenTensor, parts: Sequence[Any]) -> np.ndarray:
    """Returns a tensor that is written in floats.

    Raises:
        ConfigError: A number is beyond the largest of its dtype.
    """
    out = np.empty(tensor.shape, tensor.dtype)
    for (row, _), part in zip(tensor.parts, parts, strict=True):
        if isinstance(row, Constant):
            out[...] = row.value
            continue
        with np.errstate(over="raise"):
            try:
                row.transform.write(out, part)
            except FloatingPointError:
                most = ml_dtypes.finfo(tensor.dtype).max
                raise ConfigError(
                    f"{row.path} holds numbers beyond {float(most):g}, the largest of {tensor.dtype}; write float32 "
                    "or bfloat16"
                ) from None
    return out


def _joined(
    parts: Sequence[tuple[Entry, Mapping[str, np.ndarray]]], linears: Mapping[str, tuple[int, int]]
) -> PackedTensor:
    """The quantized tensor that layers of nf4 kernels are: each of them takes rows of it."""
    row, arrays = parts[0]
    if len(parts) == 1 and _is_whole(row, linears):
        codes, absmax = _by_output(arrays["codes"]), _by_output(arrays["absmax"])
        if "offset" not in arrays:
            return PackedTensor(codes, absmax)
        return PackedTensor(codes, absmax, arrays["nested_absmax"], float(arrays["offset"]))
    outputs, inputs = row.transform.theirs
    codes = np.zeros((outputs, inputs // 2), np.uint8)
    absmax = np.zeros((outputs, inputs // BLOCK), np.float32)
    for row, arrays in parts:
        rows = rows_of_outputs(row.transform, linears[row.path])
        codes[rows], magnitudes = _by_output(arrays["codes"]), _by_output(arrays["absmax"])
        if "offset" in arrays:
            magnitudes = dequantize_magnitudes(magnitudes, arrays["nested_absmax"], float(arrays["offset"]))
        absmax[rows] = magnitudes
    return PackedTensor(codes, absmax)


def _by_output(array: np.ndarray) -> np.ndarray:
    """[n, *F] -> [F, n]."""
    return np.ascontiguousarray(array.reshape(len(array), -1).T)


def _is_whole(row: Entry, linears: Mapping[str, tuple[int, int]]) -> bool:
    """Whether the outputs of a kernel are all rows of its tensor, in order."""
    rows = rows_of_outputs(row.transform, linears[row.path])
    return rows is not None and np.array_equal(rows, np.arange(row.transform.theirs[0]))


def on_main_host(array: Any, position: Position) -> np.ndarray | None:
    """Returns what stands at a position of the leading dimensions of an array.

    Every process calls it, in the same order where an array is sharded over processes.

    Args:
        array: Array of NumPy or jax, sharded in any way.
        position: Index in each of the leading dimensions (layer, expert); (): the whole array.

    Returns:
        On the main process the part, of the array's dtype; None on the others.
    """
    main = is_main_process()
    if not isinstance(array, jax.Array):
        return np.asarray(array)[position] if main else None
    sharding = array.sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    # Waited for on every process, so that no more than one part is on the devices.
    part = jax.block_until_ready(_gather(whole)(array, *position))
    # Copied from the first device alone; the others' copies go with `part`.
    return np.asarray(part.addressable_data(0)) if main else None


@functools.lru_cache(maxsize=8)
def _gather(sharding: NamedSharding | None) -> Any:
    def pick(array: jax.Array, *position: jax.Array) -> jax.Array:
        for at in position:
            array = jax.lax.dynamic_index_in_dim(array, at, keepdims=False)
        return array

    return jax.jit(pick, out_shardings=sharding)
