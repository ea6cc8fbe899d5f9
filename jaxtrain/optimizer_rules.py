"""What optimizers make of a parameter, from its name and shape: its layers, matrices, blocks of moments. No jax here.

The optimizers and the planner ask the same functions, so that the planner's bytes are those of the step.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.rules import AxesTable, Entry, entry_axes, entry_degree, spread_axis, table_row

# Below this many elements moments stay float32: norm scales and biases, where a byte saved is nothing.
SMALLEST_STORED = 4096
# Elements that share an exponent: few enough to be alike in size, many enough that a byte for them is nothing.
_LARGEST_BLOCK, _SMALLEST_BLOCK = 128, 16
# Shards of the last dim that should not cut a block.
_SHARDS = 8


def moment_block(shape: Sequence[int]) -> int | None:
    """Elements of a block of int8 moments, along the last dim; None: the moments of this parameter stay float32.

    A divisor of the whole parameter's last dim, never of a shard's: the state is the same on every layout. Where it
    can be it leaves a multiple of 8 blocks, so that up to 8 shards of the last dim hold whole blocks.
    """
    if not is_stored(shape):
        return None
    last = shape[-1]
    divisors = [d for d in range(_SMALLEST_BLOCK, min(last, _LARGEST_BLOCK) + 1) if last % d == 0]
    even = [d for d in divisors if last // d % _SHARDS == 0 and d >= 2 * _SMALLEST_BLOCK]
    return max(even or divisors, default=None)


def is_stored(shape: Sequence[int]) -> bool:
    """Whether a parameter is large enough for its moments to be stored in less than float32."""
    return len(shape) > 0 and math.prod(shape) >= SMALLEST_STORED


def block_entries(entries: Sequence[Entry], num_blocks: int, degrees: Mapping[str, int]) -> tuple[Entry, ...]:
    """How one number a block lies, where its parameter has these entries: alike, if the blocks divide."""
    last = entries[-1] if num_blocks % entry_degree(entries[-1], degrees) == 0 else None
    return (*entries[:-1], last)


# Mesh axes that say only where bytes are.
_STORAGE = ("fsdp", "pipe", "data")


def kept_entries(
    entries: Sequence[Entry],
    shape: Sequence[int],
    kept: Sequence[int],
    *,
    degrees: Mapping[str, int],
    counting: Sequence[int],
) -> tuple[Entry, ...] | None:
    """How statistics of shape `kept` are sharded that lack one dim of their parameter: as its other dims are.

    Of dims of one size the last counts as the missing one. Axes that store it go to another dim, if one divides.

    Args:
        entries: mesh axes of each dim of the parameter.
        shape: of the parameter.
        kept: of the statistics.
        degrees: size of each mesh axis.
        counting: dims of the parameter that count layers and experts, which get no further axis.

    Returns:
        Mesh axes of each dim of the statistics; None where no dim of the parameter can be the missing one.
    """
    for gone in reversed(range(len(shape))):
        if (*shape[:gone], *shape[gone + 1 :]) == tuple(kept):
            found = [*entries[:gone], *entries[gone + 1 :]]
            skip = {dim - (dim > gone) for dim in counting}
            lost = [axis for axis in _STORAGE if axis in entry_axes(entries[gone])]
            if "fsdp" in lost:
                # It takes a free dim only, so that the others make room and go beside it.
                beside = [dim for dim, entry in enumerate(found) if entry in ("pipe", "data") and dim not in skip]
                lost += [axis for dim in beside for axis in entry_axes(found[dim])]
                found = [None if dim in beside else entry for dim, entry in enumerate(found)]
            for axis in lost:
                found = spread_axis(found, kept, axis, degrees, skip)
            return tuple(found)
    return None


# Logical axes that count equal arrays: a layer or an expert of a stack is an array of its own.
_COUNTING = ("layers", "experts")


def _is_stacked(path: str, stack: str | None) -> bool:
    return stack is not None and path.startswith(f"{stack}/")


def _named_dims(path: str, shape: Sequence[int], axes: AxesTable, stack: str | None) -> tuple[str | None, ...] | None:
    """The row of a parameter, in which a stack's first dim counts layers, named or not; None: no row of its rank."""
    row = table_row(path, axes)
    if row is None or len(row) != len(shape):
        return None
    return ("layers", *row[1:]) if _is_stacked(path, stack) and row[:1] == (None,) else tuple(row)


