"""The tensors of a published folder that is written: what each is made of, and how it is stored."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.interop.gather import on_main_host
from jaxtrain.interop.packing import Packing, gather_kernel, join_kernels
from jaxtrain.interop.weights import StoredParameter
from jaxtrain.layout.sharding import path_name
from jaxtrain.precision.kernels import is_kernel
from jaxtrain.precision.nf4 import Nf4Kernel
from jaxtrain.published.bitsandbytes import PackedTensor, QuantizedSource
from jaxtrain.published.bitsandbytes_writing import Kind, pack_floats, packed_kinds, packed_parts, state_name
from jaxtrain.published.entries import Constant, Entry, Row, names_of, positions
from jaxtrain.published.folder import SINGLE
from jaxtrain.published.safetensors import DTYPES
from jaxtrain.published.transforms import Shape
from jaxtrain.runtime.distributed import is_main_process

# What may be written, by the name that a config.json has for it.
SAVED_DTYPES = {"float32": DTYPES["F32"], "float16": DTYPES["F16"], "bfloat16": DTYPES["BF16"]}
# Arrays that are written: path -> array, of params (False) and of model_state (True).
Held = Mapping[bool, Mapping[str, Any]]


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor to write: what it is made of."""

    shape: Shape
    dtype: np.dtype
    parts: tuple[tuple[Entry | Constant, tuple[int, ...]], ...]
    # Whether it is quantized, and then its scales too; None: it is written in its dtype.
    double: bool | None = None

    def kinds(self, name: str) -> dict[str, Kind]:
        """Name -> shape and dtype of what stands for it in the file."""
        if self.double is None:
            return {name: (self.shape, self.dtype)}
        return packed_kinds(name, self.shape, double=self.double)


def plan_tensors(rows: tuple[Row, ...], dtypes: Mapping[str, str]) -> dict[str, WrittenTensor]:
    """Name -> tensor to write, in the order of the layers; `dtypes` as those of `Origin`."""
    found: dict[str, WrittenTensor] = {}
    placed: list[tuple[tuple[int, ...], str]] = []
    for row in rows:
        if isinstance(row, Constant):
            for position in positions(row):
                name = names_of(row, position)[0]
                placed.append((position, name))
                found[name] = WrittenTensor(row.shape, np.dtype(row.dtype), ((row, position),))
        elif isinstance(row, Entry):
            for position in positions(row):
                name = names_of(row, position)[0]
                if name not in found:
                    placed.append((position, name))
                before = found[name].parts if name in found else ()
                dtype = SAVED_DTYPES[dtypes.get(name, dtypes[""])]
                found[name] = WrittenTensor(row.transform.theirs, dtype, (*before, (row, position)))
    # Stable: within a layer, in the order of the rows.
    return {name: found[name] for _, name in sorted(placed, key=lambda one: one[0])}


def check_held(rows: tuple[Row, ...], held: Mapping[bool, Mapping[str, Any]]) -> None:
    """Raises where the arrays are not those of the model."""
    for row in rows:
        if isinstance(row, Entry):
            tree, array = "model_state" if row.state else "params", held[row.state].get(row.path)
            if array is None:
                raise ConfigError(f"{tree} lacks {row.path}, which the model has; give the {tree} of that model")
            if tuple(array.shape) != row.shape:
                shapes = f"{list(array.shape)}, but the model has {list(row.shape)}"
                raise ConfigError(f"{tree} holds {row.path} {shapes}; give the {tree} of that model")


def parameters_by_path(params: Any) -> dict[str, Any]:
    """Returns path -> float array, kernel in the place of one, or parameter of a published model."""

    def is_one(leaf: Any) -> bool:
        return is_kernel(leaf) or isinstance(leaf, StoredParameter)

    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_one)
    return {path_name(path): leaf for path, leaf in flat}


