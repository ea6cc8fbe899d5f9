"""The protocol of a format: rows by number, each its columns by name. What a row means is no matter of a format."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.skipped import BadRecordError, SkippedRecords
from jaxtrain.errors import DataError

# Column -> a plain Python value: text, bytes, a number, a list, a dict or None.
Cells = dict[str, Any]
# (key of the config that names a column, or None where none can; name of the column)
Column = tuple[str | None, str]
# Rows that are read together in a pass from the first to the last.
_ROWS_OF_A_PASS = 512


class Reader(Protocol):
    """Rows of a file, or of several. Reading is safe from many threads.

    Attributes:
        label: The file, for messages.
    """

    label: str

    def __len__(self) -> int:
        """Returns the number of rows."""
        ...

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        """Returns rows by their numbers, in this order: the columns that were asked for.

        Raises:
            BadRecordError: The content of a row is at fault.
            DataError: The file cannot be read, or is damaged.
        """
        ...

    def name_of(self, number: int) -> str:
        """Returns where a row comes from: the file and the row in it."""
        ...


class JoinedReader:
    """The rows of several files, one file after another."""

    def __init__(self, readers: Sequence[Reader], *, label: str):
        self.label = label
        self._readers = readers
        self._starts = np.cumsum([0, *map(len, readers)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        return by_part(self._starts, numbers, lambda part, inside: self._readers[part].rows(inside))

    def name_of(self, number: int) -> str:
        file = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._readers[file].name_of(number - int(self._starts[file]))


def by_part(
    starts: np.ndarray, numbers: Sequence[int], read: Callable[[int, list[int]], Sequence[Cells]]
) -> list[Cells]:
    """Reads rows that lie in parts (files, row groups), each part once.

    Args:
        starts: The first row of each part, and the end of the last one.
        numbers: Of the rows.
        read: (part, numbers of rows inside of it) -> these rows.
    """
    wanted = np.asarray(numbers, np.int64)
    which = np.searchsorted(starts, wanted, side="right") - 1
    found: list[Cells] = [{}] * len(wanted)
    for part in np.unique(which).tolist():
        places = np.flatnonzero(which == part)
        for place, row in zip(places.tolist(), read(part, (wanted[places] - starts[part]).tolist()), strict=True):
            found[place] = row
    return found


def pass_over(reader: Reader, bad: Callable[[BadRecordError], None] | None = None) -> Iterator[tuple[str, Cells]]:
    """Yields where each row comes from, and its columns; see `pass_over_file`."""
    for first in range(0, len(reader), _ROWS_OF_A_PASS):
        numbers = range(first, min(first + _ROWS_OF_A_PASS, len(reader)))
        try:
            yield from zip(map(reader.name_of, numbers), reader.rows(numbers), strict=True)
        except BadRecordError:
            if bad is None:
                raise
            for number in numbers:
                try:
                    row = reader.rows([number])[0]
                except BadRecordError as error:
                    bad(error)
                else:
                    yield reader.name_of(number), row


def good_value(
    read: Callable[[int], Any], number: int, *, num_rows: int, skipped: SkippedRecords | None, label: str
) -> Any:
    """Returns what is read of a row; the next good row takes the place of a bad one that is skipped.

    Which one that is follows from the data alone, so every process finds the same without asking another.

    Args:
        read: Reads a row by its number; raises a BadRecordError where its content is at fault.
        number: Of the row.
        num_rows: Number of rows.
        skipped: Counts the bad rows; None: the first is an error.
        label: The data, for messages.
    """
    for offset in range(num_rows):
        try:
            return read((number + offset) % num_rows)
        except BadRecordError as error:
            if skipped is None:
                raise
            skipped.add(error, of=num_rows)
    raise DataError(f"{label} has no row that can be read; repair it")


def check_columns(there: Sequence[str], columns: Sequence[Column] | None, *, where: str) -> list[str]:
    """Returns the names of the wanted columns (None: all); a BadRecordError where a row, or a file, lacks one."""
    for key, name in columns or ():
        if name not in there:
            raise missing_column(where, key, name, there)
    return list(there) if columns is None else [name for _, name in columns]


def missing_column(where: str, key: str | None, name: str, there: Sequence[str]) -> BadRecordError:
    """Returns the error for a column that a file or a row does not have."""
    advice = "give a file that has it" if key is None else f"set data.{key} to one of them"
    return BadRecordError(f"{where} has no column '{name}' (it has: {', '.join(map(str, there)) or 'none'}); {advice}")
