"""JSON lines and plain text: by row where a file is not compressed, and in passes from the first line to the last."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxtrain.data.files import BYTE_ORDER_MARK, decode_utf8, read_file, read_lines, reading
from jaxtrain.data.formats.reader import Cells, Column, check_columns
from jaxtrain.data.skipped import BadRecordError, json_object


class LineReader:
    """Rows of a file of JSON lines that is not compressed; empty lines are left out."""

    def __init__(self, path: Path, columns: Sequence[Column] | None):
        self.label = str(path)
        self._path, self._columns = path, columns
        places = [(number, offset) for number, offset, _ in _numbered_lines(path)]
        self._places = np.array(places, np.int64).reshape(-1, 2)
        self.rows(range(min(1, len(self))))

    def __len__(self) -> int:
        return len(self._places)

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        found = []
        with reading(self._path), self._path.open("rb") as file:
            for line, offset in self._places[list(numbers)].tolist():
                file.seek(offset)
                found.append(_cells(file.readline(), self._columns, self._path, line, offset))
        return found

    def name_of(self, number: int) -> str:
        return f"{self.label}:{self._places[number][0]}"


class TextReader:
    """The one row of a text file: its content, in the column `text`."""

    def __init__(self, path: Path, columns: Sequence[Column] | None):
        self.label = str(path)
        self._path = path
        check_columns(["text"], columns, where=self.label)

    def __len__(self) -> int:
        return 1

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        text = decode_utf8(read_file(self._path), path=self._path).removeprefix(BYTE_ORDER_MARK)
        return [{"text": text} for _ in numbers]

    def name_of(self, number: int) -> str:
        return self.label


def pass_over_lines(
    path: Path, columns: Sequence[Column] | None, *, bad: Callable[[BadRecordError], None] | None = None
) -> Iterator[tuple[str, Cells]]:
    """Yields file and line, and the object of each line of JSON, compressed or not; see `pass_over_file`."""
    for number, offset, line in _numbered_lines(path):
        try:
            found = _cells(line, columns, path, number, offset)
        except BadRecordError as error:
            if bad is None:
                raise
            bad(error)
        else:
            yield f"{path}:{number}", found


def _numbered_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yields the number, the first byte and the content of each line that is not empty."""
    offset = 0
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip().removeprefix(BYTE_ORDER_MARK.encode()).strip():
            yield number, offset, line
        offset += len(line)


def _cells(line: bytes, columns: Sequence[Column] | None, path: Path, number: int, offset: int) -> Cells:
    text = decode_utf8(line, path=path, offset=offset).strip().removeprefix(BYTE_ORDER_MARK)
    row = json_object(text, where=f"{path}:{number}")
    check_columns(list(row), columns, where=f"{path}:{number}")
    return row
