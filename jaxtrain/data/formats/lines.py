"""JSON lines and plain text: by row where a file is not compressed, and in passes from the first line to the last."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxtrain.data.files import BYTE_ORDER_MARK, FileState, decode_utf8, read_file, read_lines
from jaxtrain.data.formats.reader import Cells, Column, missing_cell, missing_column
from jaxtrain.data.skipped import BadRecordError, json_object
from jaxtrain.errors import DataError

# The column of a text file, which is one row.
TEXT = "text"

_CHUNK_BYTES = 2**24


class LineReader:
    """Rows of a file of JSON lines; empty lines are left out.

    Args:
        state: The file, not compressed.
        columns: Those that a row must have; None: it may have any.

    Raises:
        DataError: It cannot be read, or its first row lacks a column.
    """

    def __init__(self, state: FileState, columns: Sequence[Column] | None):
        self.label = str(state.path)
        self._state, self._wanted = state, columns
        self._starts, self._numbers = _line_starts(state)
        if len(self._numbers):
            self.rows([0])

    def __len__(self) -> int:
        return len(self._numbers)

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        self._state.check()
        found = []
        with self._state.path.open("rb") as file:
            for number in numbers:
                line = int(self._numbers[number])
                file.seek(int(self._starts[line]))
                content = file.read(int(self._starts[line + 1] - self._starts[line]))
                found.append(self._cells(content, number, offset=int(self._starts[line])))
        return found

    def name_of(self, number: int) -> str:
        return f"{self.label}:{self._numbers[number] + 1}"

    def _cells(self, content: bytes, number: int, *, offset: int) -> Cells:
        where = self.name_of(number)
        text = decode_utf8(content, path=self._state.path, offset=offset).strip().removeprefix(BYTE_ORDER_MARK)
        return _checked(json_object(text, where=where), self._wanted, where=where)


class TextReader:
    """The one row of a text file: its content, in the column `text`.

    Args:
        state: The file.
        columns: Those that are read; None: all.
    """

    def __init__(self, state: FileState, columns: Sequence[Column] | None):
        self.label = str(state.path)
        self._state = state
        for key, name in columns or ():
            if name != TEXT:
                raise missing_column(self.label, key, name, [TEXT])

    def __len__(self) -> int:
        return 1

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        content = read_file(self._state.path)
        self._state.check()
        text = decode_utf8(content, path=self._state.path).removeprefix(BYTE_ORDER_MARK)
        return [{TEXT: text} for _ in numbers]

    def name_of(self, number: int) -> str:
        return self.label


def _line_starts(state: FileState) -> tuple[np.ndarray, np.ndarray]:
    """Returns where each line begins, the end of the last one too, and the numbers of the lines that hold something."""
    ends, objects = [np.zeros(1, np.int64)], []
    try:
        with state.path.open("rb") as file:
            offset, begins_line = 0, True
            while chunk := file.read(_CHUNK_BYTES):
                content = np.frombuffer(chunk, np.uint8)
                ends.append(np.flatnonzero(content == ord("\n")) + offset + 1)
                begun = ends[-1][ends[-1] < offset + len(chunk)] - offset
                objects.append(content[np.append(0, begun) if begins_line else begun] == ord("{"))
                offset += len(chunk)
                begins_line = chunk.endswith(b"\n")
            starts = np.concatenate(ends)
            if starts[-1] != offset:
                starts = np.append(starts, offset)
            # Lines that begin as objects do hold something; the others are looked at.
            holds = np.concatenate([np.zeros(0, bool), *objects])
            for line in np.flatnonzero(~holds).tolist():
                file.seek(int(starts[line]))
                text = file.read(int(starts[line + 1] - starts[line])).decode("utf-8", errors="replace").strip()
                holds[line] = bool(text.removeprefix(BYTE_ORDER_MARK).strip())
    except OSError as error:
        raise DataError(f"{state.path} cannot be read ({error.strerror}); check its permissions") from None
    return starts, np.flatnonzero(holds)


def pass_over_lines(
    path: Path, columns: Sequence[Column] | None, *, bad: Callable[[BadRecordError], None] | None = None
) -> Iterator[tuple[str, Cells]]:
    """Reads a file of JSON lines, compressed or not, from the first line to the last.

    Args:
        path: The file.
        columns: Those that a line must have; None: it may have any.
        bad: Called for each line whose content is at fault, which is left out; None: it is an error.

    Yields:
        File and line, and the object of the line; empty lines are left out.

    Raises:
        BadRecordError: A line is not UTF-8, not JSON, no object, or lacks a column.
        DataError: The file cannot be read, or is damaged.
    """
    offset = 0
    for number, line in enumerate(read_lines(path), start=1):
        where, begins = f"{path}:{number}", offset
        offset += len(line)
        try:
            text = decode_utf8(line, path=path, offset=begins).strip().removeprefix(BYTE_ORDER_MARK).strip()
            found = _checked(json_object(text, where=where), columns, where=where) if text else None
        except BadRecordError as error:
            if bad is None:
                raise
            bad(error)
            continue
        if found is not None:
            yield where, found


def _checked(found: Cells, columns: Sequence[Column] | None, *, where: str) -> Cells:
    for key, name in columns or ():
        if name not in found:
            raise missing_cell(where, key, name, list(found))
    return found
