"""CSV files with a header, read into memory whole; every value is a text."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtrain.data.files import BYTE_ORDER_MARK, decode_utf8, read_file
from jaxtrain.data.formats.reader import Cells, Column, column_names
from jaxtrain.data.skipped import BadRecordError
from jaxtrain.errors import DataError


class CsvReader:
    """Rows of a .csv or .tsv file; commas, tabs or semicolons are between the columns.

    Args:
        path: The file.
        columns: Those that are read; None: all.

    Raises:
        DataError: It is empty, lacks a column, or has a quote that is never closed.
    """

    def __init__(self, path: Path, columns: Sequence[Column] | None):
        self.label = str(path)
        content = read_file(path)
        end = content.find(b"\n") + 1 or len(content)
        header = decode_utf8(content[:end], path=path).removeprefix(BYTE_ORDER_MARK)
        # Bytes that are no UTF-8 are half characters, by which the row is known when it is read.
        text = header + content[end:].decode("utf-8", errors="surrogateescape")
        rows = _rows(text, max(",\t;", key=header.count), path)
        _, names = next(rows, ("", []))
        if isinstance(names, str):
            raise DataError(names)
        self.header = [name.strip() for name in names]
        stripped = columns and [(key, name if name in self.header else name.strip()) for key, name in columns]
        self._chosen = column_names(self.header, stripped, where=f"{path}:1")
        self._names = [name for _, name in columns] if columns else self._chosen
        self._places = [self.header.index(name) for name in self._chosen]
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        return [self._cells(number) for number in numbers]

    def name_of(self, number: int) -> str:
        return f"{self.label}:{self._rows[number][0]}"

    def _cells(self, number: int) -> Cells:
        lines, row = self._rows[number]
        where = f"{self.label}:{lines}"
        if isinstance(row, str):
            raise BadRecordError(row)
        if len(row) != len(self.header):
            raise BadRecordError(
                f"{where} has {len(row)} fields, the header has {len(self.header)}; fix or remove the line"
            )
        found = {name: row[place] for name, place in zip(self._names, self._places, strict=True)}
        for name, value in found.items():
            if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
                raise BadRecordError(f"{where} column '{name}' is not UTF-8; write it again, or remove the line")
        return found


def _rows(text: str, separator: str, path: Path) -> Iterator[tuple[str, list[str] | str]]:
    """Yields the lines of each row, and its fields or what is wrong with it; lines without anything are left out.

    Raises:
        DataError: A quote runs over the end of its line and is closed wrongly or nowhere: the rows between are lost.
    """
    csv.field_size_limit(2**28)  # a field may be a whole document
    # Without `strict`, a field with an unclosed quote takes in the rest of the file.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    while True:
        first = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            said = f'{path}:{first} is not CSV ({error}); write a quote that is part of a text twice ("")'
            if reader.line_num != first or "unexpected end" in str(error):
                raise DataError(f"{said}, and close the quote that runs to line {reader.line_num}") from None
            yield str(first), said
            continue
        if row is None:
            return
        if row:
            yield str(first) if first == reader.line_num else f"{first}-{reader.line_num}", row
