"""Rows by index, read a batch at a time.

A `Rows` is a `grain.MapDataset`, so every grain transformation applies to it. Its `gather` reads many rows in one
vectorised call, which costs microseconds per row, where Python calls for each row cost tens of microseconds.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np

from jaxtrain.config.schema import IGNORED
from jaxtrain.data.files import add_note
from jaxtrain.data.permutation import Span, evaluated_numbers, permuted
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.errors import DataError, first_line
from jaxtrain.runtime.tree import path_name

# Entry -> array, or a nested dict of arrays.
Row = dict[str, Any]

# Rows by which it is judged whether float32 tells numbers apart, at least and at most, and the part of their range that
# rounding may change.
_FEWEST_ROWS, _JUDGED_ROWS = 8, 256
_ROUNDING = 1e-4

# A function from positions in the endless training order, int64 [B], to indices, int64 [B]: those of a later epoch are
# past the end, so that random transformations draw other numbers in each.
Order = Callable[[np.ndarray], np.ndarray]


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
        columns = jax.tree_util.tree_map_with_path(
            lambda path, value: as_numbers(value, where=path_name(path)),
            columns,
            is_leaf=lambda value: isinstance(value, list),
        )
        leaves = jax.tree_util.tree_leaves_with_path(columns)
        lengths = {path_name(path): len(leaf) if leaf.ndim else "no" for path, leaf in leaves}
        if len(set(lengths.values())) != 1 or "no" in lengths.values():
            shown = ", ".join(f"{name} has {length} rows" for name, length in lengths.items()) or "there is none"
            raise DataError(f"ArrayRows takes arrays of equal length ('inputs', 'targets'), but {shown}")
        super().__init__(len(leaves[0][1]))
        self._columns = columns
        for path, leaf in leaves:
            # Other integers are ids, which stay integers.
            if leaf.dtype.kind == "f" or (leaf.dtype.kind in "iu" and path_name(path) == "targets"):
                check_differences(leaf, path_name(path))

    @property
    def columns(self) -> Row:
        """The arrays, not copied."""
        return self._columns

    def gather(self, indices: np.ndarray) -> Row:
        indices = indices % len(self)
        return jax.tree.map(lambda column: column[indices], self._columns)


def as_numbers(value: Any, *, where: str) -> np.ndarray:
    """Returns what a program gives (`where` names it) as an array.

    Raises:
        DataError: It cannot become an array, holds something other than numbers, or is masked: the mask would be lost.
    """
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{where} cannot become an array ({first_line(error)}); give numbers of one shape") from None
    if array.dtype.kind in "OUSMm" or np.ma.is_masked(value):
        shown = "masked values" if np.ma.is_masked(value) else str(array.dtype)
        raise DataError(f"{where} holds {shown}, not numbers; fill them with numbers, or leave the entry out")
    return array


def check_differences(numbers: np.ndarray, where: str) -> None:
    """Raises a DataError where numbers [N, ...] of a program differ by less than float32 tells apart."""
    if len(numbers) < _FEWEST_ROWS:
        return
    sample = numbers[:: 1 + len(numbers) // _JUDGED_ROWS]
    lost = loses_differences(sample)
    if lost.any():
        raise DataError(
            f"{where} has numbers such as {sample[0][lost].flat[0]:.15g}, whose differences float32 cannot hold; "
            "subtract a constant from them"
        )


def loses_differences(numbers: np.ndarray) -> np.ndarray:
    """Returns for each column of numbers [N, ...] whether float32, which devices use, rounds off what differs."""
    exact = numbers.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        rounding = np.abs(exact - exact.astype(jax.dtypes.canonicalize_dtype(np.float64))).max(axis=0)
        spread = np.ptp(exact, axis=0)
        return (rounding > _ROUNDING * spread) & (spread > 0)


def without_offset(
    numbers: np.ndarray, reading: Mapping[str, Any] | None, *, label: str
) -> tuple[np.ndarray, dict[str, list[float]]]:
    """Subtracts from numbers to predict, float64 [N, K], what float32 cannot hold beside their differences.

    `reading` is the `Data.reading` of the rows that a model was trained on, whose offset is taken; None: no model was.

    Returns:
        The numbers, and the entries of their own `Data.reading`: `target_offset` [K], which predictions add again.
    """
    offset = None if reading is None else reading.get("target_offset")
    lost = loses_differences(numbers)
    if reading is None and lost.any():
        offset = np.where(lost, numbers.mean(axis=0), 0.0).tolist()
        add_note(f"{label}: targets are differences from {offset}, beside which float32 cannot hold them")
    return (numbers, {}) if offset is None else (numbers - offset, {"target_offset": offset})


class ConcatenatedRows(Rows):
    """Rows of several sources, one source after another.

    Args:
        parts: The sources, with the same entries and shapes; each has rows.
        weights: Relative share of each source in the training order, above 0, of any sum; None: by its number of rows.

    Raises:
        DataError: The rows of the parts differ in entries, shapes or dtypes.
    """

    def __init__(self, parts: Sequence[Rows], *, weights: Sequence[float] | None = None):
        kinds = [_row_kind(part) for part in parts if len(part)]
        for kind in kinds[1:]:
            if kind != kinds[0]:
                raise DataError(f"the sources hold different rows: {kinds[0]}, and {kind}; give them the same entries")
        super().__init__(sum(len(part) for part in parts))
        self._parts = parts
        # Where there are some, the training order takes from the parts by weight.
        self.weights = weights
        self._starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])

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
            for column, values in zip(jax.tree.leaves(result), jax.tree.leaves(found), strict=True):
                column[chosen] = values
        return {} if result is None else result

    def order(self, seed: int) -> Order:
        """Returns the endless order that takes from each part by weight; each part has epochs of its own.

        A short part with a large weight therefore starts its next epoch while a long one is still in its first.
        """
        if self.weights is None:
            return super().order(seed)
        mixed = grain.MapDataset.mix([_Positions(part) for part in range(len(self._parts))], list(self.weights))
        # Distinct seeds: parts of equal length would otherwise share one permutation.
        seeds = np.random.SeedSequence(seed % 2**64).generate_state(len(self._parts)).tolist()

        def order(positions: np.ndarray) -> np.ndarray:
            which, places = np.array([mixed[p] for p in positions.tolist()], np.int64).reshape(-1, 2).T
            indices = np.empty(len(positions), np.int64)
            for i, part in enumerate(self._parts):
                chosen = which == i
                epochs, rows = np.divmod(permuted(places[chosen], num_rows=len(part), seed=seeds[i]), len(part))
                indices[chosen] = self._starts[i] + rows + epochs * len(self)
            return indices

        return order


def _row_kind(rows: Rows) -> str:
    """Returns the entries of a row with their dtypes and shapes, as text."""
    leaves = jax.tree_util.tree_leaves_with_path(rows[0])
    return ", ".join(f"{path_name(path)} {leaf.dtype.name}{list(leaf.shape)}" for path, leaf in leaves)


class _Positions(grain.MapDataset):
    """A dataset whose element p is (part, p), from which a mixture finds the part and the row of each position."""

    def __init__(self, part: int):
        super().__init__()
        self._part = part

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:
        return self._part, index


class TokenRows(Rows):
    """Row i is tokens[i * L : i * L + L + 1] of a span of a stream: inputs int32 [L], and targets shifted by one.

    The stream is consecutive arrays, which may be memory-mapped.
    """

    def __init__(self, segments: Sequence[np.ndarray], *, span: Span, sequence_length: int):
        super().__init__(span.num_rows(sequence_length))
        # Every slice of a memmap builds a Python object with metadata; a slice of a plain view of it does not.
        self._segments = [np.asarray(segment) for segment in segments]
        self._starts = np.concatenate([[0], np.cumsum([len(segment) for segment in segments])])
        self._span = span
        self._length = sequence_length

    def gather(self, indices: np.ndarray) -> Row:
        starts = self._span.start + (indices % len(self)) * self._length
        first = np.searchsorted(self._starts, starts, side="right") - 1
        rows_BxL1 = np.empty((len(indices), self._length + 1), np.int32)
        for row, start, segment in zip(rows_BxL1, starts.tolist(), first.tolist(), strict=True):
            filled = 0
            while filled < len(row):
                offset = start + filled - int(self._starts[segment])
                part = self._segments[segment][offset : offset + len(row) - filled]
                row[filled : filled + len(part)] = part
                filled += len(part)
                segment += 1
        return {
            "inputs": np.ascontiguousarray(rows_BxL1[:, :-1]),
            "targets": np.ascontiguousarray(rows_BxL1[:, 1:]),
        }


def padded(values: np.ndarray, starts_B: np.ndarray, sizes_B: np.ndarray, *, length: int, fill: int) -> np.ndarray:
    """Returns stretches of an array [N], from `starts_B` and of `sizes_B`, filled up at their ends: [B, length]."""
    places_L = np.arange(length)
    inside_BL = places_L < sizes_B[:, None]
    at_BL = np.where(inside_BL, starts_B[:, None] + places_L, 0)
    values = values if len(values) else np.zeros(1, values.dtype)
    return np.where(inside_BL, values[at_BL], values.dtype.type(fill))


class SelectedRows(Rows):
    """Some rows, by their numbers (int64 [num_rows]), read when they are asked for."""

    def __init__(self, rows: Rows, numbers: np.ndarray):
        super().__init__(len(numbers))
        self._rows = rows
        self._numbers = numbers

    def num_tokens(self, numbers: np.ndarray) -> int | None:
        return self._rows.num_tokens(self._numbers[numbers])

    def gather(self, indices: np.ndarray) -> Row:
        epochs, places = np.divmod(indices, len(self))
        return self._rows.gather(self._numbers[places] + epochs * len(self._rows))


class MappedRows(Rows):
    """The rows of a `Rows`, whose training order stays, changed a batch at a time.

    `change` takes stacked rows and their indices (int64 [B], which include the epoch).
    """

    def __init__(self, rows: Rows, change: Callable[[Row, np.ndarray], Row]):
        super().__init__(len(rows))
        self.rows = rows
        self._change = change

    def num_tokens(self, numbers: np.ndarray) -> int | None:
        return self.rows.num_tokens(numbers)

    def gather(self, indices: np.ndarray) -> Row:
        return self._change(self.rows.gather(indices), indices)

    def order(self, seed: int) -> Order:
        return self.rows.order(seed)


class _SelectedDataset(grain.MapDataset):
    """Some of the rows of a dataset that is read row by row."""

    def __init__(self, rows: grain.MapDataset, numbers: np.ndarray):
        super().__init__()
        self._rows = rows
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        # The epoch goes on into the index, so that random transformations draw other numbers in each.
        return self._rows[int(self._numbers[index % len(self)]) + index // len(self) * len(self._rows)]


def selected_rows(rows: grain.MapDataset, numbers: np.ndarray) -> grain.MapDataset:
    """Returns the rows of these numbers (int64 [num_rows]), read when they are asked for."""
    return SelectedRows(rows, numbers) if isinstance(rows, Rows) else _SelectedDataset(rows, numbers)


def evaluated_rows(rows: grain.MapDataset, most: int | None) -> grain.MapDataset:
    """Returns the rows that are evaluated; see `evaluated_numbers`."""
    if most is None or most >= len(rows):
        return rows
    return selected_rows(rows, evaluated_numbers(len(rows), most))


def mean_tokens(rows: Any) -> float | None:
    """Returns the mean number of tokens of a row, without what fills rows up; None: it is not known."""
    count = rows.num_tokens(np.arange(len(rows))) if isinstance(rows, Rows) and len(rows) else None
    return None if count is None else count / len(rows)


def split_rows(rows: grain.MapDataset, *, share: float, seed: int) -> tuple[grain.MapDataset, grain.MapDataset]:
    """Splits rows into two at random; which are in the second, of this share, depends on their number and the seed."""
    count = max(1, round(len(rows) * share))
    _check_unweighted(rows, f"validation={share:g}")
    if count >= len(rows):
        raise DataError(f"validation={share:g} of {len(rows)} rows leaves none to train on; give less, or the rows")
    order = np.random.default_rng(np.random.SeedSequence(seed % 2**64)).permutation(len(rows))
    # Each part in the order of the rows, so that a file is read forwards.
    train, validation = np.sort(order[count:]), np.sort(order[:count])
    return selected_rows(rows, train), selected_rows(rows, validation)


def training_order(rows: grain.MapDataset, seed: int) -> Order:
    """Returns the endless training order of rows, or of what transformations of grain made from a `Rows`."""
    if isinstance(rows, Rows):
        return rows.order(seed)
    _check_unweighted(rows, type(rows).__name__)
    return functools.partial(permuted, num_rows=len(rows), seed=seed)


def _check_unweighted(rows: grain.MapDataset, what: str) -> None:
    """Raises a DataError where rows are made of a mixture, whose weights would be lost."""
    if isinstance(rows, ConcatenatedRows) and rows.weights is not None:
        raise DataError(f"{what} loses the weights of a mixture; apply it to each part before ConcatenatedRows")
    if not isinstance(rows, Rows) or isinstance(rows, MappedRows):
        for parent in [rows.rows] if isinstance(rows, MappedRows) else rows.parents:
            _check_unweighted(parent, what)


def shown_rows(rows: Any, count: int, tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    """Yields the first rows as people read them, as JSON values; without a tokenizer the ids are shown.

    `number`, `length` (L, of each answer for a pair) and `parts`: a conversation, an answer or a text, with `name`,
    `tokens`, `trained` (tokens with a loss), `places` (those of the row that it takes) and `spans` of neighbouring
    tokens that all have a loss, or all have none: `text`, `ids` and `trained`.

    Raises:
        DataError: The rows' targets are not their tokens one place later.
    """
    for number in range(min(count, len(rows))):
        row = rows[number]
        inputs: Any = row.get("inputs")
        targets: Any = row.get("targets")
        segments: Any = None
        if isinstance(inputs, Mapping):
            segments, inputs = inputs.get("segments"), inputs.get("tokens")
        shape: tuple[int, ...] = getattr(inputs, "shape", ())
        is_known = len(shape) == 1 or (len(shape) == 2 and shape[0] == 2)
        if not is_known or inputs.dtype.kind not in "iu" or shape != getattr(targets, "shape", None):
            raise DataError("rows can be shown only if their targets are tokens, one per input token")
        trained = targets != IGNORED
        if row.get("weights") is not None:
            trained &= np.broadcast_to(row["weights"] > 0, shape)
        if len(shape) == 2:
            places: dict[str, Any] = {"chosen": 0, "rejected": 1}
        elif segments is None:
            places = {"text": slice(None)}
        else:
            places = {f"conversation {k}": segments == k for k in range(1, int(segments.max(initial=0)) + 1)}
        parts = [_part(name, inputs[at], targets[at], trained[at], tokenizer) for name, at in places.items()]
        yield {"number": number, "length": inputs.shape[-1], "parts": parts}


def _part(
    name: str, inputs: np.ndarray, targets: np.ndarray, trained: np.ndarray, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    if trained.any():
        # What follows the last token with a loss fills the row up.
        end = int(np.flatnonzero(trained)[-1]) + 1
        inputs, targets, trained = inputs[:end], targets[:end], trained[:end]
    ids = np.concatenate([inputs[:1], targets])
    # A target that is ignored is still there as the next input.
    ids[1:-1] = inputs[1:]
    has_loss = np.concatenate([[False], trained])
    borders = [0, *(np.flatnonzero(np.diff(has_loss)) + 1).tolist(), len(ids)]
    spans = []
    for a, b in itertools.pairwise(borders):
        span = ids[a:b].tolist()
        text = " ".join(map(str, span)) if tokenizer is None else tokenizer.decode(span)
        spans.append({"text": text, "ids": span, "trained": bool(has_loss[a])})
    return {"name": name, "spans": spans, "tokens": len(ids), "trained": int(has_loss.sum()), "places": len(inputs)}
