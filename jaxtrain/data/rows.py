"""Rows by index, read a batch at a time.

A `Rows` is a `grain.MapDataset`, so every grain transformation applies to it. Its `gather` reads many rows in one
vectorised call, which costs microseconds per row, where Python calls for each row cost tens of microseconds.
"""

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np

from jaxtrain.config.arguments import check_kind, shown
from jaxtrain.data.masked import check_unmasked
from jaxtrain.data.permutation import permuted
from jaxtrain.errors import DataError
from jaxtrain.runtime.tree import path_name

# Entry -> array, or a nested dict of arrays.
Row = dict[str, Any]

# A function from positions in the endless training order, int64 [B], to row numbers, int64 [B].
Order = Callable[[np.ndarray], np.ndarray]


def grain_seed(seed: int) -> int:
    """Returns a seed of 32 bits, as grain needs it, made from a seed of any size."""
    return int(np.random.SeedSequence(seed % 2**64).generate_state(1)[0])


class Rows(grain.MapDataset):
    """A finite number of rows by index; an index past the end starts again at row 0, as in all of grain."""

    def __init__(self, num_rows: int):
        super().__init__()
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return jax.tree.map(lambda column: column[0], self.gather(np.array([index])))

    def gather(self, indices: np.ndarray) -> Row:
        """Returns the rows of these indices (int64 [B]), stacked: each entry is [B, ...] and belongs to the caller."""
        raise NotImplementedError

    def name_of(self, number: int) -> str | None:
        """Returns where a row comes from, in words (a file and a line); None where that is not known."""
        return None

    def num_tokens(self, numbers: np.ndarray) -> int | None:
        """Returns how many tokens these rows (int64 [B]) hold, without what fills them up; None: it is not known."""
        return None

    def order(self, seed: int) -> Order:
        """Returns the endless training order; each epoch is another permutation."""
        return functools.partial(permuted, num_rows=len(self), seed=seed)


class ArrayRows(Rows):
    """Rows of arrays in memory.

    Args:
        columns: One array [num_rows, ...] per entry; an entry may be a nested dict of arrays, and an array may be given
            as a list.

    Raises:
        DataError: There is no entry, an entry cannot become an array of numbers, or the entries have different lengths.

    Example:
        >>> rows = jt.ArrayRows({"inputs": np.ones((8, 4), np.float32), "targets": np.arange(8) % 3})
        >>> len(rows), rows[5]["inputs"].shape
        (8, (4,))
        >>> images = rows.map(lambda row: {**row, "inputs": row["inputs"].reshape(2, 2)})  # any transformation of grain
    """

    def __init__(self, columns: Row):
        write = "ArrayRows({'inputs': x, 'targets': y})"
        takes = "one array per entry"
        check_kind(columns, Mapping, what="ArrayRows", takes=takes, write=write)
        columns = jax.tree_util.tree_map_with_path(_array, columns, is_leaf=lambda value: isinstance(value, list))
        lengths = {
            path_name(path): len(leaf) if leaf.ndim else None
            for path, leaf in jax.tree_util.tree_leaves_with_path(columns)
        }
        if not lengths:
            raise DataError("ArrayRows takes one array per entry, such as {'inputs': ..., 'targets': ...}; it got none")
        shown = ", ".join(f"{name} has {'no' if length is None else length}" for name, length in lengths.items())
        if len(set(lengths.values())) > 1 or None in lengths.values():
            raise DataError(f"every entry holds one value per row, but {shown} rows; give arrays of one length")
        super().__init__(next(iter(lengths.values())) or 0)
        self._columns = columns

    @property
    def columns(self) -> Row:
        """The arrays, not copied."""
        return self._columns

    def gather(self, indices: np.ndarray) -> Row:
        indices = indices % len(self)
        return jax.tree.map(lambda column: column[indices], self._columns)


