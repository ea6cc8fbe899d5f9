"""The protocol of a format: rows by number, each its columns by name. What a row means is no matter of a format."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.skipped import BadRecordError, SkippedRecords
from jaxtrain.errors import DataError

# Column -> a plain Python value: text, bytes, a number, a list, a dict or None.
Cells = dict[str, Any]
# (key of the config that names a column, or None where none can; name of the column)
Column = tuple[str | None, str]

# What the conversion of a value of Arrow raises: bytes that are no UTF-8, times beyond those of Python.
VALUE_ERRORS = (ValueError, OverflowError, NotImplementedError)

# Rows that are read together in a pass from the first to the last.
_ROWS_OF_A_PASS = 512

# Blocks of a file that are hashed: enough to tell files apart without reading terabytes at every start.
_SAMPLED_BLOCKS = 16
_BLOCK_BYTES = 4096


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
        """Returns rows by their numbers, in the order of the numbers: the columns that were asked for.

        Raises:
            BadRecordError: The content of a row is at fault.
            DataError: The file cannot be read, is damaged, or changed since it was opened.
        """
        ...

    def name_of(self, number: int) -> str:
        """Returns where a row comes from: the file and the row in it."""
        ...


class JoinedReader:
    """The rows of several files, one file after another.

    Args:
        readers: One for each file.
        label: What the user called them.
    """

    def __init__(self, readers: Sequence[Reader], *, label: str):
        self.label = label
        self._readers = readers
        self._starts = np.concatenate([[0], np.cumsum([len(reader) for reader in readers], dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        wanted = np.asarray(numbers, np.int64)
        which = np.searchsorted(self._starts, wanted, side="right") - 1
        found: list[Cells] = [{}] * len(wanted)
        for file in np.unique(which).tolist():
            places = np.flatnonzero(which == file)
            rows = self._readers[file].rows((wanted[places] - self._starts[file]).tolist())
            for place, row in zip(places.tolist(), rows, strict=True):
                found[place] = row
        return found

    def name_of(self, number: int) -> str:
        file = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._readers[file].name_of(number - int(self._starts[file]))


def pass_over(
    reader: Reader, start: int = 0, stop: int | None = None, *, bad: Callable[[BadRecordError], None] | None = None
) -> Iterator[tuple[str, Cells]]:
    """Reads rows in their order, some at a time.

    Args:
        reader: The rows.
        start, stop: The first row, and the end of those that are read; None: the last one.
        bad: Called for each row whose content is at fault, which is left out; None: it is an error.

    Yields:
        Where the row comes from, and its columns.
    """
    end = len(reader) if stop is None else stop
    for first in range(start, end, _ROWS_OF_A_PASS):
        numbers = range(first, min(first + _ROWS_OF_A_PASS, end))
        try:
            rows: list[Cells | None] = [*reader.rows(numbers)]
        except BadRecordError:
            if bad is None:
                raise
            rows = [_row_or_none(reader, number, bad) for number in numbers]
        for number, row in zip(numbers, rows, strict=True):
            if row is not None:
                yield reader.name_of(number), row


def _row_or_none(reader: Reader, number: int, bad: Callable[[BadRecordError], None]) -> Cells | None:
    try:
        return reader.rows([number])[0]
    except BadRecordError as error:
        bad(error)
        return None


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

    Raises:
        DataError: Too many rows are bad.
    """
    for offset in range(num_rows):
        try:
            return read((number + offset) % num_rows)
        except BadRecordError as error:
            if skipped is None:
                raise
            skipped.add(error, of=num_rows)
    raise DataError(f"{label} has no row that can be read; repair it")


def check_columns(there: Sequence[str], columns: Sequence[Column] | None, *, where: str) -> tuple[str, ...]:
    """Returns the names of the columns to read.

    Args:
        there: The columns that the file has.
        columns: Those that are wanted; None: all.
        where: The file, or a row of it, for messages.

    Raises:
        DataError: One is missing, or several have its name; names those that there are.
    """
    for key, name in columns or ():
        if name not in there:
            raise missing_column(where, key, name, there)
    chosen = tuple(there) if columns is None else tuple(name for _, name in columns)
    repeated = sorted(name for name, count in Counter(there).items() if count > 1 and name in chosen)
    if repeated:
        raise DataError(f"{where} has column '{repeated[0]}' twice; rename one")
    return chosen


def unreadable_value(table: Any, place: int, *, where: str) -> BadRecordError:
    """Returns the error for a row of Arrow with a value that Python has no form for, and names its column.

    Args:
        table: A table or batch of pyarrow, whose conversion raised one of `VALUE_ERRORS`.
        place: Number of the row in it.
        where: The row, for messages.
    """
    for name, column in zip(table.schema.names, table.columns, strict=True):
        try:
            column[place].as_py()
        except VALUE_ERRORS as error:
            reason = "text is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).splitlines()[0]
            return BadRecordError(f"{where} column '{name}' cannot be read ({reason}); fix or remove the row")
    return BadRecordError(f"{where} cannot be read; fix or remove the row")


def missing_column(where: str, key: str | None, name: str, there: Sequence[str]) -> DataError:
    """Returns the error for a column that a file does not have."""
    return DataError(_missing(where, key, name, there))


def missing_cell(where: str, key: str | None, name: str, there: Sequence[str]) -> BadRecordError:
    """Returns the error for a column that a row does not have, while other rows of its file may."""
    return BadRecordError(_missing(where, key, name, there))


def _missing(where: str, key: str | None, name: str, there: Sequence[str]) -> str:
    advice = "give a file that has it" if key is None else f"set data.{key} to one of them"
    return f"{where} has no column '{name}' (it has: {', '.join(map(str, there)) or 'none'}); {advice}"


def sampled_sha256(path: Path, size: int) -> str:
    """Returns a hash of blocks of a file, from its beginning to its end, which tells versions of it apart.

    Args:
        path: The file.
        size: Its size in bytes.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for offset in np.linspace(0, max(0, size - _BLOCK_BYTES), _SAMPLED_BLOCKS).astype(int).tolist():
            file.seek(offset)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def packages_needed(path: Path, package: str) -> DataError:
    """Returns the error for a file whose package is not installed."""
    return DataError(f"{path} needs {package}; run: pip install 'jaxtrain[data]'")
