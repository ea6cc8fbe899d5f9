"""Finds the files of a path in any known format, opens them, and reads the texts, numbers and classes in them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.arguments import local_path
from jaxtrain.data.files import few, find_files, is_packed, plain_suffix, require_file
from jaxtrain.data.formats.arrow import ArrowReader, ParquetReader, class_names_of, saved_files, with_names
from jaxtrain.data.formats.lines import array_records, csv_rows, json_rows, whole_text
from jaxtrain.data.formats.reader import Cells, Column, JoinedReader, Reader, pass_over
from jaxtrain.data.formats.tar import TarReader
from jaxtrain.errors import DataError

# Ending -> name of the format.
SUFFIXES = {
    **{".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".parquet": "parquet", ".arrow": "arrow"},
    **{".array_record": "array_record", ".arrayrecord": "array_record", ".tar": "tar"},
    **{".csv": "csv", ".tsv": "csv", ".txt": "text"},
}
# Formats whose rows are found by their numbers, and those that are read from the first row to the last.
_READERS: dict[str, Callable[[Path, Sequence[Column] | None], Reader]] = {
    "parquet": ParquetReader,
    "arrow": ArrowReader,
    "tar": TarReader,
}
_PASSES: dict[str, Callable[[Path, Sequence[Column] | None], Iterator[tuple[str, Cells]]]] = {
    "lines": json_rows,
    "array_record": array_records,
    "csv": csv_rows,
    "text": whole_text,
}
# Beside files of other endings in a folder, these are a licence, a description or a list.
_NOTES = (".json", ".csv", ".tsv", ".txt")
_MAY_BE_PACKED = ("lines", "csv", "text")

# Truth values as pandas writes them into CSV files; in Parquet and JSON they are 1 and 0 too.
_TRUTH = {"true": 1.0, "false": 0.0}
# Beyond it float64 has no room for every whole number.
_EXACT = 2**53


@dataclass(frozen=True)
class DataFile:
    """A file of rows: its name does not depend on the location of the data, its format is a value of `SUFFIXES`."""

    name: str
    path: Path
    format: str


def find_rows(path: str, *, what: str, form: str | None = None, one_format: bool = True) -> tuple[DataFile, ...]:
    """Lists the files that a path names: a file, a glob, a folder of files of one format, or one of `save_to_disk`.

    `what` is where the path was written. With `form` all files are of this format; with `one_format`, files of several
    formats are an error.
    """
    root = local_path(path, what=what, error=DataError).expanduser()
    saved = saved_files(root, what=what) if form is None and root.is_dir() else None
    if saved is None:
        suffixes = [suffix for suffix, name in SUFFIXES.items() if form in (None, name)]
        named = find_files(path, suffixes=suffixes, notes=_NOTES, what=what)
    else:
        named = [(file.name, require_file(file, what=what)) for file in saved]
    files = []
    for name, file in named:
        file_form = form or SUFFIXES.get(plain_suffix(file))
        if file_form is None or (is_packed(file) and file_form not in _MAY_BE_PACKED):
            raise DataError(f"{what} {file} has no known format ({' '.join(SUFFIXES)}); convert or decompress it")
        if form == "text" and plain_suffix(file) in (".jsonl", ".ndjson"):
            raise DataError(f"{what} {file} holds JSON lines, not plain text; set data.kind=jsonl")
        files.append(DataFile(name, file, file_form))
    if one_format and (other := next((file for file in files if file.format != files[0].format), None)):
        raise DataError(
            f"{what} {path} holds files of two formats ({files[0].name}, {other.name}); give a glob of one of them"
        )
    return tuple(files)


def open_rows(files: Sequence[DataFile], columns: Sequence[Column] | None) -> Reader:
    """Opens files for reading any row of the columns (None: all)."""
    other = next((file for file in files if file.format not in _READERS), None)
    if other is not None:
        raise DataError(f"{other.path} has no random access to rows; give files of {', '.join(_READERS)}")
    return JoinedReader([_READERS[file.format](file.path, columns) for file in files])


def pass_over_file(file: DataFile, columns: Sequence[Column] | None) -> Iterator[tuple[str, Cells]]:
    """Yields where each row of a file comes from, and its columns (None: all); files of lines may be compressed."""
    if file.format in _PASSES:
        return _PASSES[file.format](file.path, columns)
    return pass_over(_READERS[file.format](file.path, columns))


def pass_over_files(files: Sequence[DataFile], columns: Sequence[Column] | None) -> Iterator[tuple[str, Cells]]:
    """Yields where each row of files comes from, and its columns; a DataError where there is no row.

    Some of the files may be empty, as writers in parallel leave them.
    """
    is_empty = True
    for file in files:
        for found in pass_over_file(file, columns):
            is_empty = False
            yield found
    if is_empty:
        raise DataError(f"{files[0].path} has no rows; give a file with at least one")


def named_classes(file: DataFile, column: str) -> list[str] | None:
    """Returns the names of the classes that a Parquet or Arrow file gives for a column of numbers; None: none."""
    readers = {"parquet": ParquetReader, "arrow": ArrowReader}
    if file.format not in readers:
        return None
    names = class_names_of(readers[file.format](file.path, None).schema, column)
    return names and [plain_name(name) for name in names]


@dataclass(frozen=True)
class Record:
    """The values of one row of a file, for the columns that were asked for; `where` is file and line."""

    where: str
    values: tuple[Any, ...]


def read_records(path: str, columns: Sequence[Column], *, what: str, named: str | None = None) -> list[Record]:
    """Reads columns (key of the config or None, name) of a file or folder, which `what` names in messages.

    The numbers of a column `named` become the names of classes that a Parquet or Arrow file gives them.
    """
    files = find_rows(path, what=what)
    names = named_classes(files[0], named) if named else None
    records = []
    for where, found in pass_over_files(files, columns):
        values = (with_names(found[name], names) if name == named else found[name] for _, name in columns)
        records.append(Record(where, tuple(values)))
    return records


def wrong_value(value: Any, wanted: str, *, where: str, column: str) -> DataError:
    """Returns the error for a value that is not what a column should hold."""
    return DataError(f"{where} column '{column}' is {repr(value)[:40]}, not {wanted}; fix or remove the row")


def text_of(value: Any, *, where: str, column: str) -> str:
    """Returns a value that is text; a DataError where it is missing, or something else."""
    if not isinstance(value, str):
        raise wrong_value(value, "text", where=where, column=column)
    return value


def list_of(value: Any, *, where: str, column: str) -> list[Any]:
    """Returns a list of texts or numbers, or the words of a text; a DataError where it is something else."""
    if isinstance(value, str):
        return value.split()
    if not isinstance(value, list) or not all(isinstance(one, str | int) for one in value):
        raise wrong_value(value, "a list of texts, or text with spaces between them", where=where, column=column)
    return value


def number_of(value: Any, *, where: str, column: str) -> float:
    """Returns a number of JSON or Arrow, or that of a text, as float64; a DataError where it is none, or not finite."""
    found = _float_of(value)
    if math.isnan(found):
        raise wrong_value(value, "a number", where=where, column=column)
    return found


def class_name(value: Any, *, where: str, column: str) -> str:
    """Returns the name of a class that is text, a whole number or a truth value; a DataError for others."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    name = plain_name(str(number))
    # Rows without a class are marked by -1 and -100 in published data.
    if not isinstance(number, str | int) or name in ("", "-1", "-100"):
        raise wrong_value(value, "a class (a text or a whole number from 0)", where=where, column=column)
    return name


