"""Finds the files of a path in any known format, and opens them by row or for a pass from first to last."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.config.arguments import local_path
from jaxtrain.data.compression import is_packed, plain_suffix
from jaxtrain.data.files import FileState, file_state, files_below, find_files, require_file
from jaxtrain.data.formats.array_record import ArrayRecordReader, OpenFiles
from jaxtrain.data.formats.arrow import ArrowReader, class_names, saved_files
from jaxtrain.data.formats.lines import LineReader, TextReader, pass_over_lines
from jaxtrain.data.formats.parquet import GroupCache, ParquetReader
from jaxtrain.data.formats.reader import Cells, Column, JoinedReader, Reader, pass_over, sampled_sha256
from jaxtrain.data.formats.tar import TarReader
from jaxtrain.data.skipped import BadRecordError
from jaxtrain.errors import DataError

# Ending of a file's name -> format.
_FORMATS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".tar": "tar",
}
SUFFIXES = tuple(_FORMATS)
_PACKED_FORMATS = ("lines", "text")


@dataclass(frozen=True)
class DataFile:
    """A file of rows.

    Attributes:
        name: Relative to what the user named, so that it does not depend on the location of the data.
        state: The file as it was when it was found.
        format: A value of `_FORMATS`.
    """

    name: str
    state: FileState
    format: str

    @property
    def path(self) -> Path:
        """The file."""
        return self.state.path

    @property
    def identity(self) -> list[Any]:
        """JSON values that identify the file: its name, its size, and a hash of a sample of its content."""
        return [self.name, self.state.num_bytes, sampled_sha256(self.path, self.state.num_bytes)]


def find_rows(path: str, *, what: str, one_format: bool = True) -> tuple[DataFile, ...]:
    """Lists the files that a path names: a file, a glob, a folder of files of one format, or one of `save_to_disk`.

    Args:
        path: What the user wrote.
        what: Where it was written, for messages.
        one_format: Whether files of several formats are refused; .txt files beside others never count.

    Raises:
        DataError: There is no file, a file is empty or of no known format, or a folder holds several formats.
    """
    root = local_path(path, what=what, error=DataError).expanduser()
    if root.is_dir():
        saved = saved_files(root, what=what)
        if saved is not None:
            return tuple(_found(file.name, require_file(file, what=what), what=what) for file in saved)
        found = _folder(path, root, what=what)
        if not one_format:
            return found
        return _of_one_format(path, tuple(sorted(found, key=lambda file: file.name)), what=what)
    # The ending only chooses among the files of a folder.
    found = tuple(_found(name, file, what=what) for name, file in find_files(path, suffix=".jsonl", what=what))
    return found if not one_format else _of_one_format(path, found, what=what)


def _folder(path: str, root: Path, *, what: str) -> tuple[DataFile, ...]:
    found = {plain_suffix(file) for file in files_below(root)}
    # Chats may be in several formats: all files of one come before those of the next.
    there = [suffix for suffix in SUFFIXES if suffix in found]
    if not there:
        raise DataError(f"{what} {path} holds no file of rows ({' '.join(SUFFIXES)}); give a folder or glob with some")
    # Beside data, a text file is a licence or a note.
    there = [suffix for suffix in there if suffix != ".txt"] or there
    files = [named for suffix in there for named in find_files(path, suffix=suffix, what=what)]
    return tuple(_found(name, file, what=what) for name, file in files)


def _found(name: str, file: Path, *, what: str) -> DataFile:
    form = _FORMATS.get(plain_suffix(file))
    if form is None:
        others = " ".join(suffix for suffix in SUFFIXES if suffix not in (".jsonl", ".parquet"))
        raise DataError(f"{what} {file} is no .jsonl or .parquet file (nor {others}); convert it, or rename it")
    if is_packed(file) and form not in _PACKED_FORMATS:
        tool = "gunzip -k" if file.suffix == ".gz" else "zstd -d"
        raise DataError(f"{what} {file} is compressed and cannot be read by row; decompress it: {tool} {file.name}")
    return DataFile(name, file_state(file), form)


def _of_one_format(path: str, files: tuple[DataFile, ...], *, what: str) -> tuple[DataFile, ...]:
    formats = {file.format: file for file in reversed(files)}
    if len(formats) > 1:
        one, other = list(formats.values())[:2]
        raise DataError(
            f"{what} {path} holds files of two formats ({one.name}, {other.name}); give one of them, such as "
            f"'{path.rstrip('/')}/*{plain_suffix(one.path)}'"
        )
    return files


def open_rows(files: Sequence[DataFile], columns: Sequence[Column] | None, *, label: str) -> Reader:
    """Opens files for reading any row.

    Args:
        files: As `find_rows` lists them.
        columns: Those that are read; None: all.
        label: What the user called them.

    Raises:
        DataError: A file is damaged, lacks a column, or can be read in passes only.
    """
    cache, handles = GroupCache(), OpenFiles()
    readers = [_reader(file, columns, cache, handles) for file in files]
    for reader in readers:
        if isinstance(reader, ParquetReader):
            reader.tell_of_groups()
    joined = JoinedReader(readers, label=label)
    if not len(joined):
        raise DataError(f"{label} has no rows; give a file with at least one")
    return joined


def _reader(file: DataFile, columns: Sequence[Column] | None, cache: GroupCache, handles: OpenFiles) -> Reader:
    if is_packed(file.path) and file.format == "lines":
        raise DataError(
            f"{file.path} is compressed, so that no row can be found without reading all before it; write it as "
            "token files once (jaxtrain data prepare), or decompress it"
        )
    match file.format:
        case "lines":
            return LineReader(file.state, columns)
        case "text":
            return TextReader(file.state, columns)
        case "parquet":
            return ParquetReader(file.state, columns, cache)
        case "arrow":
            return ArrowReader(file.state, columns)
        case "array_record":
            return ArrayRecordReader(file.state, columns, handles)
        case _:
            return TarReader(file.state, columns, index_folder=index_folder())


def open_file(file: DataFile, columns: Sequence[Column] | None) -> Reader:
    """Opens one file for reading any row; see `open_rows`."""
    return _reader(file, columns, GroupCache(), OpenFiles())


def named_classes(file: DataFile, column: str) -> list[str] | None:
    """Returns the names of the classes that a Parquet or Arrow file gives for a column of numbers; None: none."""
    reader = open_file(file, None) if file.format in ("parquet", "arrow") else None
    return class_names(reader.schema, column) if isinstance(reader, ArrowReader | ParquetReader) else None


def pass_over_file(
    file: DataFile, columns: Sequence[Column] | None, *, bad: Callable[[BadRecordError], None] | None = None
) -> Iterator[tuple[str, Cells]]:
    """Reads the rows of a file from the first to the last; files of lines may be compressed.

    Args:
        file: Which one.
        columns: Those that are read; None: all.
        bad: Called for each row whose content is at fault, which is left out; None: it is an error.

    Yields:
        Where the row comes from, and its columns.

    Raises:
        BadRecordError: The content of a row is at fault.
        DataError: The file is damaged, lacks a column, or changed since it was found.
    """
    if file.format != "lines":
        yield from pass_over(open_file(file, columns), bad=bad)
        return
    yield from pass_over_lines(file.path, columns, bad=bad)
    file.state.check()


def index_folder() -> Path:
    """Returns the folder where the places of members of tar files are kept."""
    root = os.environ.get("JAXTRAIN_CACHE_DIR")
    if root:
        return Path(root).expanduser() / "indexes"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home).expanduser() / "jaxtrain" / "indexes"
