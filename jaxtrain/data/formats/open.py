"""Finds the files of a path in any known format, and opens them by row or for a pass from first to last."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.config.arguments import local_path
from jaxtrain.data.files import files_below, find_files, is_packed, plain_suffix, require_file, sampled_sha256
from jaxtrain.data.formats.array_record import ArrayRecordReader, OpenFiles
from jaxtrain.data.formats.arrow import ArrowReader, GroupCache, ParquetReader, class_names, saved_files
from jaxtrain.data.formats.csv import CsvReader
from jaxtrain.data.formats.lines import LineReader, TextReader, pass_over_lines
from jaxtrain.data.formats.reader import Cells, Column, JoinedReader, Reader, pass_over
from jaxtrain.data.formats.tar import TarReader
from jaxtrain.data.skipped import NAMED, BadRecordError, SkippedRecords, without_advice
from jaxtrain.errors import DataError


class Shared:
    """What the readers of a source's files have in common."""

    def __init__(self) -> None:
        self.groups, self.handles = GroupCache(), OpenFiles()


# Format -> its endings, and what opens a file of it. The files of a folder are read in this order of formats.
_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[Path, Sequence[Column] | None, Shared], Reader]]] = {
    "lines": ((".jsonl", ".ndjson"), lambda path, columns, _: LineReader(path, columns)),
    "parquet": ((".parquet",), lambda path, columns, shared: ParquetReader(path, columns, shared.groups)),
    "arrow": ((".arrow",), lambda path, columns, _: ArrowReader(path, columns)),
    "array_record": (
        (".array_record", ".arrayrecord"),
        lambda path, columns, shared: ArrayRecordReader(path, columns, shared.handles),
    ),
    "tar": ((".tar",), lambda path, columns, _: TarReader(path, columns)),
    "csv": ((".csv", ".tsv"), lambda path, columns, _: CsvReader(path, columns)),
    "text": ((".txt",), lambda path, columns, _: TextReader(path, columns)),
}
SUFFIXES = {suffix: name for name, (suffixes, _) in _FORMATS.items() for suffix in suffixes}
# Beside files of other formats in a folder, these are a licence, a note or a list.
_NOTES = ("csv", "text")
_MAY_BE_PACKED = ("lines", "csv", "text")


@dataclass(frozen=True)
class DataFile:
    """A file of rows.

    Attributes:
        name: Relative to what the user named, so that it does not depend on the location of the data.
        path: The file.
        format: A key of `_FORMATS`.
    """

    name: str
    path: Path
    format: str

    @property
    def identity(self) -> list[Any]:
        """JSON values that identify the file: its name, its size, and a hash of a sample of its content."""
        return [self.name, self.path.stat().st_size, sampled_sha256(self.path)]


def find_rows(path: str, *, what: str, one_format: bool = True) -> tuple[DataFile, ...]:
    """Lists the files that a path names: a file, a glob, a folder of files of one format, or one of `save_to_disk`.

    Args:
        path: What the user wrote.
        what: Where it was written, for messages.
        one_format: Whether files of several formats are refused.

    Raises:
        DataError: There is no file, a file is empty or of no known format, or a folder holds several formats.
    """
    root = local_path(path, what=what, error=DataError).expanduser()
    saved = saved_files(root, what=what) if root.is_dir() else None
    suffixes = [".jsonl"]  # which only chooses among the files of a folder
    if root.is_dir() and saved is None:
        below = {plain_suffix(file) for file in files_below(root)}
        there = [suffix for suffix in SUFFIXES if suffix in below]
        suffixes = [suffix for suffix in there if SUFFIXES[suffix] not in _NOTES] or there
        if not there:
            raise DataError(f"{what} {path} holds no file of rows ({' '.join(SUFFIXES)}); give a folder with some")
    named = (
        [one for suffix in suffixes for one in find_files(path, suffix=suffix, what=what)]
        if saved is None
        else [(file.name, require_file(file, what=what)) for file in saved]
    )
    files = []
    for name, file in named:
        form = SUFFIXES.get(plain_suffix(file))
        if form is None or (is_packed(file) and form not in _MAY_BE_PACKED):
            raise DataError(f"{what} {file} is of no known format ({' '.join(SUFFIXES)}); convert or decompress it")
        files.append(DataFile(name, file, form))
    if one_format and (other := next((file for file in files if file.format != files[0].format), None)):
        raise DataError(
            f"{what} {path} holds files of two formats ({files[0].name}, {other.name}); give a glob of one of them"
        )
    return tuple(files)


def open_rows(files: Sequence[DataFile], columns: Sequence[Column] | None, *, label: str) -> Reader:
    """Opens files for reading any row.

    Args:
        files: As `find_rows` lists them.
        columns: Those that are read; None: all.
        label: What the user called them.

    Raises:
        DataError: A file is damaged, lacks a column, or can be read in passes only.
    """
    shared = Shared()
    joined = JoinedReader([open_file(file, columns, shared) for file in files], label=label)
    if not len(joined):
        raise DataError(f"{label} has no rows; give a file with at least one")
    return joined


def open_file(file: DataFile, columns: Sequence[Column] | None, shared: Shared | None = None) -> Reader:
    """Opens one file for reading any row; see `open_rows`."""
    if is_packed(file.path) and file.format == "lines":
        raise DataError(
            f"{file.path} is compressed, so that no row can be found without reading all before it; write it as "
            "token files once (jaxtrain data prepare), or decompress it"
        )
    return _FORMATS[file.format][1](file.path, columns, shared or Shared())


def named_classes(file: DataFile, column: str) -> list[str] | None:
    """Returns the names of the classes that a Parquet or Arrow file gives for a column of numbers; None: none."""
    reader = open_file(file, None) if file.format in ("parquet", "arrow") else None
    return class_names(reader.schema, column) if isinstance(reader, ArrowReader | ParquetReader) else None


def pass_over_file(
    file: DataFile, columns: Sequence[Column] | None, *, bad: Callable[[BadRecordError], None] | None = None
) -> Iterator[tuple[str, Cells]]:
    """Yields where each row of a file comes from, and its columns; files of lines may be compressed.

    Args:
        file: Which one.
        columns: Those that are read; None: all.
        bad: Called for each row whose content is at fault, which is left out; None: it is an error.

    Raises:
        BadRecordError: The content of a row is at fault.
        DataError: The file is damaged, or lacks a column.
    """
    if file.format == "lines":
        yield from pass_over_lines(file.path, columns, bad=bad)
    else:
        yield from pass_over(open_file(file, columns), bad)


def good_rows(
    files: Sequence[DataFile],
    columns: Sequence[Column],
    read: Callable[[Cells, str], Any],
    *,
    skipped: SkippedRecords | None,
) -> Iterator[Any]:
    """Yields what `read(row, where)` makes of each row; where `skipped` is given, bad rows are left out and counted.

    Raises:
        DataError: A file is damaged, a row is bad and may not be skipped, or too many are.
    """
    num_rows = num_bad = 0
    named: list[str] = []

    def leave_out(error: BadRecordError) -> None:
        nonlocal num_bad
        if skipped is None:
            raise error
        num_bad += 1
        named.extend([without_advice(error)] if num_bad <= NAMED else [])

    for file in files:
        for where, row in pass_over_file(file, columns, bad=leave_out):
            try:
                found = read(row, where)
            except BadRecordError as error:
                leave_out(error)
            else:
                num_rows += 1
                yield found
    if skipped is not None:
        skipped.set(named, num_bad, of=num_rows + num_bad)
