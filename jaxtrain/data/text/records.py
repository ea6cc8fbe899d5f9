"""Columns of a .csv file or of a file of any format of rows, with the place of each row for messages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.data.formats.arrow import with_names
from jaxtrain.data.formats.open import DataFile, find_rows, named_classes, pass_over_file
from jaxtrain.data.formats.reader import Column
from jaxtrain.errors import DataError


@dataclass(frozen=True)
class Record:
    """One row of a file.

    Attributes:
        where: File and line, for messages.
        values: The value of each column that was asked for, in that order.
    """

    where: str
    values: tuple[Any, ...]


def read_records(path: str, columns: Sequence[Column], *, what: str, named: str | None = None) -> list[Record]:
    """Reads columns of a file.

    Args:
        path: A file of any format, a folder of such files, or one of `save_to_disk`.
        columns: (key of the config, or None where none can name another column; name of the column) of each.
        what: Name of the path in messages, such as "data.path".
        named: Column of classes, whose numbers become the names that a Parquet or Arrow file gives them.

    Returns:
        The rows in the order of the file.

    Raises:
        DataError: The file is missing, empty or of another format, or a row lacks a column.
    """
    records = list(_rows(find_rows(path, what=what), columns, named))
    if not records:
        raise DataError(f"{what} {path} has no rows; give a file with at least one")
    return records


def text_of(value: Any, *, where: str, column: str) -> str:
    """Returns a value that is text.

    Raises:
        DataError: It is missing, or something else.
    """
    if isinstance(value, str):
        return value
    found = "has no value" if value is None else f"holds a value of type {type(value).__name__}, not text"
    raise DataError(f"{where} column '{column}' {found}; fix or remove the row")


def list_of(value: Any, *, where: str, column: str) -> list[Any]:
    """Returns a value that is a list of texts or numbers, or text with spaces between them.

    Raises:
        DataError: It is something else.
    """
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list) and all(isinstance(one, str | int) for one in value):
        return value
    found = f"a value of type {type(value).__name__}, not a list"
    if isinstance(value, list):
        other = next(one for one in value if not isinstance(one, str | int))
        found = f"a list with {'null' if other is None else repr(other)[:40]} in it, no text and no whole number"
    raise DataError(f"{where} column '{column}' holds {found}; give a list of texts, or text with spaces between them")


def column_names(path: str, *, what: str) -> list[str]:
    """Returns the columns of the first row of a file as `read_records` takes it.

    Args:
        path: The file.
        what: Name of the path in messages.

    Raises:
        DataError: The file is missing, empty or of another format.
    """
    names = list(next(pass_over_file(find_rows(path, what=what)[0], None), ("", {}))[1])
    if not names:
        raise DataError(f"{what} {path} has no rows; give a file with at least one")
    return names


def _rows(files: Sequence[DataFile], columns: Sequence[Column], named: str | None) -> Iterator[Record]:
    for file in files:
        names = named_classes(file, named) if named else None
        for where, found in pass_over_file(file, columns):
            if names and named:
                found[named] = with_names(found[named], names)
            yield Record(where, tuple(found[name] for _, name in columns))


def declared_classes(path: str, column: str, *, what: str) -> list[str] | None:
    """Returns the names of the classes that the first of a path's files gives for a column; None: it gives none."""
    return named_classes(find_rows(path, what=what)[0], column)
