"""Rows of texts of different lengths, stored without padding and filled up when they are read.

Shapes: R rows, B rows of a batch, L tokens per row.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.data.rows import Row, Rows


@dataclass(frozen=True)
class Column:
    """Lists of integers, one per row.

    Attributes:
        values: The lists one after another, int32.
        starts: int64 [R + 1], where each begins.
        length: L, to which they are filled up.
        fill: What they are filled up with.
    """

    values: np.ndarray
    starts: np.ndarray
    length: int
    fill: int


def make_column(lists: Sequence[Sequence[int]], *, length: int, fill: int) -> Column:
    """Stores lists of at most `length` integers one after another."""
    sizes = np.fromiter((len(one) for one in lists), np.int64, len(lists))
    values = np.fromiter((value for one in lists for value in one), np.int32, int(sizes.sum()))
    return Column(values, np.concatenate([[0], np.cumsum(sizes)]), length, fill)


def take(column: Column, numbers: np.ndarray) -> np.ndarray:
    """Returns the lists of rows, filled up: int32 [B, L]."""
    starts_B = column.starts[numbers]
    places_L = np.arange(column.length)
    inside_BL = places_L < (column.starts[numbers + 1] - starts_B)[:, None]
    at_BL = np.where(inside_BL, starts_B[:, None] + places_L, 0)
    # A column without any value has nothing to index.
    values = column.values if len(column.values) else np.zeros(1, np.int32)
    return np.where(inside_BL, values[at_BL], np.int32(column.fill))


def sizes(column: Column, numbers: np.ndarray) -> np.ndarray:
    """Returns the lengths of the lists of rows: int64 [B]."""
    return column.starts[numbers + 1] - column.starts[numbers]


class RaggedRows(Rows):
    """Rows of several lists, some of which get an entry that is 1 for what is real and 0 for what fills up.

    Args:
        columns: Entry of `inputs` -> its lists.
        segments: Entry of `inputs` that says what is real -> the entry whose lists it describes.
        targets: One list per row, or an array [R, ...] of one target per row.
        numbers: Which of the rows, int64.
        label: What they are rows of, for messages; None: not known.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        segments: Mapping[str, str],
        targets: Column | np.ndarray,
        numbers: np.ndarray,
        *,
        label: str | None = None,
    ):
        super().__init__(len(numbers))
        self._columns, self._segments, self._targets, self._numbers = dict(columns), dict(segments), targets, numbers
        self._label = label

    def name_of(self, number: int) -> str | None:
        return None if self._label is None else f"row {self._numbers[number] + 1:,} of {self._label}"

    def num_tokens(self, numbers: np.ndarray) -> int:
        columns = [self._columns[described] for described in self._segments.values()]
        return int(sum(sizes(column, self._numbers[numbers]).sum() for column in columns))

    def gather(self, indices: np.ndarray) -> Row:
        numbers = self._numbers[indices % len(self)]
        inputs = {name: take(column, numbers) for name, column in self._columns.items()}
        for name, described in self._segments.items():
            column = self._columns[described]
            inputs[name] = (np.arange(column.length) < sizes(column, numbers)[:, None]).astype(np.int32)
        targets = self._targets
        return {
            "inputs": inputs,
            "targets": take(targets, numbers) if isinstance(targets, Column) else targets[numbers],
        }


def digest(columns: Mapping[str, Column], targets: Column | np.ndarray) -> str:
    """Returns a hash of all values."""
    found = hashlib.sha256()
    for column in [*columns.values(), *([targets] if isinstance(targets, Column) else [])]:
        found.update(column.values.tobytes() + column.starts.tobytes())
    if not isinstance(targets, Column):
        found.update(np.ascontiguousarray(targets).tobytes())
    return found.hexdigest()
