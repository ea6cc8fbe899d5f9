"""How optimizers treat a parameter, by its name and shape: its layers, matrices and blocks of moments. No jax here.

The optimizers and the planner call the same functions, so that the planner counts the bytes of the step.
"""

import difflib
import fnmatch
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jaxtrain.config.optimizers import (
    AdamWDirection,
    CalledOptimizer,
    DirectionConfig,
    LionDirection,
    MuonDirection,
    OptimizerConfig,
    SGDDirection,
)
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import AxesTable
from jaxtrain.layout.state_entries import COUNTING, is_stacked, named_dims

# Moments of fewer elements (norm scales and biases) stay float32, because storing them in less saves hardly anything.
SMALLEST_STORED = 4096
# Elements that share an exponent: few enough to be of similar size, enough that the exponent's byte hardly counts.
_LARGEST_BLOCK, _SMALLEST_BLOCK = 128, 16
# Number of shards of the last dim for which no block should be in two shards.
_SHARDS = 8


def updates_elementwise(config: OptimizerConfig) -> bool:
    """Whether an optimizer updates every number on its own, so that slices of its arrays may be updated one by one.

    Adafactor sums over rows and Muon multiplies matrices; int8 moments share exponents, and rounding to fewer bits
    draws its random numbers from an element's place in the whole array.

    Args:
        config: of the optimizer.
    """
    return not isinstance(config, CalledOptimizer) and all(map(_is_elementwise, directions(config)))


def _is_elementwise(direction: DirectionConfig) -> bool:
    match direction:
        case SGDDirection():
            return True
        case AdamWDirection() | LionDirection():
            return direction.moments == "float32"
        case _:
            return False


def directions(config: OptimizerConfig) -> list[DirectionConfig]:
    """What updates each group of an optimizer's parameters, in order, and last the rest.

    Args:
        config: of the optimizer; one of the user's own updates by its function alone, and is not asked.
    """
    assert not isinstance(config, CalledOptimizer)
    return [*(group.optimizer or config for group in config.groups), config]


def adamw_patterns(config: OptimizerConfig) -> dict[str, tuple[str, ...]]:
    """Key -> patterns of the matrices that Muon leaves to AdamW, of the keys that have any.

    Args:
        config: of the optimizer.
    """
    if isinstance(config, CalledOptimizer):
        return {}
    groups = [f"optimizer.groups.{number}.optimizer.adamw" for number in range(len(config.groups))]
    of_keys = zip([*groups, "optimizer.adamw"], directions(config), strict=True)
    return {key: one.adamw for key, one in of_keys if isinstance(one, MuonDirection) and one.adamw}


def group_number(path: str, groups: Sequence[Sequence[str]]) -> int:
    """Return which group of patterns has a parameter: the first that matches; the number of groups where none does.

    Args:
        path: of the parameter.
        groups: the patterns of each group.
    """
    matching = (
        number for number, patterns in enumerate(groups) if any(fnmatch.fnmatchcase(path, one) for one in patterns)
    )
    return next(matching, len(groups))


def check_groups(key: str, groups: Sequence[Sequence[str]], paths: Collection[str]) -> None:
    """Check that every pattern of every group matches a parameter.

    A group may still be left with none, where earlier ones match all that its patterns do.

    Args:
        key: what holds the patterns, with `{}` for the number of the group, for the message.
        groups: the patterns of each group.
        paths: of the trained parameters.

    Raises:
        ConfigError: a pattern matches no parameter; names the nearest.
    """
    for number, patterns in enumerate(groups):
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
                near = ", ".join(difflib.get_close_matches(pattern, paths, 3, 0.0))
                raise ConfigError(
                    f"{key.format(number)}: {pattern!r} matches no trained parameter; the nearest are {near}"
                )


