"""Tar shards by row, as WebDataset has them: a row is a group of members that share their name up to its first dot."""

import json
import os
import sys
import tarfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data.files import is_hidden, reading
from jaxtrain.data.formats.reader import Cells, Column, missing_column
from jaxtrain.data.skipped import BadRecordError
from jaxtrain.errors import DataError

# The column that holds the name of the group.
KEY = "__key__"
# Endings of members that are text; others are bytes, and .json is read.
_TEXTS = ("txt", "text", "cls", "caption", "label")
# How a tar file ends.
_END_BYTES = 1024


class TarReader:
    """Rows of an uncompressed tar file, whose columns are the endings of members ("jpg", "cls") and the keys of .json.

    Args:
        path: The file.
        columns: Those that are read, each the first of several (`jpg;png`) that a row has; None: all.

    Raises:
        DataError: It is no tar file, is damaged or cut off, or its first row lacks a column.
    """

    def __init__(self, path: Path, columns: Sequence[Column] | None):
        self.label = str(path)
        self._path, self._columns = path, columns
        # Of each row its name and first member, of each member its ending, and where its content lies.
        self._keys: list[str] = []
        self._firsts, self._offsets, self._sizes = array("q"), array("q"), array("q")
        self._endings: list[str] = []
        with reading(path):
            self._find_members()
        if not self._keys:
            raise DataError(f"{path} holds no file; give a tar file with members such as 000.jpg and 000.cls")
        self._firsts.append(len(self._endings))
        self.rows([0])

    def _find_members(self) -> None:
        """Reads the headers of all members: tarfile takes a damaged one for the end of the file."""
        with tarfile.open(self._path, "r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue] it keeps all that it has seen
                if not member.isfile() or not stem or is_hidden(member.name.split("/")):
                    continue
                key = f"{folder}/{stem}" if folder else stem
                if not self._keys or key != self._keys[-1]:
                    self._keys.append(key)
                    self._firsts.append(len(self._endings))
                self._endings.append(sys.intern(ending.lower()))  # as WebDataset does: ImageNet's files end in .JPEG
                self._offsets.append(member.offset_data)
                self._sizes.append(member.size)
            end = archive.offset
        with self._path.open("rb") as file:
            file.seek(end - _END_BYTES)
            if len(rest := file.read(2 * _END_BYTES)) < _END_BYTES or rest.strip(b"\0"):
                raise tarfile.TarError(f"damaged or cut off at byte {end}")

    def __len__(self) -> int:
        return len(self._keys)

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        # Opened for each batch: thousands of shards would need as many handles.
        with reading(self._path), self._path.open("rb") as file:
            return [self._row(file.fileno(), number) for number in numbers]

    def name_of(self, number: int) -> str:
        return f"{self.label} '{self._keys[number]}'"

    def _row(self, handle: int, number: int) -> Cells:
        members = {self._endings[i]: i for i in range(self._firsts[number], self._firsts[number + 1])}
        where = self.name_of(number)

        def content(ending: str) -> Any:
            i = members[ending]
            return _decoded(ending, os.pread(handle, self._sizes[i], self._offsets[i]), where=where)

        if self._columns is None:
            found = {KEY: self._keys[number]}
            for ending in members:
                value = content(ending)
                found |= value if ending == "json" and isinstance(value, dict) else {ending: value}
            return found
        found = {}
        described: Any = None
        for key, name in self._columns:
            # As in WebDataset, of a name such as "jpg;png" the first that a row has.
            names = name.split(";")
            ending = next((one for each in names for one in (each, each.lower()) if one in members), None)
            if name == KEY or ending is not None:
                found[name] = self._keys[number] if ending is None else content(ending)
                continue
            if described is None:
                described = content("json") if "json" in members else {}
            in_json = next((one for one in names if one in described), None)
            if in_json is None:
                raise BadRecordError(str(missing_column(where, key, names[0], [*members, *described])))
            found[name] = described[in_json]
        return found


def _decoded(ending: str, content: bytes, *, where: str) -> Any:
    if ending != "json" and ending not in _TEXTS:
        return content
    try:
        text = content.decode("utf-8")
        return json.loads(text) if ending == "json" else text.strip() if ending == "cls" else text
    except ValueError as error:
        raise BadRecordError(f"{where} has a .{ending} that cannot be read ({error}); fix or remove it") from None