def counting_dims(path: str, shape: Sequence[int], axes: AxesTable, *, stack: str | None = None) -> tuple[int, ...]:
    """The dims that count layers and experts: each index of them has one matrix, vector or number of the model.

    Args:
        path: `blocks/attention/query/kernel`.
        shape: of the whole parameter.
        axes: the model's table.
        stack: top-level path of the parameters that are stacked layer by layer.
    """
    row = _named_dims(path, shape, axes, stack)
    if row is None:
        return (0,) if _is_stacked(path, stack) and shape else ()
    return tuple(dim for dim, name in enumerate(row) if name in _COUNTING)


def factored_dims(shape: Sequence[int], counting: Sequence[int], smallest: int) -> tuple[int, int] | None:
    """The two largest dims of one layer, the larger one last; None: one of them is below `smallest`.

    Args:
        shape: of the whole parameter.
        counting: its dims that count layers and experts.
        smallest: size from which a dim is averaged over.
    """
    dims = sorted((dim for dim in range(len(shape)) if dim not in counting), key=lambda dim: (shape[dim], dim))
    if len(dims) < 2 or shape[dims[-2]] < smallest:
        return None
    return dims[-2], dims[-1]


@dataclass(frozen=True)
class Matrix:
    """The dims of a parameter that is a stack of matrices.

    Attributes:
        batch, rows, columns: dims of each kind, in order; a matrix maps its rows to its columns.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


# Logical axes that make up one side of a matrix together.
_TOGETHER = ("heads", "kv_heads", "head_dim")
# Of parameters without a row in the table: parts of names of embeddings, and beginnings of names of output layers.
_EMBEDDINGS = ("embed", "position", "vocab", "wte", "wpe")
_OUTPUTS = ("output", "head", "lm_head", "logits", "classifier")


def as_matrix(
    path: str, shape: Sequence[int], axes: AxesTable, *, stack: str | None = None, exclude: Sequence[str] = ()
) -> Matrix | None:
    """The matrices of a parameter that Muon orthogonalises; None: it is for AdamW.

    By the names of its dims: without layers and experts exactly two sides remain, where heads and head_dim make one,
    and neither is the vocabulary. An unnamed dim belongs to the next named one (the window of a convolution), and
    where no named one follows (classes, experts of a router) the parameter is an output layer. Of a parameter without
    a row, two dims (besides the layers of the stack) are a matrix unless its name is that of an embedding or output.

    Args:
        path: `blocks/attention/query/kernel`.
        shape: of the whole parameter.
        axes: the model's table.
        stack: top-level path of the parameters that are stacked layer by layer.
        exclude: patterns of paths that are for AdamW whatever their dims are.
    """
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude):
        return None
    row = _named_dims(path, shape, axes, stack)
    if row is None:
        return _unnamed_matrix(path, shape, stack)
    sides: list[tuple[str, list[int]]] = []
    batch: list[int] = []
    waiting: list[int] = []
    for dim, name in enumerate(row):
        if name in _COUNTING:
            batch.append(dim)
        elif name is None:
            waiting.append(dim)
        elif name in _TOGETHER and sides and sides[-1][0] in _TOGETHER:
            sides[-1] = (name, [*sides[-1][1], *waiting, dim])
            waiting = []
        else:
            sides.append((name, [*waiting, dim]))
            waiting = []
    if len(sides) != 2 or waiting or any(name == "vocab" for name, _ in sides):
        return None
    return _matrix(shape, batch, *(dims for _, dims in sides))


def _unnamed_matrix(path: str, shape: Sequence[int], stack: str | None) -> Matrix | None:
    parts = path.lower().split("/")
    stacked = _is_stacked(path, stack)
    if len(shape) != 2 + stacked or any(word in part for part in parts for word in _EMBEDDINGS):
        return None
    if not stacked and parts[0].startswith(_OUTPUTS):
        return None
    first = int(stacked)
    return _matrix(shape, range(first), (first,), (first + 1,))


def _matrix(shape: Sequence[int], batch: Sequence[int], rows: Sequence[int], columns: Sequence[int]) -> Matrix | None:
    # A side of one is a vector, which has no directions to make equal.
    if min(math.prod(shape[d] for d in rows), math.prod(shape[d] for d in columns)) < 2:
        return None
    return Matrix(tuple(batch), tuple(rows), tuple(columns))
