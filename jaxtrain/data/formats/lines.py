"""JSON lines and plain text: by row where a file is not compressed, and in passes from the first line to the last."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxtrain.data.files import BYTE_ORDER_MARK, decode_utf8, read_file, read_lines, reading
from jaxtrain.data.formats.reader import Cells, Column, chosen_cells, column_names
from jaxtrain.data.json_line import json_object
from jaxtrain.data.skipped import BadRecordError

# The column of a text file, which is one row.
TEXT = "text"


class LineReader:
    """Rows of a file of JSON lines that is not compressed; empty lines are left out.

    Args:
        path: The file.
        columns: Those that a row must have; None: it may have any.

    Raises:
        DataError: It cannot be read, or its first row lacks a column.
    """

    def __init__(self, path: Path, columns: Sequence[Column] | None):
        self.label = str(path)
        self._path, self._columns = path, columns
        starts, numbers, offset = [], [], 0
        for number, line in enumerate(read_lines(path), start=1):
            if not _is_empty(line):
                starts.append(offset)
                numbers.append(number)
            offset += len(line)
        self._starts, self._numbers = np.array(starts, np.int64), np.array(numbers, np.int64)
        if numbers:
            self.rows([0])

    def __len__(self) -> int:
        return len(self._numbers)

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        found = []
        with reading(self._path), self._path.open("rb") as file:
            for number in numbers:
                offset = int(self._starts[number])
                file.seek(offset)
                found.append(_cells(file.readline(), self._columns, self._path, int(self._numbers[number]), offset))
        return found

    def name_of(self, number: int) -> str:
        return f"{self.label}:{self._numbers[number]}"


class TextReader:
    """The one row of a text file: its content, in the column `text`.

    Args:
        path: The file.
        columns: Those that are read; None: all.
    """

    def __init__(self, path: Path, columns: Sequence[Column] | None):
        self.label = str(path)
        self._path = path
        column_names([TEXT], columns, where=self.label)

    def __len__(self) -> int:
        return 1

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        text = decode_utf8(read_file(self._path), path=self._path).removeprefix(BYTE_ORDER_MARK)
        return [{TEXT: text} for _ in numbers]

    def name_of(self, number: int) -> str:
        return self.label


def pass_over_lines(
    path: Path, columns: Sequence[Column] | None, *, bad: Callable[[BadRecordError], None] | None = None
) -> Iterator[tuple[str, Cells]]:
    """Reads a file of JSON lines, compressed or not, from the first line to the last; empty lines are left out.

    Args:
        path: The file.
        columns: Those that a line must have; None: it may have any.
        bad: Called for each line whose content is at fault, which is left out; None: it is an error.

    Yields:
        File and line, and the object of the line.

    Raises:
        BadRecordError: A line is not UTF-8, not JSON, no object, or lacks a column.
        DataError: The file cannot be read, or is damaged.
    """
    offset = 0
    for number, line in enumerate(read_lines(path), start=1):
        if not _is_empty(line):
            try:
                found = _cells(line, columns, path, number, offset)
            except BadRecordError as error:
                if bad is None:
                    raise
                bad(error)
            else:
                yield f"{path}:{number}", found
        offset += len(line)


def _is_empty(line: bytes) -> bool:
    return not line.strip().removeprefix(BYTE_ORDER_MARK.encode()).strip()


def _cells(line: bytes, columns: Sequence[Column] | None, path: Path, number: int, offset: int) -> Cells:
    where = f"{path}:{number}"
    text = decode_utf8(line, path=path, offset=offset).strip().removeprefix(BYTE_ORDER_MARK)
    row = json_object(text, where=where)
    chosen_cells(row, columns, where=where)  # the others stay: a row of chats may have more than was asked for
    return row
