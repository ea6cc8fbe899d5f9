"""Parquet files by row: a row group is decoded whole, and the last ones stay in memory."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
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
from jaxtrain.runtime.terminal import print_remark

# Decoded row groups that stay in memory, of all files together.
GROUP_BYTES = 256 * 2**20
# A file of one row group is decoded whole for a row that is not in memory; below this number of rows nobody waits.
_MANY_ROWS = 2000


class GroupCache:
    """Decoded row groups, the last used ones up to a number of bytes.

    Args:
        max_bytes: That number; one group stays, however large it is.
    """

    def __init__(self, max_bytes: int = GROUP_BYTES):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[str, int], decode: Callable[[], Any]) -> Any:
        """Returns the table of a key, which `decode` makes where it is not in memory."""
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        table = decode()
        with self._lock:
            if key not in self._tables:
                self._tables[key] = table
                self._bytes += table.nbytes
            while self._bytes > self._max_bytes and len(self._tables) > 1:
                self._bytes -= self._tables.popitem(last=False)[1].nbytes
        return table


class ParquetReader:
    """Rows of a Parquet file.

    Args:
        state: The file.
        columns: Those that are read; None: all.
        cache: Where decoded row groups are kept, shared by the files of a source.

    Raises:
        DataError: It is no Parquet file, is damaged or lacks a column, or pyarrow is not installed.
    """

    def __init__(self, state: FileState, columns: Sequence[Column] | None, cache: GroupCache):
        try:
            from pyarrow import parquet
        except ImportError:
            raise packages_needed(state.path, "pyarrow") from None
        self.label = str(state.path)
        self._state, self._cache = state, cache
        # One thread decodes a group, which the others then find in memory.
        self._lock = threading.Lock()
        try:
            with parquet.ParquetFile(state.path) as opened:
                self._metadata = opened.metadata
                there = opened.schema_arrow.names
                self.schema = opened.schema_arrow
        except _errors() as error:
            raise _unreadable(state.path, error) from None
        self._columns = check_columns(there, columns, where=self.label)
        sizes = [self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def group_starts(self) -> list[int]:
        """The first row of each row group."""
        return self._starts[:-1].tolist()

    def tell_of_groups(self) -> None:
        """Says in one line how to rewrite a file that has all its rows in one row group."""
        if len(self._starts) == 2 and len(self) >= _MANY_ROWS:
            path = self._state.path
            print_remark(
                f"{path} has its {len(self):,} rows in one row group, which is decoded whole to read a row; rewrite "
                f"it: python -c \"import pyarrow.parquet as p; p.write_table(p.read_table('{path}'), '{path.stem}"
                "-grouped.parquet', row_group_size=1000)\""
            )

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        wanted = np.asarray(numbers, np.int64)
        which = np.searchsorted(self._starts, wanted, side="right") - 1
        found: list[Cells] = [{}] * len(wanted)
        for group in np.unique(which).tolist():
            table = self._group(group)
            places = np.flatnonzero(which == group)
            inside = wanted[places] - self._starts[group]
            chosen = table.slice(int(inside[0]), 1) if len(inside) == 1 else table.take(inside)
            try:
                rows = chosen.to_pylist()
            except VALUE_ERRORS:
                rows = [self._row(chosen, i, int(number)) for i, number in enumerate(wanted[places])]
            for place, row in zip(places.tolist(), rows, strict=True):
                found[place] = row
        return found

    def _row(self, table: Any, place: int, number: int) -> Cells:
        try:
            return table.slice(place, 1).to_pylist()[0]
        except VALUE_ERRORS:
            raise unreadable_value(table, place, where=self.name_of(number)) from None

    def name_of(self, number: int) -> str:
        return f"{self.label} row {number + 1}"

    def _group(self, group: int) -> Any:
        key = (self.label, group)
        self._state.check()
        with self._lock:
            return self._cache.get(key, lambda: self._decoded(group))

    def _decoded(self, group: int) -> Any:
        from pyarrow import parquet

        try:
            # Opened for each group: thousands of files would need as many handles, and the metadata is known.
            with parquet.ParquetFile(self._state.path, metadata=self._metadata) as opened:
                found = opened.read_row_group(group, columns=list(self._columns))
                # Views, which Polars writes, can be neither taken by number nor compared.
                for i, field in enumerate(found.schema):
                    kind = _without_views(field.type)
                    if kind != field.type:
                        found = found.set_column(i, field.name, found.column(i).cast(kind))
                return found.combine_chunks()
        except _errors() as error:
            raise DataError(
                f"{self.label} cannot be decoded in row group {group + 1} of {len(self._starts) - 1} "
                f"({_first(error)}); fetch or write it again"
            ) from None


def _without_views(kind: Any) -> Any:
    """Returns a type of pyarrow whose text and bytes, also those inside lists and structs, are no views."""
    import pyarrow as pa

    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_without_views(kind.value_type)))
    return kind


def _errors() -> tuple[type[Exception], ...]:
    import pyarrow

    return pyarrow.ArrowException, OSError


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is no Parquet file ({_first(error)}); write it again")