class ConcatenatedRows(Rows):
    """Rows of several sources, one source after another.

    Args:
        parts: The sources, with the same entries and shapes.
        weights: Relative share of each source in the training order, of any sum; None: by its number of rows.

    Raises:
        DataError: The rows of the parts differ in entries, shapes or dtypes, a weight is not a finite number above 0,
            or a part with a weight has no rows.
    """

    def __init__(self, parts: Sequence[Rows], *, weights: Sequence[float] | None = None):
        kinds = [_row_kind(part) for part in parts if len(part)]
        for kind in kinds[1:]:
            if kind != kinds[0]:
                raise DataError(f"the sources hold different rows: {kinds[0]}, and {kind}; give them the same entries")
        super().__init__(sum(len(part) for part in parts))
        if weights is not None:
            _check_weights(parts, weights)
        self._parts = parts
        self._weights = weights
        self._starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])

    def name_of(self, number: int) -> str | None:
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._parts[part].name_of(number - int(self._starts[part]))

    @property
    def is_weighted(self) -> bool:
        """Whether the training order takes from the parts by weight."""
        return self._weights is not None

    def gather(self, indices: np.ndarray) -> Row:
        epochs, indices = np.divmod(indices, len(self))
        which = np.searchsorted(self._starts, indices, side="right") - 1
        result: Row | None = None
        for i, part in enumerate(self._parts):
            chosen = which == i
            if not chosen.any():
                continue
            # The epoch goes on to the part, which may draw random numbers by it.
            found = part.gather(indices[chosen] - self._starts[i] + epochs[chosen] * len(part))
            if result is None:
                result = jax.tree.map(lambda column: np.empty((len(indices), *column.shape[1:]), column.dtype), found)
            jax.tree.map(functools.partial(_put, chosen), result, found)
        return {} if result is None else result

    def order(self, seed: int) -> Order:
        """Returns the endless order that takes from each part by weight; each part has epochs of its own.

        A short part with a large weight therefore starts its next epoch while a long one is still in its first.
        """
        if self._weights is None:
            return super().order(seed)
        mixed = grain.MapDataset.mix([_Positions(part) for part in range(len(self._parts))], list(self._weights))
        # Distinct seeds: parts of equal length would otherwise share one permutation.
        seeds = np.random.SeedSequence(seed % 2**64).generate_state(len(self._parts)).tolist()

        def order(positions: np.ndarray) -> np.ndarray:
            which, places = np.array([mixed[p] for p in positions.tolist()], np.int64).reshape(-1, 2).T
            numbers = np.empty(len(positions), np.int64)
            for i, part in enumerate(self._parts):
                chosen = which == i
                rows = permuted(places[chosen], num_rows=len(part), seed=seeds[i])
                numbers[chosen] = self._starts[i] + rows
            return numbers

        return order


class SelectedRows(Rows):
    """Some of the rows of a `Rows`, read from it when they are asked for.

    Args:
        rows: All rows.
        numbers: Which of them, int64 [num_rows].
    """

    def __init__(self, rows: Rows, numbers: np.ndarray):
        super().__init__(len(numbers))
        self._rows = rows
        self._numbers = numbers

    def name_of(self, number: int) -> str | None:
        return self._rows.name_of(int(self._numbers[number]))

    def num_tokens(self, numbers: np.ndarray) -> int | None:
        return self._rows.num_tokens(self._numbers[numbers])

    def gather(self, indices: np.ndarray) -> Row:
        epochs, places = np.divmod(indices, len(self))
        return self._rows.gather(self._numbers[places] + epochs * len(self._rows))


class MappedRows(Rows):
    """The rows of a `Rows`, changed a batch at a time.

    Args:
        rows: All rows, whose training order stays.
        change: (rows stacked, their indices int64 [B], which include the epoch) -> the changed rows, stacked.
    """

    def __init__(self, rows: Rows, change: Callable[[Row, np.ndarray], Row]):
        super().__init__(len(rows))
        self.rows = rows
        self._change = change

    def name_of(self, number: int) -> str | None:
        return self.rows.name_of(number)

    def num_tokens(self, numbers: np.ndarray) -> int | None:
        return self.rows.num_tokens(numbers)

    def gather(self, indices: np.ndarray) -> Row:
        return self._change(self.rows.gather(indices), indices)

    def order(self, seed: int) -> Order:
        return self.rows.order(seed)


