"""Parquet and Arrow files by row: a row group is decoded whole and stays in memory, Arrow is mapped and not read."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.files import reading
from jaxtrain.data.formats.reader import Cells, Column, by_part, check_columns
from jaxtrain.errors import DataError, first_line

# Decoded row groups that stay in memory, of all Parquet files together: the last used ones, but at least one.
_GROUP_BYTES = 256 * 2**20
_GROUPS: "OrderedDict[tuple[ParquetReader, int], Any]" = OrderedDict()
_LOCK = threading.Lock()


class _TableReader:
    """Rows of a file that consists of tables: the batches of Arrow, the row groups of Parquet."""

    def __init__(
        self,
        path: Path,
        schema: Any,
        sizes: Sequence[int],
        columns: Sequence[Column] | None,
        table: Callable[[int], Any],
    ):
        self.path, self.schema, self._table = path, schema, table
        self.columns = check_columns(schema.names, columns, where=str(path))
        self._starts = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        return by_part(self._starts, numbers, self._rows_of_part)

    def name_of(self, number: int) -> str:
        return f"{self.path} row {number + 1}"

    def _rows_of_part(self, part: int, inside: list[int]) -> list[Cells]:
        table = self._table(part)
        columns = {name: table.column(name) for name in self.columns}
        return [{name: self._value(column, place, name, part) for name, column in columns.items()} for place in inside]

    def _value(self, column: Any, place: int, name: str, part: int) -> Any:
        try:
            return column[place].as_py()
        except (ValueError, OverflowError, NotImplementedError) as error:  # no UTF-8, a time beyond those of Python
            where = self.name_of(int(self._starts[part]) + place)
            reason = "text is not UTF-8" if isinstance(error, UnicodeDecodeError) else first_line(error)
            raise DataError(f"{where} column '{name}' cannot be read ({reason}); fix or remove the row") from None


class ArrowReader(_TableReader):
    """Rows of an Arrow file or stream, which is mapped into memory."""

    def __init__(self, path: Path, columns: Sequence[Column] | None):
        with reading(path):
            import pyarrow

            # Closing it gives its handle back (thousands of files would need as many); tables keep what is mapped.
            with pyarrow.memory_map(str(path)) as mapped:
                is_file = mapped.read(6) == b"ARROW1"
                mapped.seek(0)
                table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(mapped).read_all()
        batches = table.to_batches()
        super().__init__(path, table.schema, [len(batch) for batch in batches], columns, batches.__getitem__)


class ParquetReader(_TableReader):
    """Rows of a Parquet file."""

    def __init__(self, path: Path, columns: Sequence[Column] | None):
        with reading(path):
            from pyarrow import parquet

            with parquet.ParquetFile(path) as opened:
                self._metadata, schema = opened.metadata, opened.schema_arrow
        sizes = [self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)]
        super().__init__(path, schema, sizes, columns, self._group)

    def _group(self, part: int) -> Any:
        from pyarrow import parquet

        with _LOCK:  # one thread decodes a group, which the others then find in memory
            found = _GROUPS.pop((self, part), None)
            if found is None:
                # Opened for each group: thousands of files would need as many handles, and the metadata is known.
                with reading(self.path), parquet.ParquetFile(self.path, metadata=self._metadata) as opened:
                    found = opened.read_row_group(part, columns=self.columns).combine_chunks()
            _GROUPS[self, part] = found
            while len(_GROUPS) > 1 and sum(one.nbytes for one in _GROUPS.values()) > _GROUP_BYTES:
                _GROUPS.popitem(last=False)
            return found


def saved_files(folder: Path, *, what: str) -> list[Path] | None:
    """Returns the files of a folder that `save_to_disk` of `datasets` wrote; None: it is another folder."""
    state, splits = folder / "state.json", folder / "dataset_dict.json"
    with reading(folder):
        if state.is_file():
            return [folder / file["filename"] for file in json.loads(state.read_bytes())["_data_files"]]
        if splits.is_file():
            names = json.loads(splits.read_bytes())["splits"]
            raise DataError(f"{what} {folder} holds splits ({', '.join(names)}); give one of them: {folder}/{names[0]}")
    return None


def class_names_of(schema: Any, column: str) -> list[str] | None:
    """Returns the names of the classes that `datasets` keeps for a column of numbers; None: it keeps none."""
    described = (schema.metadata or {}).get(b"huggingface")
    feature = json.loads(described)["info"]["features"].get(column) if described else None
    # Of a list of classes, those of its elements.
    return (feature.get("feature") or feature).get("names") if isinstance(feature, dict) else None


def with_names(value: Any, names: Sequence[str] | None) -> Any:
    """Returns the names of a class's number, or of a list of them; what is no number of a class stays."""
    if isinstance(value, list):
        return [with_names(one, names) for one in value]
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names or ())
    return names[value] if is_number and names else value