def plain_name(text: str) -> str:
    """Returns the name of a class as it is written elsewhere: 1 for 1.0, true for True, no spaces around it."""
    name = text.strip()
    if name.lower() in _TRUTH:
        return name.lower()
    whole, _, zeros = name.partition(".")
    is_whole = zeros.strip("0") == "" and whole.removeprefix("-").isdecimal()
    return whole if is_whole else name


def number_in(text: str) -> float | None:
    """Returns the number that a text writes, a whole one as int; None: it writes no finite number.

    A whole number that is written with a point or an exponent is an int as far as float64 is exact.
    """
    # Python reads 2024_01 as 202401; elsewhere it is a date or a code.
    for read in (int, float) if "_" not in text else ():
        try:
            return exact_number(read(text))
        except ValueError:
            pass
    return None


def exact_number(value: Any) -> float | None:
    """Returns a number of JSON or Arrow (a truth value is 1 or 0), a whole one as int; None: it is no finite number."""
    if isinstance(value, Decimal) and value.is_finite():
        value = int(value) if value == int(value) else float(value)
    if isinstance(value, int):
        return int(value) if not math.isnan(_float_of(value)) else None
    if not isinstance(value, float) or not math.isfinite(value):
        return None
    # An int has no sign at 0, which is part of a row's bytes.
    is_negative_zero = value == 0 and math.copysign(1, value) < 0
    return int(value) if value.is_integer() and abs(value) <= _EXACT and not is_negative_zero else value


def _float_of(value: Any) -> float:
    """Returns a number of JSON or Arrow, or that of a text, as float64; NaN: it is no finite number."""
    try:
        if isinstance(value, str):
            truth = _TRUTH.get(value.strip().lower())
            found = truth if truth is not None else math.nan if "_" in value else float(value)
        else:
            found = float(value) if isinstance(value, int | float | Decimal) else math.nan
    except (ValueError, OverflowError):
        return math.nan
    return found if math.isfinite(found) else math.nan


def class_names(
    found: Sequence[str], *, label: str, known: Sequence[str] | None, named: Sequence[str] | None = None
) -> list[str]:
    """Returns the names of the classes in the order of their numbers.

    Those that a model was trained on (`known`), else those that the file names (`named`), else those found, sorted
    (whole numbers by their value).
    """
    distinct, given = set(found), named if known is None else known
    if known is None:
        check_classes(sorted(distinct), label=label)
    if given is not None:
        unknown = sorted(distinct - set(given))
        if unknown:
            which = "which the run was not trained on" if known is not None else "none of those that the file names"
            raise DataError(f"{label} has class '{unknown[0]}', {which} (its classes: {few(given)}); remove these rows")
        return list(given)
    are_numbers = all(name.removeprefix("-").isdecimal() for name in distinct)
    return sorted(distinct, key=lambda name: (int(name), name) if are_numbers else (0, name))


def check_classes(names: Sequence[str], *, label: str) -> None:
    """Raises a DataError where all rows to train on are of one class, or the same classes have two names each."""
    if len(names) == 1:
        raise DataError(f"{label} has rows of one class ('{names[0]}'); name another column, or add rows of others")
    if {"1", "true"} <= {*names}:
        raise DataError(f"{label} has truth values and numbers as classes (true and 1); write all in one way")


def numbered(found: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Returns the number of each class: int32."""
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[name] for name in found], np.int32)


def saved_classes(reading: Mapping[str, Any] | None, kind: str) -> list[str] | None:
    """Returns the classes of a saved `Data.reading` of a kind of data; None: there are none."""
    return reading.get("classes") if reading is not None and reading.get("kind") == kind else None
