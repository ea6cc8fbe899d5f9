"""Parquet and Arrow files by row: a row group is decoded whole and stays in memory, Arrow is mapped and not read."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.files import reading
from jaxtrain.data.formats.reader import Cells, Column, by_part, column_names
from jaxtrain.data.skipped import BadRecordError
from jaxtrain.errors import DataError

# What `save_to_disk` of `datasets` writes into a folder: of one data set, and of several splits.
_STATE, _SPLITS = "state.json", "dataset_dict.json"
# Decoded row groups that stay in memory, of all Parquet files of a source together.
_GROUP_BYTES = 256 * 2**20


class ArrowReader:
    """Rows of an Arrow file or stream, which is mapped into memory.

    Args:
        path: The file.
        columns: Those that are read; None: all.

    Raises:
        DataError: It is no Arrow file, is damaged or lacks a column, or pyarrow is not installed.
    """

    def __init__(self, path: Path, columns: Sequence[Column] | None):
        self.label = str(path)
        with reading(path):
            import pyarrow

            # Closing it gives its handle back (thousands of files would need as many); tables keep what is mapped.
            with pyarrow.memory_map(self.label) as mapped:
                is_file = mapped.read(6) == b"ARROW1"
                mapped.seek(0)
                table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(mapped).read_all()
        self.schema = table.schema
        self._parts = table.select(column_names(table.column_names, columns, where=self.label)).to_batches()
        self._starts = np.cumsum([0, *map(len, self._parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        return by_part(self._starts, numbers, lambda part, inside: [self._row(part, i) for i in inside.tolist()])

    def name_of(self, number: int) -> str:
        return f"{self.label} row {number + 1}"

    def _row(self, part: int, place: int) -> Cells:
        batch = self._parts[part]
        where = self.name_of(int(self._starts[part]) + place)
        return {
            name: _value(column, place, name, where)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }


class GroupCache:
    """Decoded row groups of the Parquet files of a source: the last used ones, up to 256 MiB, but at least one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[str, int], Any] = OrderedDict()

    def get(self, path: str, group: int, metadata: Any, columns: list[str]) -> Any:
        """Returns the table of a row group, which one thread decodes where it is not in memory."""
        from pyarrow import parquet

        with self._lock:
            if (path, group) not in self._tables:
                # Opened for each group: thousands of files would need as many handles, and the metadata is known.
                with reading(path), parquet.ParquetFile(path, metadata=metadata) as opened:
                    found = opened.read_row_group(group, columns=columns)
                self._tables[path, group] = found.combine_chunks()
                while len(self._tables) > 1 and sum(table.nbytes for table in self._tables.values()) > _GROUP_BYTES:
                    self._tables.popitem(last=False)
            self._tables.move_to_end((path, group))
            return self._tables[path, group]


class ParquetReader:
    """Rows of a Parquet file.

    Args:
        path: The file.
        columns: Those that are read; None: all.
        cache: Where decoded row groups are kept, shared by the files of a source.

    Raises:
        DataError: It is no Parquet file, is damaged or lacks a column, or pyarrow is not installed.
    """

    def __init__(self, path: Path, columns: Sequence[Column] | None, cache: GroupCache):
        self.label = str(path)
        self._cache = cache
        with reading(path):
            from pyarrow import parquet

            with parquet.ParquetFile(path) as opened:
                self._metadata, self.schema = opened.metadata, opened.schema_arrow
        self._columns = column_names(self.schema.names, columns, where=self.label)
        groups = range(self._metadata.num_row_groups)
        self._starts = np.cumsum([0, *(self._metadata.row_group(i).num_rows for i in groups)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        return by_part(self._starts, numbers, self._rows_of_group)

    def name_of(self, number: int) -> str:
        return f"{self.label} row {number + 1}"

    def _rows_of_group(self, group: int, inside: np.ndarray) -> list[Cells]:
        table = self._cache.get(self.label, group, self._metadata, self._columns)
        columns = {name: table.column(name) for name in self._columns}
        where = [self.name_of(int(self._starts[group] + place)) for place in inside]
        return [
            {name: _value(column, place, name, row) for name, column in columns.items()}
            for place, row in zip(inside.tolist(), where, strict=True)
        ]


def _value(column: Any, place: int, name: str, where: str) -> Any:
    try:
        return column[place].as_py()
    except (ValueError, OverflowError, NotImplementedError) as error:  # no UTF-8, or a time beyond those of Python
        reason = "text is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).splitlines()[0]
        raise BadRecordError(f"{where} column '{name}' cannot be read ({reason}); fix or remove the row") from None


def saved_files(folder: Path, *, what: str) -> list[Path] | None:
    """Returns the files of a folder that `save_to_disk` of `datasets` wrote; None: it is another folder.

    Args:
        folder: Any folder.
        what: Where it was given, for messages.

    Raises:
        DataError: The description is damaged, or the folder holds several splits.
    """
    if (folder / _STATE).is_file():
        with reading(folder / _STATE):
            return [folder / one["filename"] for one in json.loads((folder / _STATE).read_bytes())["_data_files"]]
    if (folder / _SPLITS).is_file():
        with reading(folder / _SPLITS):
            splits = json.loads((folder / _SPLITS).read_bytes())["splits"]
        raise DataError(f"{what} {folder} holds splits ({', '.join(splits)}); give one of them: {folder}/{splits[0]}")
    return None


def class_names(schema: Any, column: str) -> list[str] | None:
    """Returns the names of the classes that `datasets` keeps for a column of numbers; None: it keeps none.

    Args:
        schema: Of pyarrow.
        column: Name of the column.
    """
    described = (schema.metadata or {}).get(b"huggingface")
    feature = json.loads(described)["info"]["features"].get(column) if described else None
    # Of a list of classes, those of its elements.
    return (feature.get("feature") or feature).get("names") if isinstance(feature, dict) else None


def with_names(value: Any, names: Sequence[str]) -> Any:
    """Returns the names of a class's number, or of a list of them; what is no number of a class stays."""
    if isinstance(value, list):
        return [with_names(one, names) for one in value]
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names)
    return names[value] if is_number else value
