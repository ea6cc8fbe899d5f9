"""JSON lines, CSV, plain text (compressed or not) and ArrayRecord: read from the first record to the last."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtrain.data.files import BYTE_ORDER_MARK, decode_utf8, read_file, read_lines, reading
from jaxtrain.data.formats.reader import Cells, Column, check_columns, json_object, parse_json
from jaxtrain.errors import DataError

# Records of an ArrayRecord file that are read together.
_RECORDS = 512


def json_rows(path: Path, columns: Sequence[Column] | None) -> Iterator[tuple[str, Cells]]:
    """Yields where each row is, and its object: of a line that is not empty, or of a file that is one array."""
    start = next(read_lines(path), b"").removeprefix(BYTE_ORDER_MARK.encode()).lstrip()
    rows = _array_items(path) if start.startswith(b"[") else _line_objects(path)
    for where, row in rows:
        check_columns(list(row), columns, where=where)
        yield where, row


def _array_items(path: Path) -> Iterator[tuple[str, Cells]]:
    with reading(path):
        rows = parse_json(_content(path))
    for number, row in enumerate(rows, start=1):
        where = f"{path} row {number}"
        if not isinstance(row, dict):
            raise DataError(f"{where} is {repr(row)[:40]}, not an object; write an array of objects")
        yield where, row


def _line_objects(path: Path) -> Iterator[tuple[str, Cells]]:
    offset = 0
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}:{number}"
        text = decode_utf8(line, path=path, offset=offset).strip().removeprefix(BYTE_ORDER_MARK)
        offset += len(line)
        if text.strip():
            yield where, json_object(text, where=where)


def whole_text(path: Path, columns: Sequence[Column] | None) -> Iterator[tuple[str, Cells]]:
    """Yields the one row of a text file: its content, in the column `text`."""
    check_columns(["text"], columns, where=str(path))
    yield str(path), {"text": _content(path)}


def csv_rows(path: Path, columns: Sequence[Column] | None) -> Iterator[tuple[str, Cells]]:
    """Yields file and line, and the texts of each row; commas, tabs or semicolons are between them, names come first.

    A quote that is closed wrongly or nowhere is an error, since the rows after it would be lost.
    """
    rows = _fields(path)
    header = [name.strip() for name in next(rows, ("", []))[1]]
    # Names with spaces around them are found, and stay as they were asked for.
    wanted = {name if name in header else name.strip(): name for _, name in columns or ()}
    stripped = columns and [(key, name if name in header else name.strip()) for key, name in columns]
    names = check_columns(header, stripped, where=f"{path}:1")
    for where, row in rows:
        if len(row) != len(header):
            raise DataError(f"{where} has {len(row)} fields, the header has {len(header)}; fix or remove the line")
        yield where, {wanted.get(name, name): row[header.index(name)] for name in names}


def _fields(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields file and lines, and the fields of each row; lines without anything are left out."""
    csv.field_size_limit(2**28)  # a field may be a whole document
    text = _content(path)
    separator = max(",\t;", key=text.partition("\n")[0].count)
    # Without `strict`, a field with an unclosed quote takes in the rest of the file.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    first = 1
    try:
        for row in reader:
            if row:
                yield f"{path}:{first}" + (f"-{reader.line_num}" if reader.line_num > first else ""), row
            first = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f'{path}:{first} is not CSV ({error}); write a quote inside of a text twice (""), and close the quote '
            f"that runs to line {reader.line_num}"
        ) from None


def _content(path: Path) -> str:
    return decode_utf8(read_file(path), path=path).removeprefix(BYTE_ORDER_MARK)


def array_records(path: Path, columns: Sequence[Column] | None) -> Iterator[tuple[str, Cells]]:
    """Yields file and number of each record, and its columns: of JSON, or text in the column `text`, as the first."""
    with reading(path):
        from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue] compiled

        reader = array_record_module.ArrayRecordReader(str(path))
    are_json = None
    for first in range(0, reader.num_records(), _RECORDS):
        numbers = range(first, min(first + _RECORDS, reader.num_records()))
        with reading(path):
            records = reader.read(list(numbers))
        for number, record in zip(numbers, records, strict=True):
            where = f"{path} record {number + 1}"
            are_json = record.lstrip().startswith(b"{") if are_json is None else are_json
            text = decode_utf8(record, path=Path(where))
            row = json_object(text, where=where) if are_json else {"text": text}
            check_columns(list(row), columns, where=where)
            yield where, row
