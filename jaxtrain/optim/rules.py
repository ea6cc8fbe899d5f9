"""What optimizers make of a parameter, from its name and shape: its layers, matrices, blocks of moments. No jax here.

The optimizers and the planner ask the same functions, so that the planner's bytes are those of the step.
"""

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.config.schema import AdamWConfig, LionConfig, OptimizerConfig, SGDConfig
from jaxtrain.layout.rules import AxesTable
from jaxtrain.layout.state_entries import COUNTING, is_stacked, named_dims

# Below this many elements moments stay float32: norm scales and biases, where a byte saved is nothing.
SMALLEST_STORED = 4096
# Elements that share an exponent: few enough to be alike in size, many enough that a byte for them is nothing.
_LARGEST_BLOCK, _SMALLEST_BLOCK = 128, 16
# Shards of the last dim that should not cut a block.
_SHARDS = 8


def updates_elementwise(config: OptimizerConfig) -> bool:
    """Whether an optimizer updates every number on its own, so that slices of its arrays may be updated one by one.

    Adafactor sums over rows and Muon multiplies matrices; int8 moments share exponents, and rounding to fewer bits
    draws its random numbers from an element's place in the whole array.

    Args:
        config: of the optimizer.
    """
    match config:
        case SGDConfig():
            return True
        case AdamWConfig() | LionConfig():
            return config.moments == "float32"
        case _:
            return False


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
    row = named_dims(path, shape, axes, stack)
    if row is None:
        return _unnamed_matrix(path, shape, stack)
    sides: list[tuple[str, list[int]]] = []
    batch: list[int] = []
    waiting: list[int] = []
    for dim, name in enumerate(row):
        if name in COUNTING:
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
    stacked = is_stacked(path, stack)
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
