"""Tar shards by row, as WebDataset has them: a row is a group of members that share their name up to its first dot."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data.files import FileState
from jaxtrain.data.formats.reader import Cells, Column, missing_cell
from jaxtrain.data.formats.tar_index import tar_index
from jaxtrain.data.skipped import BadRecordError
from jaxtrain.errors import DataError

# The column that holds the name of the group.
KEY = "__key__"
# Endings of members that are text; others are bytes, and .json is read.
_TEXTS = ("txt", "text", "cls", "caption", "label")


class TarReader:
    """Rows of an uncompressed tar file, whose columns are the endings of members ("jpg", "cls") and the keys of .json.

    Args:
        state: The file.
        columns: Those that are read, each the first of several (`jpg;png`) that a row has; None: all.
        index_folder: Where the places of the members are kept; None: they are found each time.

    Raises:
        DataError: It is no tar file, is damaged or cut off, or its first row lacks a column.
    """

    def __init__(self, state: FileState, columns: Sequence[Column] | None, *, index_folder: Path | None):
        self.label = str(state.path)
        self._state, self._wanted = state, columns
        self._index = tar_index(state, folder=index_folder)
        self.rows([0])

    def __len__(self) -> int:
        return len(self._index.keys)

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        self._state.check()
        try:
            # Opened for each batch: thousands of shards would need as many handles.
            with self._state.path.open("rb") as file:
                return [self._row(file.fileno(), number) for number in numbers]
        except OSError as error:
            raise DataError(f"{self.label} cannot be read ({error.strerror}); check the disk") from None

    def name_of(self, number: int) -> str:
        return f"{self.label} '{self._index.key(number)}'"

    def _row(self, handle: int, number: int) -> Cells:
        members, where = self._index.members(number), self.name_of(number)

        def content(ending: str) -> Any:
            offset, size = members[ending]
            return _decoded(ending, os.pread(handle, size, offset), where=where)

        if self._wanted is None:
            found = {KEY: self._index.key(number)}
            for ending in members:
                value = content(ending)
                found |= value if ending == "json" and isinstance(value, dict) else {ending: value}
            return found
        found = {}
        described: Cells | None = None
        for key, name in self._wanted:
            if name == KEY:
                found[name] = self._index.key(number)
                continue
            # As in WebDataset, of a name such as "jpg;png" the first that a row has.
            names = name.split(";")
            ending = next((one for each in names for one in (each, each.lower()) if one in members), None)
            if ending is not None:
                found[name] = content(ending)
            else:
                if described is None:
                    described = content("json") if "json" in members else {}
                keys = described if isinstance(described, dict) else {}
                in_json = next((one for one in names if one in keys), None)
                if in_json is None:
                    raise missing_cell(where, key, names[0], [*members, *keys])
                found[name] = keys[in_json]
        return found


def _decoded(ending: str, content: bytes, *, where: str) -> Any:
    if ending != "json" and ending not in _TEXTS:
        return content
    try:
        text = content.decode("utf-8")
        return json.loads(text) if ending == "json" else text.strip() if ending == "cls" else text
    except (ValueError, RecursionError) as error:
        raise BadRecordError(f"{where} has a .{ending} that cannot be read ({error}); fix or remove it") from None
