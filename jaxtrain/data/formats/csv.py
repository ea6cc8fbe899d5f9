"""CSV files with a header, read into memory whole; every value is a text."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtrain.data.files import BYTE_ORDER_MARK, decode_utf8, read_file
from jaxtrain.data.formats.reader import Cells, Column, check_columns
from jaxtrain.data.skipped import BadRecordError
from jaxtrain.errors import DataError


class CsvReader:
    """Rows of a .csv or .tsv file; commas, tabs or semicolons are between the columns."""

    def __init__(self, path: Path, columns: Sequence[Column] | None):
        self.label = str(path)
        content = read_file(path)
        end = content.find(b"\n") + 1 or len(content)
        header = decode_utf8(content[:end], path=path).removeprefix(BYTE_ORDER_MARK)
        # Bytes that are no UTF-8 are half characters, by which the row is known when it is read.
        text = header + content[end:].decode("utf-8", errors="surrogateescape")
        rows = _rows(text, max(",\t;", key=header.count), path)
        names = next(rows, ("", []))[1]
        self._header = [name.strip() for name in names]
        repeated = next((name for name in self._header if self._header.count(name) > 1), None)
        if isinstance(names, str) or repeated is not None:
            raise DataError(f"{path}:1 names column {repeated!r} twice; rename one" if repeated is not None else names)
        # Names with spaces around them are found, and stay as they were asked for.
        wanted = {name if name in self._header else name.strip(): name for _, name in columns or ()}
        stripped = columns and [(key, name if name in self._header else name.strip()) for key, name in columns]
        chosen = check_columns(self._header, stripped, where=f"{path}:1")
        self._places = {wanted.get(name, name): self._header.index(name) for name in chosen}
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        return [self._cells(number) for number in numbers]

    def name_of(self, number: int) -> str:
        return f"{self.label}:{self._rows[number][0]}"

    def _cells(self, number: int) -> Cells:
        where, row = self.name_of(number), self._rows[number][1]
        if isinstance(row, str):
            raise BadRecordError(row)
        if len(row) != len(self._header):
            raise BadRecordError(
                f"{where} has {len(row)} fields, the header has {len(self._header)}; fix or remove the line"
            )
        found = {name: row[place] for name, place in self._places.items()}
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
