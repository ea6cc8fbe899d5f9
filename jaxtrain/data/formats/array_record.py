"""ArrayRecord files by row. A record is an object of JSON, or text in the column `text`."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data.files import decode_utf8, reading
from jaxtrain.data.formats.reader import Cells, Column, check_columns
from jaxtrain.data.skipped import json_object

# Files of a source that are open at a time: a process has 1,024 handles unless it is told otherwise.
_MOST_OPEN = 128


class OpenFiles:
    """The ArrayRecord files of a source that were read last, which stay open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: OrderedDict[str, tuple[Any, threading.Lock]] = OrderedDict()

    def get(self, path: str) -> tuple[Any, threading.Lock]:
        """Returns the package's reader of a file, and the lock under which it is used: it has one file position."""
        from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue] compiled

        with self._lock:
            if path not in self._opened:
                # Without reading ahead: rows are asked for in any order.
                reader = array_record_module.ArrayRecordReader(path, options="readahead_buffer_size:0")
                self._opened[path] = reader, threading.Lock()
            self._opened.move_to_end(path)
            while len(self._opened) > _MOST_OPEN:
                self._opened.popitem(last=False)  # a thread that reads with it holds it; the last one closes it
            return self._opened[path]


class ArrayRecordReader:
    """Rows of an ArrayRecord file, which stays open in `opened`; its first record decides what its records are."""

    def __init__(self, path: Path, columns: Sequence[Column] | None, opened: OpenFiles):
        self.label = str(path)
        self._columns, self._opened = columns, opened
        with reading(path):
            self._num_rows = opened.get(self.label)[0].num_records()
        self._are_json = self._records([0])[0].lstrip().startswith(b"{")
        self.rows([0])

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        return [self._cells(record, number) for number, record in zip(numbers, self._records(numbers), strict=True)]

    def name_of(self, number: int) -> str:
        return f"{self.label} record {number + 1}"

    def _records(self, numbers: Sequence[int]) -> list[bytes]:
        with reading(self.label):
            reader, lock = self._opened.get(self.label)
            with lock:
                return reader.read(list(numbers))

    def _cells(self, record: bytes, number: int) -> Cells:
        where = self.name_of(number)
        text = decode_utf8(record, path=Path(where))
        row = json_object(text, where=where) if self._are_json else {"text": text}
        check_columns(list(row), self._columns, where=where)
        return row
