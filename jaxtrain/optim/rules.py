"""How optimizers treat a parameter, by its name and shape: its layers, matrices and blocks of moments. No jax here.

The optimizers and the planner call the same functions, so that the planner counts the bytes of the step.
"""

import difflib
import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.config.optimizers import (
    AdamWDirection,
    CalledOptimizer,
    DirectionConfig,
    LionDirection,
    OptimizerConfig,
    SGDDirection,
)
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import COUNTING, AxesTable, is_stacked, named_dims

# Moments of fewer elements (norm scales and biases) stay float32, because storing them in less saves hardly anything.
SMALLEST_STORED = 4096
# Elements that share an exponent: few enough to be of similar size, enough that the exponent's byte hardly counts.
_LARGEST_BLOCK, _SMALLEST_BLOCK = 128, 16
# Number of shards of the last dim for which no block should be in two shards.
_SHARDS = 8

# The largest slice of one moment that an offloaded optimizer updates at once, in bytes of float32 per device.
SLICE_BYTES = 128 * 2**20

# Iterations that make the momentum of a matrix orthogonal (Jordan et al. 2024).
NEWTON_SCHULZ_STEPS = 5


def updates_elementwise(config: OptimizerConfig) -> bool:
    """Whether an optimizer updates every number on its own, so that slices of its arrays may be updated one by one.

    Adafactor sums over rows and Muon multiplies matrices; int8 moments share exponents, and rounding to fewer bits
    draws its random numbers from an element's place in the whole array.
    """
    return not isinstance(config, CalledOptimizer) and all(
        isinstance(one, SGDDirection) or (isinstance(one, AdamWDirection | LionDirection) and one.moments == "float32")
        for one in directions(config)
    )


def directions(config: OptimizerConfig) -> list[DirectionConfig]:
    """What updates each group of an optimizer's parameters, in order, and last the rest."""
    assert not isinstance(config, CalledOptimizer)
    return [*(group.optimizer or config for group in config.groups), config]


def group_number(path: str, groups: Sequence[Sequence[str]]) -> int:
    """The group of patterns that has a parameter: the first that matches; the number of groups where none does."""
    matching = (
        number for number, patterns in enumerate(groups) if any(fnmatch.fnmatchcase(path, one) for one in patterns)
    )
    return next(matching, len(groups))


def moment_block(shape: Sequence[int]) -> int | None:
    """How many elements along the last dim form a block of int8 moments; None where they stay float32.

    It divides the last dim of the global parameter, so that the state is the same on every layout; where possible the
    number of blocks is a multiple of 8, so that up to 8 shards of the last dim hold complete blocks.
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


def factored_dims(shape: Sequence[int], smallest: int) -> tuple[int, int] | None:
    """The two largest dims of an array, over which Adafactor factors its second moment; None: one is too small."""
    dims = sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))
    return None if len(dims) < 2 or shape[dims[-2]] < smallest else (dims[-2], dims[-1])


@dataclass(frozen=True)
class Matrix:
    """The dims of a parameter that is a stack of matrices: those that count them, their inputs, their outputs."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


# Logical axes that together form one side of a matrix.
_TOGETHER = ("heads", "kv_heads", "head_dim", "outputs")
# For parameters without a row in the table: parts of names of embeddings, and beginnings of names of output layers.
_EMBEDDINGS = ("embed", "position", "vocab", "wte", "wpe")
_OUTPUTS = ("output", "head", "lm_head", "logits", "classifier")
# Names of parameters that are vectors, whatever their dims are: biases of attention are [heads, head_dim].
VECTORS = ("bias", "scale")


def complete_axes(shapes: Mapping[str, tuple[int, ...]], axes: AxesTable, stack: str | None = None) -> AxesTable:
    """Give each parameter (path -> shape) a row of logical axes: its own, else one that says little.

    Without a row of its own, the first dim of the stack counts layers. Two dims that are left are a matrix, unless the
    name is that of a vector, an embedding or an output layer; of more dims nobody knows which belong together.
    """
    rows: dict[str, tuple[str | None, ...]] = {}
    for path, shape in shapes.items():
        layers, low = int(is_stacked(path, stack) and len(shape) > 0), path.lower()
        own, num_dims = named_dims(path, shape, axes, stack), len(shape) - layers
        rest = (
            ("inputs", "outputs")
            if num_dims == 2 and low.rsplit("/", 1)[-1] not in VECTORS
            else ("outputs",) * num_dims
        )
        if any(word in low for word in _EMBEDDINGS) or (low.startswith(_OUTPUTS) and not layers):
            rest = ("vocab",) * num_dims
        rows[path] = ("layers",) * layers + rest if own is None else own
    return rows


def as_matrix(path: str, shape: Sequence[int], axes: AxesTable) -> Matrix | None:
    """Find the matrices of a parameter that Muon makes orthogonal; None where AdamW updates it.

    The names of the dims decide: besides layers and experts there must be exactly two sides, where heads and head_dim
    form one side, and neither may be the vocabulary. An unnamed dim belongs to the next named one (the window of a
    convolution); where no named one follows (classes, experts of a router) the parameter is an output layer.

    `axes` has a row for each parameter (`complete_axes`); one without a row goes by its name and global shape alone.
    """
    sides: list[tuple[str, list[int]]] = []
    batch: list[int] = []
    waiting: list[int] = []
    for dim, name in enumerate(complete_axes({path: tuple(shape)}, axes)[path]):
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
    (_, rows), (_, columns) = sides
    # A matrix with a side of 1 is a vector: there is nothing to make orthogonal.
    if min(math.prod(shape[d] for d in dims) for dims in (rows, columns)) < 2:
        return None
    return Matrix(tuple(batch), tuple(rows), tuple(columns))


def check_patterns(key: str, patterns: Sequence[str], paths: Collection[str]) -> None:
    """Raise a `ConfigError` where a pattern of paths under a config's key matches none; it names the nearest."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            near = ", ".join(difflib.get_close_matches(pattern, paths, 3, 0.0))
            raise ConfigError(f"{key}: {pattern!r} matches no parameter; the nearest are {near}")


def check_groups(key: str, groups: Sequence[Sequence[str]], paths: Collection[str]) -> None:
    """`check_patterns` of every group, with its number in place of the `{}` of `key`; one may be left with none."""
    for number, patterns in enumerate(groups):
        check_patterns(key.format(number), patterns, paths)


def num_slices(shape: tuple[int, ...]) -> int:
    """In how many slices of its first dim an array, of this shape on one device, is updated by an offloaded optimizer.

    The smallest number that divides the first dim and keeps a slice within `SLICE_BYTES`, else the size of that dim.
    """
    least = math.ceil(4 * math.prod(shape) / SLICE_BYTES)
    if least <= 1 or not shape:
        return 1
    return next((n for n in range(least, shape[0]) if shape[0] % n == 0), shape[0])
