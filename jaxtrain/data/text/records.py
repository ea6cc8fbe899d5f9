"""Columns of a .csv, .jsonl or .parquet file, with the place of each row for messages."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.data.files import (
    BYTE_ORDER_MARK,
    COMPRESSED_SUFFIXES,
    check_is_text,
    decode_utf8,
    read_file,
    read_lines,
    require_file,
)
from jaxtrain.data.json_line import json_object
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


def read_records(path: str, columns: Sequence[tuple[str | None, str]], *, what: str) -> list[Record]:
    """Reads columns of a file.

    Args:
        path: A .csv (with header), .jsonl or .parquet file.
        columns: (key of the config, or None where none can name another column; name of the column) of each.
        what: Name of the path in messages, such as "data.path".

    Returns:
        The rows in the order of the file.

    Raises:
        DataError: The file is missing, empty or of another format, or a row lacks a column.
    """
    file = require_file(path, what=what)
    read = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}.get(file.suffix)
    if read is None:
        if file.suffix in COMPRESSED_SUFFIXES:
            check_is_text(file)
        raise DataError(f"{what} {file} is no .csv, .jsonl or .parquet file; convert it, or rename it")
    records = list(read(file, columns))
    if not records:
        raise DataError(f"{what} {file} has no rows; give a file with at least one")
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
    raise DataError(
        f"{where} column '{column}' holds {type(value).__name__!r}, not a list; give a list of texts, or text with "
        "spaces between them"
    )


def column_names(path: str, *, what: str) -> list[str]:
    """Returns the columns of a .csv, .jsonl or .parquet file, of .jsonl those of its first row.

    Args:
        path: The file.
        what: Name of the path in messages.

    Raises:
        DataError: The file is missing, empty or of another format.
    """
    file = require_file(path, what=what)
    match file.suffix:
        case ".csv":
            text = decode_utf8(read_file(file), path=file).removeprefix(BYTE_ORDER_MARK)
            names = next(csv.reader(io.StringIO(text, newline="")), [])
        case ".jsonl":
            names = list(next(json_objects(file), ("", {}))[1])
        case ".parquet":
            names = list(next(parquet_objects(file), ("", {}))[1])
        case _:
            read_records(path, (), what=what)
            names = []
    if not names:
        raise DataError(f"{what} {file} has no rows; give a file with at least one")
    return names


def _missing(where: str, key: str | None, name: str, there: Sequence[str]) -> DataError:
    advice = "give a file that has it" if key is None else f"set data.{key} to one of them"
    return DataError(f"{where} has no column '{name}' (it has: {', '.join(there) or 'none'}); {advice}")


def _csv_rows(file: Path, columns: Sequence[tuple[str | None, str]]) -> Iterator[Record]:
    text = decode_utf8(read_file(file), path=file).removeprefix(BYTE_ORDER_MARK)
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        header = next(reader, [])
        repeated = sorted({name for name in header if header.count(name) > 1})
        if repeated:
            raise DataError(f"{file}:1 names column '{repeated[0]}' twice; rename one")
        for key, name in columns:
            if name not in header:
                raise _missing(f"{file}:1", key, name, header)
        places = [header.index(name) for _, name in columns]
        for row in reader:
            if not row:
                continue
            where = f"{file}:{reader.line_num}"
            if len(row) != len(header):
                raise DataError(f"{where} has {len(row)} fields, the header has {len(header)}; fix or remove the line")
            yield Record(where, tuple(row[place] for place in places))
    except csv.Error as error:
        raise DataError(f"{file} is not CSV ({error}); write it with a header and commas") from None


def json_objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads a file of JSON lines.

    Args:
        file: Which one.

    Yields:
        File and line, and the object of the line; empty lines are left out.

    Raises:
        DataError: A line is not UTF-8, not JSON, or no object.
    """
    offset = 0
    for number, line in enumerate(read_lines(file), start=1):
        text, where = decode_utf8(line, path=file, offset=offset).strip(), f"{file}:{number}"
        offset += len(line)
        text = text.removeprefix(BYTE_ORDER_MARK).strip()
        if not text:
            continue
        yield where, json_object(text, where=where)


def _jsonl_rows(file: Path, columns: Sequence[tuple[str | None, str]]) -> Iterator[Record]:
    for where, found in json_objects(file):
        for key, name in columns:
            if name not in found:
                raise _missing(where, key, name, list(found))
        yield Record(where, tuple(found[name] for _, name in columns))


def _parquet_rows(file: Path, columns: Sequence[tuple[str | None, str]]) -> Iterator[Record]:
    for where, found in parquet_objects(file, columns):
        yield Record(where, tuple(found[name] for _, name in columns))


def parquet_objects(
    file: Path, columns: Sequence[tuple[str | None, str]] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads the rows of a Parquet file.

    Args:
        file: Which one.
        columns: (key of the config, name of the column) of those that are read; None: all.

    Yields:
        File and number of the row, and its columns by name.

    Raises:
        DataError: The file is no Parquet file or lacks a column, or pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{file} needs pyarrow; run: pip install 'jaxtrain[data]'") from None
    try:
        with parquet.ParquetFile(file) as opened:
            there = opened.schema_arrow.names
            for key, name in columns or ():
                if name not in there:
                    raise _missing(str(file), key, name, there)
            names = there if columns is None else [name for _, name in columns]
            number = 0
            for batch in opened.iter_batches(columns=names):
                lists = [batch.column(name).to_pylist() for name in names]
                for values in zip(*lists, strict=True):
                    number += 1
                    yield f"{file} row {number}", dict(zip(names, values, strict=True))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is no Parquet file ({str(error).splitlines()[0]}); write it again") from None
