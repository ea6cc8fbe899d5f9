"""What formats have in common: rows as columns by name, which may be asked for. What a row means is no matter of it.

A format is a function (path, columns) that yields where each row comes from and its columns; where a row can be read
without those before it, it is a `Reader`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxtrain.errors import DataError

# Column -> a plain Python value: text, bytes, a number, a list, a dict or None.
Cells = dict[str, Any]
# (key of the config that names a column, or None where none can; name of the column)
Column = tuple[str | None, str]
# Rows that are read together in a pass from the first to the last.
_ROWS_OF_A_PASS = 512


class Reader(Protocol):
    """Rows of a file, or of several, by number. Reading is safe from many threads."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        ...

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        """Returns rows by their numbers, in this order; a DataError where one cannot be read."""
        ...

    def name_of(self, number: int) -> str:
        """Returns where a row comes from: the file and the row in it."""
        ...


class JoinedReader:
    """The rows of several files, one file after another."""

    def __init__(self, readers: Sequence[Reader]):
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
    """Reads rows by their numbers from parts (files, row groups), each part once.

    `starts` are the first row of each part, and the end of the last one; `read` takes a part and numbers inside of it.
    """
    wanted = np.asarray(numbers, np.int64)
    which = np.searchsorted(starts, wanted, side="right") - 1
    found: list[Cells] = [{}] * len(wanted)
    for part in np.unique(which).tolist():
        places = np.flatnonzero(which == part)
        for place, row in zip(places.tolist(), read(part, (wanted[places] - starts[part]).tolist()), strict=True):
            found[place] = row
    return found


def pass_over(reader: Reader) -> Iterator[tuple[str, Cells]]:
    """Yields where each row of a reader comes from, and its columns."""
    for first in range(0, len(reader), _ROWS_OF_A_PASS):
        numbers = range(first, min(first + _ROWS_OF_A_PASS, len(reader)))
        yield from zip(map(reader.name_of, numbers), reader.rows(numbers), strict=True)


def check_columns(there: Sequence[str], columns: Sequence[Column] | None, *, where: str) -> list[str]:
    """Returns the names of the wanted columns (None: all); a DataError where one is missing, or two have one name."""
    if len({*there}) < len(there):
        doubled = next(name for name in there if there.count(name) > 1)
        raise DataError(f"{where} names column {doubled!r} twice; rename one")
    for key, name in columns or ():
        if name not in there:
            raise missing_column(where, key, name, there)
    return list(there) if columns is None else [name for _, name in columns]


def missing_column(where: str, key: str | None, name: str, there: Sequence[str]) -> DataError:
    """Returns the error for a column that a file or a row does not have."""
    advice = "give a file that has it" if key is None else f"set data.{key} to one of them"
    return DataError(f"{where} has no column '{name}' (it has: {', '.join(map(str, there)) or 'none'}); {advice}")


def parse_json(text: str) -> Any:
    """Returns the value of a text of JSON.

    Raises:
        ValueError: It is not JSON, or a text holds half of a character (\\ud83d alone).
    """
    value = json.loads(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def json_object(text: str, *, where: str) -> Cells:
    """Returns the object of a text of JSON at `where`; a DataError where it holds none."""
    try:
        row, reason = parse_json(text), "no object"
    except (ValueError, RecursionError) as error:
        row, reason = None, str(error)
    if not isinstance(row, dict):
        raise DataError(f"{where} is not JSON ({reason}); write one object per line, or remove the line")
    return row
