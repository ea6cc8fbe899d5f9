"""Arrow files by row, mapped into memory: as Hugging Face's `datasets` writes them, and any other stream or file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.files import FileState
from jaxtrain.data.formats.reader import (
    VALUE_ERRORS,
    Cells,
    Column,
    check_columns,
    packages_needed,
    unreadable_value,
)
from jaxtrain.errors import DataError

# What `save_to_disk` writes into a folder: of one data set, and of several splits.
STATE, SPLITS = "state.json", "dataset_dict.json"

# How an Arrow file begins, and how an Arrow stream ends.
_FILE_BEGINS = b"ARROW1"
_STREAM_ENDS = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class ArrowReader:
    """Rows of an Arrow file or stream, which is mapped into memory and not read.

    Args:
        state: The file.
        columns: Those that are read; None: all.

    Raises:
        DataError: It is no Arrow file, is damaged, truncated or lacks a column, or pyarrow is not installed.
    """

    def __init__(self, state: FileState, columns: Sequence[Column] | None):
        try:
            import pyarrow
        except ImportError:
            raise packages_needed(state.path, "pyarrow") from None
        self.label = str(state.path)
        self._state = state
        is_file = _begins_as_file(state)
        try:
            # Closing it gives its handle back (thousands of files would need as many); the tables keep what is mapped.
            with pyarrow.memory_map(self.label) as mapped:
                opened = pyarrow.ipc.open_file(mapped) if is_file else pyarrow.ipc.open_stream(mapped)
                there = opened.schema.names
                table = opened.read_all()
        except (pyarrow.ArrowException, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise DataError(f"{state.path} is no Arrow file, or damaged ({reason}); fetch or write it again") from None
        self.schema = table.schema
        self._columns = check_columns(there, columns, where=self.label)
        self._batches = table.select(self._columns).to_batches()
        self._starts = np.concatenate([[0], np.cumsum([len(batch) for batch in self._batches], dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        # Reading past the end of a mapped file that became shorter ends the process.
        self._state.check()
        wanted = np.asarray(numbers, np.int64)
        which = np.searchsorted(self._starts, wanted, side="right") - 1
        inside = (wanted - self._starts[which]).tolist()
        found: list[Cells] = []
        for number, batch, place in zip(wanted.tolist(), which.tolist(), inside, strict=True):
            columns = self._batches[batch].columns
            try:
                values = [column[place].as_py() for column in columns]
            except VALUE_ERRORS:
                raise unreadable_value(self._batches[batch], place, where=self.name_of(number)) from None
            found.append(dict(zip(self._columns, values, strict=True)))
        return found

    def name_of(self, number: int) -> str:
        return f"{self.label} row {number + 1}"


def _begins_as_file(state: FileState) -> bool:
    """Returns whether a file has the form with an index at its end, and not that of a stream.

    Raises:
        DataError: It is a stream without its end.
    """
    try:
        with state.path.open("rb") as file:
            begins = file.read(len(_FILE_BEGINS))
            file.seek(max(0, state.num_bytes - len(_STREAM_ENDS)))
            ends = file.read()
    except OSError as error:
        raise DataError(f"{state.path} cannot be read ({error.strerror}); check its permissions") from None
    if begins == _FILE_BEGINS:
        return True
    if begins.startswith(_STREAM_ENDS[:4]) and ends != _STREAM_ENDS:
        raise DataError(f"{state.path} ends before its data does, it was cut off; fetch or write it again")
    return False


def saved_files(folder: Path, *, what: str) -> list[Path] | None:
    """Returns the files of a folder that `save_to_disk` of `datasets` wrote; None: it is another folder.

    Args:
        folder: Any folder.
        what: Where it was given, for messages.

    Raises:
        DataError: A file is missing, the description is damaged, or the folder holds several splits.
    """
    if (folder / SPLITS).is_file() and not (folder / STATE).is_file():
        splits = _json(folder / SPLITS).get("splits", [])
        shown = ", ".join(map(str, splits)) or "none"
        first = splits[0] if splits else "train"
        raise DataError(f"{what} {folder} holds splits ({shown}); give one of them: {folder}/{first}")
    if not (folder / STATE).is_file():
        return None
    listed = _json(folder / STATE).get("_data_files")
    entries = [one.get("filename") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    names = [name for name in entries if isinstance(name, str) and Path(name).name == name]
    if not names or len(names) < len(entries):
        raise DataError(f"{folder / STATE} lists no files of rows; save the data set again with save_to_disk")
    return [folder / name for name in names]


def class_names(schema: Any, column: str) -> list[str] | None:
    """Returns the names of the classes that `datasets` keeps for a column of numbers; None: it keeps none.

    Args:
        schema: Of pyarrow.
        column: Name of the column.
    """
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        feature = features[column]
        # Of a list of classes, those of its elements.
        names = (feature.get("feature") or feature)["names"]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def with_names(value: Any, names: Sequence[str]) -> Any:
    """Returns the names of a class's number, or of a list of them; what is no number of a class stays."""
    if isinstance(value, list):
        return [with_names(one, names) for one in value]
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names)
    return names[value] if is_number else value


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not JSON ({error}); save the data set again with save_to_disk") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no object; save the data set again with save_to_disk")
    return found
