"""Columns of a .csv file or of a file of any format of rows, with the place of each row for messages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.config.arguments import local_path
from jaxtrain.data.compression import plain_suffix
from jaxtrain.data.csv_rows import csv_rows, stripped_header
from jaxtrain.data.files import (
    BYTE_ORDER_MARK,
    COMPRESSED_SUFFIXES,
    check_is_text,
    decode_utf8,
    read_file,
    require_file,
)
from jaxtrain.data.formats.arrow import with_names
from jaxtrain.data.formats.opened import SUFFIXES, DataFile, find_rows, named_classes, pass_over_file
from jaxtrain.data.formats.reader import Column, missing_column
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
        path: A .csv (with header), .jsonl, .parquet, .arrow, .array_record or .tar file, a folder of such files but
            .csv, or one of `save_to_disk`.
        columns: (key of the config, or None where none can name another column; name of the column) of each.
        what: Name of the path in messages, such as "data.path".
        named: Column of classes, whose numbers become the names that a Parquet or Arrow file gives them.

    Returns:
        The rows in the order of the file.

    Raises:
        DataError: The file is missing, empty or of another format, or a row lacks a column.
    """
    files = row_files(path, what=what)
    records = list(_csv_rows(_csv_file(path, what), columns) if files is None else _format_rows(files, columns, named))
    if not records:
        raise DataError(f"{what} {path} has no rows; give a file with at least one")
    return records


def _csv_file(path: str, what: str) -> Path:
    file = require_file(path, what=what)
    if file.suffix not in (".csv", ".tsv"):
        if file.suffix in COMPRESSED_SUFFIXES:
            check_is_text(file)
        raise DataError(f"{what} {file} is no .csv, .jsonl or .parquet file; convert it, or rename it")
    return file


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
    """Returns the columns of a file as `read_records` takes it; of .jsonl those of its first row.

    Args:
        path: The file.
        what: Name of the path in messages.

    Raises:
        DataError: The file is missing, empty or of another format.
    """
    files = row_files(path, what=what)
    if files is None:
        text = decode_utf8(read_file(_csv_file(path, what)), path=Path(path)).removeprefix(BYTE_ORDER_MARK)
        names = stripped_header(next(csv_rows(text, path=Path(path)), ("", []))[1])
    else:
        names = list(next(pass_over_file(files[0], None), ("", {}))[1])
    if not names:
        raise DataError(f"{what} {path} has no rows; give a file with at least one")
    return names


def _csv_rows(file: Path, columns: Sequence[Column]) -> Iterator[Record]:
    text = decode_utf8(read_file(file), path=file).removeprefix(BYTE_ORDER_MARK)
    rows = csv_rows(text, path=file)
    header = stripped_header(next(rows, ("", []))[1])
    columns = [(key, name if name in header else name.strip()) for key, name in columns]
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise DataError(f"{file}:1 names column '{repeated[0]}' twice; rename one")
    for key, name in columns:
        if name not in header:
            raise missing_column(f"{file}:1", key, name, header)
    places = [header.index(name) for _, name in columns]
    for where, row in rows:
        if len(row) != len(header):
            raise DataError(f"{where} has {len(row)} fields, the header has {len(header)}; fix or remove the line")
        yield Record(where, tuple(row[place] for place in places))


def row_files(path: str, *, what: str) -> tuple[DataFile, ...] | None:
    """Returns the files of rows that a path names: a file, a folder or a glob; None: it is none of a known format.

    Args:
        path: What the user wrote.
        what: Where it was written, for messages.

    Raises:
        DataError: A file is missing, empty or damaged, or a folder holds none or several formats.
    """
    root = local_path(path, what=what, error=DataError).expanduser()
    is_known = root.is_dir() or plain_suffix(root) in SUFFIXES
    if not is_known or plain_suffix(root) == ".txt":
        return None
    return find_rows(path, what=what)


def _format_rows(files: Sequence[DataFile], columns: Sequence[Column], named: str | None) -> Iterator[Record]:
    for file in files:
        names = named_classes(file, named) if named else None
        for where, found in pass_over_file(file, columns):
            if names and named:
                found[named] = with_names(found[named], names)
            yield Record(where, tuple(found[name] for _, name in columns))


def declared_classes(path: str, column: str, *, what: str) -> list[str] | None:
    """Returns the names of the classes that the first of a path's files gives for a column; None: it gives none."""
    files = row_files(path, what=what)
    return named_classes(files[0], column) if files else None