class SelectedDataset(grain.MapDataset):
    """Some of the rows of a dataset that is read row by row.

    Args:
        rows: All rows.
        numbers: Which of them, int64 [num_rows].
    """

    def __init__(self, rows: grain.MapDataset, numbers: np.ndarray):
        super().__init__()
        self._rows = rows
        self._numbers = numbers

    def origin(self, number: int) -> tuple[grain.MapDataset, int]:
        """Returns all rows, and a row's number among them."""
        return self._rows, int(self._numbers[number])

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        # The epoch goes on into the index, so that random transformations draw other numbers in each.
        return self._rows[int(self._numbers[index % len(self)]) + index // len(self) * len(self._rows)]


def mean_tokens(rows: Any) -> float | None:
    """Returns the mean number of tokens of a row, without what fills rows up; None: it is not known."""
    count = rows.num_tokens(np.arange(len(rows))) if isinstance(rows, Rows) and len(rows) else None
    return None if count is None else count / len(rows)


def split_rows(rows: grain.MapDataset, *, share: float, seed: int) -> tuple[grain.MapDataset, grain.MapDataset]:
    """Splits rows at random, the same way whenever their number and the seed are the same.

    Args:
        rows: Any finite rows with an index.
        share: Share of the rows in the second part, between 0 and 1.
        seed: Decides which rows these are.

    Returns:
        The two parts, which have no row in common and are not empty.

    Raises:
        DataError: There are too few rows for two parts, or they are a mixture, whose weights would be lost.
    """
    if _has_own_order(rows):
        raise DataError(
            f"validation={share:g} would take rows out of a weighted mixture; give the rows for validation themselves"
        )
    count = max(1, round(len(rows) * share))
    if count >= len(rows):
        raise DataError(
            f"validation={share:g} of {len(rows)} rows leaves none to train on; give more rows, or a smaller share"
        )
    order = np.random.default_rng(np.random.SeedSequence(seed % 2**64)).permutation(len(rows))
    # Each part in the order of the rows, so that a file is read forwards.
    train, validation = np.sort(order[count:]), np.sort(order[:count])
    return selected_rows(rows, train), selected_rows(rows, validation)


def selected_rows(rows: grain.MapDataset, numbers: np.ndarray) -> grain.MapDataset:
    """Returns the rows of these numbers (int64 [num_rows]), read when they are asked for."""
    return SelectedRows(rows, numbers) if isinstance(rows, Rows) else SelectedDataset(rows, numbers)


def training_order(rows: grain.MapDataset, seed: int) -> Order:
    """Returns the endless training order of rows.

    Args:
        rows: A `Rows`, or a dataset that transformations of grain made from one. Where each row is made from one row of
            the `Rows`, the order is that of the `Rows`.
        seed: Decides the order.

    Raises:
        DataError: A transformation moves, drops or repeats rows of a mixture, whose weights would be lost.
    """
    if isinstance(rows, Rows):
        return rows.order(seed)
    if isinstance(rows, _one_to_one()):
        return training_order(rows.parents[0], seed)
    if any(map(_has_own_order, rows.parents)):
        name = type(rows).__name__.removesuffix("MapDataset").strip("_")
        raise DataError(
            f"the transformation {name} loses the weights of a mixture, whose rows it moves, drops or repeats; only "
            ".map, .map_with_index and .random_map keep them: apply it to each part before ConcatenatedRows instead"
        )
    return functools.partial(permuted, num_rows=len(rows), seed=seed)


def made_from(rows: grain.MapDataset) -> grain.MapDataset | None:
    """Returns the rows that a transformation of grain made these from, row by row; None: it is another."""
    return rows.parents[0] if isinstance(rows, _one_to_one()) else None


@functools.cache
def _one_to_one() -> tuple[type, ...]:
    """Returns the types of the transformations whose row i is made from row i alone; they have no public name."""
    rows = grain.MapDataset.source([0])
    drawn = rows.random_map(lambda row, random: row, seed=0)
    return tuple(map(type, (rows.map(id), rows.map_with_index(max), drawn, rows.seed(0))))


def _has_own_order(rows: grain.MapDataset) -> bool:
    if isinstance(rows, MappedRows):
        return _has_own_order(rows.rows)
    if isinstance(rows, ConcatenatedRows):
        return rows.is_weighted
    if isinstance(rows, Rows):
        return type(rows).order is not Rows.order
    return any(map(_has_own_order, rows.parents))


def _check_weights(parts: Sequence[Rows], weights: Sequence[float]) -> None:
    if len(weights) != len(parts):
        raise DataError(f"{len(parts)} parts have {len(weights)} weights; give one weight for each part")
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(f"weight {i} of the parts is {weight}; give a number above 0, or leave the part out")
        if len(part) == 0:
            raise DataError(f"part {i} has no rows to take with its weight {weight}; leave it out")


def _array(path: Any, value: Any) -> np.ndarray:
    check_unmasked(value, f"ArrayRows: {path_name(path)} is an array")
    try:
        array = np.asarray(value)
    except ValueError:
        raise DataError(f"{path_name(path)} holds lists of different lengths; pad or crop them to one length") from None
    if array.dtype.kind in "OUSMm":
        raise DataError(
            f"{path_name(path)} holds {shown(array.flat[0]) if array.size else array.dtype}, which no device can take; "
            "give an array of numbers (ids for text and classes)"
        )
    return array


def _row_kind(rows: Rows) -> str:
    """Returns the entries of a row with their dtypes and shapes, as text."""
    leaves = jax.tree_util.tree_leaves_with_path(rows[0])
    return ", ".join(f"{path_name(path)} {leaf.dtype.name}{list(leaf.shape)}" for path, leaf in leaves)


def _put(chosen: np.ndarray, column: np.ndarray, values: np.ndarray) -> None:
    """Writes `values` into the chosen places of a column."""
    column[chosen] = values


class _Positions(grain.MapDataset):
    """A dataset whose element p is (part, p), from which a mixture finds the part and the row of each position."""

    def __init__(self, part: int):
        super().__init__()
        self._part = part

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:
        return self._part, index