def moment_block(shape: Sequence[int]) -> int | None:
    """Choose how many elements along the last dim form a block of int8 moments.

    The number divides the last dim of the global parameter, not of a shard, so that the state is the same on every
    layout. Where possible the number of blocks is a multiple of 8, so that up to 8 shards of the last dim hold
    complete blocks.

    Args:
        shape: shape of the global parameter.

    Returns:
        Elements of a block; None where the moments of this parameter stay float32.
    """
    if not is_stored(shape):
        return None
    last = shape[-1]
    divisors = [d for d in range(_SMALLEST_BLOCK, min(last, _LARGEST_BLOCK) + 1) if last % d == 0]
    even = [d for d in divisors if last // d % _SHARDS == 0 and d >= 2 * _SMALLEST_BLOCK]
    return max(even or divisors, default=None)


def is_stored(shape: Sequence[int]) -> bool:
    """Return whether a parameter is large enough for its moments to be stored in less than float32."""
    return len(shape) > 0 and math.prod(shape) >= SMALLEST_STORED


def factored_dims(shape: Sequence[int], counting: Sequence[int], smallest: int) -> tuple[int, int] | None:
    """Return the two largest dims of one layer, over which Adafactor factors its second moment.

    Args:
        shape: shape of the global parameter.
        counting: its dims that count layers and experts.
        smallest: size from which a dim is factored.

    Returns:
        The two dims, the larger one last; None where one of them is below `smallest`.
    """
    dims = sorted((dim for dim in range(len(shape)) if dim not in counting), key=lambda dim: (shape[dim], dim))
    if len(dims) < 2 or shape[dims[-2]] < smallest:
        return None
    return dims[-2], dims[-1]


@dataclass(frozen=True)
class Matrix:
    """The dims of a parameter that is a stack of matrices.

    Attributes:
        batch: dims that count matrices, in order.
        rows: dims of the inputs of a matrix, in order.
        columns: dims of the outputs of a matrix, in order.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


# Logical axes that together form one side of a matrix.
_TOGETHER = ("heads", "kv_heads", "head_dim")
# For parameters without a row in the table: parts of names of embeddings, and beginnings of names of output layers.
_EMBEDDINGS = ("embed", "position", "vocab", "wte", "wpe")
_OUTPUTS = ("output", "head", "lm_head", "logits", "classifier")


def as_matrix(
    path: str, shape: Sequence[int], axes: AxesTable, *, stack: str | None = None, exclude: Sequence[str] = ()
) -> Matrix | None:
    """Find the matrices of a parameter that Muon makes orthogonal.

    The names of the dims decide: besides layers and experts there must be exactly two sides, where heads and head_dim
    form one side, and neither may be the vocabulary. An unnamed dim belongs to the next named one (the window of a
    convolution); where no named one follows (classes, experts of a router) the parameter is an output layer. A
    parameter without a row in the table is a matrix where it has two dims besides the layers of the stack, unless its
    name is that of an embedding or of an output layer.

    Args:
        path: path of the parameter, such as `blocks/attention/query/kernel`.
        shape: shape of the global parameter.
        axes: the model's table of logical axes.
        stack: top-level path of the parameters that are stacked layer by layer.
        exclude: patterns of paths that AdamW updates, whatever their dims are.

    Returns:
        The dims of the matrices; None where AdamW updates the parameter.
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
    # A matrix with a side of 1 is a vector: there is nothing to make orthogonal.
    if min(math.prod(shape[d] for d in rows), math.prod(shape[d] for d in columns)) < 2:
        return None
    return Matrix(tuple(batch), tuple(rows), tuple(columns))


def check_patterns(key: str, patterns: tuple[str, ...], paths: list[str]) -> None:
    """Check that each pattern of a config's key matches a parameter.

    Args:
        key: the key that holds the patterns, for the message.
        patterns: patterns of paths, with `*`.
        paths: all parameter paths.

    Raises:
        ConfigError: a pattern matches no parameter; the message names the pattern and some parameters.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            some = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")
            raise ConfigError(f"{key}: {pattern!r} matches no parameter; there are {some}")
