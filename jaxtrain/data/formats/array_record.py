"""ArrayRecord files by row. A record is an object of JSON, a `tf.train.Example`, or text."""

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.data.files import FileState
from jaxtrain.data.formats.reader import Cells, Column, check_columns, missing_cell
from jaxtrain.data.skipped import BadRecordError, json_object
from jaxtrain.errors import DataError

# The column of records that are text.
TEXT = "text"


# Files of a source that are open at a time: a process has 1,024 handles unless it is told otherwise.
MOST_OPEN = 128


class OpenFiles:
    """The files that were read last, which stay open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: OrderedDict[str, tuple[Any, threading.Lock]] = OrderedDict()

    def get(self, path: str) -> tuple[Any, threading.Lock]:
        """Returns the package's reader of a file, and the lock under which it is used: it has one file position.

        Raises:
            RuntimeError: It is no ArrayRecord file.
        """
        from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue] compiled

        with self._lock:
            if path not in self._opened:
                # Without reading ahead: rows are asked for in any order.
                reader = array_record_module.ArrayRecordReader(path, options="readahead_buffer_size:0")
                self._opened[path] = reader, threading.Lock()
            self._opened.move_to_end(path)
            while len(self._opened) > MOST_OPEN:
                # A thread that reads with it holds it; the last one closes it.
                self._opened.popitem(last=False)
            return self._opened[path]


class ArrayRecordReader:
    """Rows of an ArrayRecord file; its first record decides what its records are.

    Args:
        state: The file.
        columns: Those that are read; None: all.
        opened: The files that stay open, shared by those of a source.

    Raises:
        DataError: It is no ArrayRecord file, is damaged or truncated, lacks a column, or its package is not installed.
    """

    def __init__(self, state: FileState, columns: Sequence[Column] | None, opened: OpenFiles):
        try:
            import array_record.python  # noqa: F401  that it is there
        except ImportError:
            raise DataError(f"{state.path} needs array_record; run: pip install array-record") from None
        self.label = str(state.path)
        self._state, self._wanted, self._opened = state, columns, opened
        try:
            reader, _ = opened.get(self.label)
            self._num_rows = reader.num_records()
        except RuntimeError as error:
            raise _damaged(state, error) from None
        if not reader.ok() or self._num_rows == 0:
            raise DataError(f"{state.path} is no ArrayRecord file with records, or was cut off; fetch it again")
        first = self._records([0])[0]
        self._kind = _kind_of(first)
        check_columns(list(self._cells(first, 0)), columns, where=self.name_of(0))

    def __len__(self) -> int:
        return self._num_rows

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        self._state.check()
        numbers = list(numbers)
        found = []
        for number, record in zip(numbers, self._records(numbers), strict=True):
            cells = self._cells(record, number)
            for key, name in self._wanted or ():
                if name not in cells:
                    raise missing_cell(self.name_of(number), key, name, list(cells))
            found.append(cells)
        return found

    def name_of(self, number: int) -> str:
        return f"{self.label} record {number + 1}"

    def _records(self, numbers: list[int]) -> list[bytes]:
        try:
            reader, lock = self._opened.get(self.label)
            with lock:
                return reader.read(numbers)
        except (RuntimeError, IndexError) as error:
            raise _damaged(self._state, error) from None

    def _cells(self, record: bytes, number: int) -> Cells:
        where = self.name_of(number)
        if self._kind == "example":
            try:
                return parse_example(record)
            except (ValueError, struct.error, IndexError):
                raise BadRecordError(f"{where} is no tf.train.Example as the first is; fix or remove it") from None
        try:
            text = record.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRecordError(f"{where} is not UTF-8 at byte {error.start}; fix or remove it") from None
        return json_object(text, where=where) if self._kind == "json" else {TEXT: text}


def _damaged(state: FileState, error: Exception) -> DataError:
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return DataError(f"{state.path} is no ArrayRecord file, or damaged ({reason}); fetch or write it again")


def _kind_of(record: bytes) -> str:
    if record.lstrip().startswith(b"{"):
        return "json"
    try:
        return "example" if parse_example(record) else "text"
    except (ValueError, struct.error, IndexError):
        return "text"


def parse_example(record: bytes) -> Cells:
    """Returns the features of a `tf.train.Example`, without TensorFlow.

    Args:
        record: The message as it was serialized (Protocol Buffers, wire types 0, 1, 2 and 5).

    Returns:
        Feature -> its value, or a list where it has several or none; texts in UTF-8 as text, other bytes as they are.

    Raises:
        ValueError: It is no such message.
    """
    found: Cells = {}
    for number, features in _fields(record):
        if number != 1 or not isinstance(features, bytes):
            raise ValueError("no features")
        for _, entry in _fields(features):
            pair = dict(_fields(entry)) if isinstance(entry, bytes) else {}
            name, feature = pair.get(1), pair.get(2, b"")
            if not isinstance(name, bytes) or not isinstance(feature, bytes):
                raise ValueError("no feature")
            values = [value for kind, content in _fields(feature) for value in _values(kind, content)]
            found[name.decode("utf-8")] = values[0] if len(values) == 1 else values
    return found


def _values(kind: int, content: Any) -> Iterator[Any]:
    """Yields the values of a list of bytes (1), floats (2) or whole numbers (3)."""
    if not isinstance(content, bytes):
        raise ValueError("no list")
    for _, value in _fields(content):
        if kind == 1 and isinstance(value, bytes):
            try:
                yield value.decode("utf-8")
            except UnicodeDecodeError:
                yield value
        elif kind == 2 and isinstance(value, bytes):
            yield from struct.unpack(f"<{len(value) // 4}f", value)
        elif kind == 3 and isinstance(value, bytes):
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                yield _signed(number)
        elif kind == 3 and isinstance(value, int):
            yield _signed(value)
        else:
            raise ValueError("no list of bytes, floats or whole numbers")


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (number of the field, its bytes or whole number) of a message."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = message[at : at + size], at + size
        elif kind == 2:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        else:
            raise ValueError("no known type of field")
        if at > len(message) or key >> 3 == 0:
            raise ValueError("a field ends after its message")
        yield key >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if not byte & 128:
            return number, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