def packed_tensors(
    tensors: Mapping[str, WrittenTensor], params: Mapping[str, Any], packing: Packing
) -> dict[str, WrittenTensor]:
    """Returns the tensors with those of linear layers quantized.

    Args:
        tensors: From `plan_tensors`.
        params: Path -> array.
        packing: Which layers, and how.

    Raises:
        ConfigError: One of them cannot be quantized as other readers want it.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        if packing.takes(name, tensor.parts):
            packing.check(name, tensor.parts, params)
            found[name] = replace(tensor, double=packing.doubles(tensor.parts, params))
    if all(tensor.double is None for tensor in found.values()):
        raise ConfigError("base='nf4' is for linear layers, and the model has none; leave --base (base=) out")
    return found


def check_floats(tensors: Mapping[str, WrittenTensor], params: Mapping[str, Any]) -> None:
    """Raises where something that is no float array would be written as floats."""
    for name, tensor in tensors.items():
        for row, _ in tensor.parts:
            if tensor.double is None and isinstance(row, Entry) and not row.state and is_kernel(params[row.path]):
                raise ConfigError(
                    f"params holds {row.path} as {type(params[row.path]).__name__}, and {name} is written in floats; "
                    "give floats (jt.merge_adapters makes them), or write nf4 kernels with base='nf4'"
                )


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


def assemble_tensor(rows: tuple[Row, ...], name: str, held: Mapping[bool, Mapping[str, Any]]) -> np.ndarray:
    """Returns one tensor of a published file in float32, made of our arrays.

    Args:
        rows: The family's name table.
        name: Name of the tensor, as it is written.
        held: Path -> array, for params (False) and model_state (True).
    """
    tensors = {name: plan_tensors(rows, {"": "float32"})[name]}
    (one,) = gathered(tensors, held)
    return _floats(*one)


def in_files(tensors: Mapping[str, WrittenTensor], most: int) -> dict[str, list[str]]:
    """File name -> tensors; one file where they fit, else numbered shards."""
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


def gathered(
    tensors: Mapping[str, WrittenTensor], held: Mapping[bool, Mapping[str, Any]]
) -> Iterator[tuple[str, WrittenTensor, list[Any]]]:
    """Each tensor with what it is made of, on the main process; None per part on the others, and for constants."""
    for name, tensor in tensors.items():
        packed = _as_stored(tensor, held)
        parts = [_part(row, position, held) for row, position in tensor.parts] if packed is None else [packed]
        yield name, tensor, parts


def _as_stored(tensor: WrittenTensor, held: Mapping[bool, Mapping[str, Any]]) -> PackedTensor | None:
    """A tensor that is quantized already as it is to be written: another quantization would round its scales again."""
    if tensor.double is None or not is_main_process():
        return None
    arrays = [(held[row.state][row.path], at) for row, at in tensor.parts if isinstance(row, Entry)]
    names = {one.name_at(at) for one, at in arrays if isinstance(one, StoredParameter)}
    first = arrays[0][0] if len(arrays) == len(tensor.parts) and len(names) == 1 else None
    if not isinstance(first, StoredParameter):
        return None
    source, name = first.published.source, names.pop()
    if not isinstance(source, QuantizedSource) or name not in source.quantized:
        return None
    stored = source.quantized[name]
    is_same = stored.shape == tensor.shape and (stored.offset is not None) == tensor.double
    return source.as_stored(name) if is_same else None


def _part(row: Entry | Constant, position: tuple[int, ...], held: Mapping[bool, Mapping[str, Any]]) -> Any:
    if isinstance(row, Constant):
        return None
    array = held[row.state][row.path]
    if isinstance(array, StoredParameter):
        return array.read(position) if is_main_process() else None
    return gather_kernel(array, position) if isinstance(array, Nf4Kernel) else on_main_host(array, position)


def assembled(
    parts: Iterable[tuple[str, WrittenTensor, list[Any]]], packing: Packing | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of what stands in a file for tensors; descriptions of quantized ones come last.

    Args:
        parts: From `gathered`, on the main process.
        packing: How tensors are quantized.
    """
    texts: dict[str, np.ndarray] = {}
    for name, tensor, found in parts:
        if tensor.double is None or packing is None:
            yield name, _floats(name, tensor, found)
            continue
        if isinstance(found[0], PackedTensor):
            packed = found[0]
        elif isinstance(found[0], Mapping):
            rows = [row for row, _ in tensor.parts if isinstance(row, Entry)]
            packed = join_kernels(list(zip(rows, found, strict=True)), packing.linears)
        else:
            packed = pack_floats(_floats(name, tensor, found), double=tensor.double)
        for part, array in packed_parts(name, packed, tensor.shape, tensor.dtype.name):
            if part == state_name(name):
                texts[part] = array
            else:
                yield part, array
    yield from texts.items()


def _floats(name: str, tensor: WrittenTensor, parts: list[Any]) -> np.ndarray:
    out = np.empty(tensor.shape, tensor.dtype)
    for (row, _), part in zip(tensor.parts, parts, strict=True):
        if isinstance(row, Constant):
            out[...] = row.value
            continue
        assert part is not None, f"only the main process writes, and this one writes {name}"
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
