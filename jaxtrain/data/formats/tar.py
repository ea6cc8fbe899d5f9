"""Tar shards by row, as WebDataset has them: a row is a group of members that share their name up to its first dot."""

import os
import sys
import tarfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data.files import is_hidden, reading
from jaxtrain.data.formats.reader import Cells, Column, missing_column, parse_json
from jaxtrain.errors import DataError

# The column that holds the name of the group.
_KEY = "__key__"
# Endings of members that are text; others are bytes, and .json is read.
_TEXTS = ("txt", "text", "cls", "caption", "label")


class TarReader:
    """Rows of an uncompressed tar file, whose columns are the endings of members ("jpg", "cls") and the keys of .json.

    A wanted column may be several (`jpg;png`), of which the first that a row has is read, as in WebDataset.
    """

    def __init__(self, path: Path, columns: Sequence[Column] | None):
        self._path, self._columns = path, columns
        # Of each row its name and first member, of each member its ending, and where its content lies.
        self._keys: list[str] = []
        self._endings: list[str] = []
        self._firsts, self._offsets, self._sizes = array("q"), array("q"), array("q")
        with reading(path):
            self._find_members()
        self.rows([0])

    def _find_members(self) -> None:
        with tarfile.open(self._path, "r:") as archive:
            for member in archive:
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue] it keeps all that it has seen
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                if not member.isfile() or is_hidden(member.name.split("/")):
                    continue
                key = f"{folder}/{stem}" if folder else stem
                if not self._keys or key != self._keys[-1]:
                    self._keys.append(key)
                    self._firsts.append(len(self._endings))
                ending = sys.intern(ending.lower())  # as WebDataset does: ImageNet's files end in .JPEG
                if ending in self._endings[self._firsts[-1] :]:
                    raise DataError(
                        f"{self._path} holds two rows with the key '{key}', side by side ('{member.name}' is there "
                        "twice); rename the members of one"
                    )
                self._endings.append(ending)
                self._offsets.append(member.offset_data)
                self._sizes.append(member.size)
            end = archive.offset
        self._firsts.append(len(self._endings))
        with self._path.open("rb") as file:
            file.seek(end)
            # tarfile takes a damaged header, too, for the end of the file, which is two blocks of zeros.
            if not self._keys or file.read(1024) != bytes(1024):
                raise tarfile.TarError(f"empty, damaged or cut off at byte {end}")

    def __len__(self) -> int:
        return len(self._keys)

    def rows(self, numbers: Sequence[int]) -> list[Cells]:
        # Opened for each batch: thousands of shards would need as many handles.
        with reading(self._path), self._path.open("rb") as file:
            return [self._row(file.fileno(), number) for number in numbers]

    def name_of(self, number: int) -> str:
        return f"{self._path} '{self._keys[number]}'"

    def _row(self, handle: int, number: int) -> Cells:
        where = self.name_of(number)
        members = {self._endings[i]: i for i in range(self._firsts[number], self._firsts[number + 1])}

        def content(ending: str) -> Any:
            i = members[ending]
            return _decoded(ending, os.pread(handle, self._sizes[i], self._offsets[i]), where=where)

        described: Any = None
        found: Cells = {_KEY: self._keys[number]}
        for key, name in [(None, ending) for ending in members] if self._columns is None else self._columns:
            names = [one for each in name.split(";") for one in (each, each.lower())]
            ending = next((one for one in names if one in members), None)
            if ending is not None:
                found[name] = content(ending)
            elif name != _KEY:
                described = described or (content("json") if "json" in members else {})
                in_json = next((one for one in names if one in described), None)
                if in_json is None:
                    raise missing_column(where, key, names[0], [*members, *described])
                found[name] = described[in_json]
        if self._columns is None and isinstance(found.get("json"), dict):
            found |= found.pop("json")
        return found


def _decoded(ending: str, content: bytes, *, where: str) -> Any:
    if ending != "json" and ending not in _TEXTS:
        return content
    with reading(f"{where} .{ending}"):
        text = content.decode("utf-8")
        return parse_json(text) if ending == "json" else text.strip() if ending == "cls" else text
