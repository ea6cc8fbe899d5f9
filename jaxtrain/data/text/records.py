"""Columns of a .csv file or of a file of any format of rows, and the texts, numbers and classes in them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from jaxtrain.data.formats.arrow import with_names
from jaxtrain.data.formats.open import DataFile, find_rows, named_classes, pass_over_file
from jaxtrain.data.formats.reader import Column
from jaxtrain.errors import DataError

# Truth values as pandas writes them into CSV files; in Parquet and JSON they are 1 and 0 too.
TRUTH = {"true": 1.0, "false": 0.0}

# Beyond it float64 has no room for every whole number.
_EXACT = 2**53
_MAX_CLASSES = 100_000


@dataclass(frozen=True)
class Record:
    """The values of one row of a file, for the columns that were asked for; `where` is file and line."""

    where: str
    values: tuple[Any, ...]


def read_records(path: str, columns: Sequence[Column], *, what: str, named: str | None = None) -> list[Record]:
    """Reads columns (key of the config or None, name) of a file or folder, which `what` names in messages.

    Files are .csv (with header) or of any format of rows. The numbers of a column `named` become the names of classes
    that a Parquet or Arrow file gives them.

    Raises:
        DataError: The file is missing, empty or of another format, or a row lacks a column.
    """
    records = list(_rows(find_rows(path, what=what), columns, named))
    if not records:
        raise DataError(f"{what} {path} has no rows; give a file with at least one")
    return records


def column_names(path: str, *, what: str) -> list[str]:
    """Returns the columns of the first row of a file as `read_records` takes it."""
    names = list(next(pass_over_file(find_rows(path, what=what)[0], None), ("", {}))[1])
    if not names:
        raise DataError(f"{what} {path} has no rows; give a file with at least one")
    return names


def declared_classes(path: str, column: str, *, what: str) -> list[str] | None:
    """Returns the names of the classes that the first of a path's files gives for a column; None: it gives none."""
    return named_classes(find_rows(path, what=what)[0], column)


def _rows(files: Sequence[DataFile], columns: Sequence[Column], named: str | None) -> Iterator[Record]:
    for file in files:
        names = named_classes(file, named) if named else None
        for where, found in pass_over_file(file, columns):
            if names and named:
                found[named] = with_names(found[named], names)
            yield Record(where, tuple(found[name] for _, name in columns))


def text_of(value: Any, *, where: str, column: str) -> str:
    """Returns a value that is text; a DataError where it is missing, or something else."""
    if isinstance(value, str):
        return value
    found = "has no value" if value is None else f"holds a value of type {type(value).__name__}, not text"
    raise DataError(f"{where} column '{column}' {found}; fix or remove the row")


def list_of(value: Any, *, where: str, column: str) -> list[Any]:
    """Returns a list of texts or numbers, or the words of a text; a DataError where it is something else."""
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list) and all(isinstance(one, str | int) for one in value):
        return value
    raise DataError(
        f"{where} column '{column}' holds {value!r:.40}; give a list of texts, or text with spaces between them"
    )


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
        return int(value) if not math.isnan(float_of(value)) else None
    if not isinstance(value, float) or not math.isfinite(value):
        return None
    # An int has no sign at 0, which is part of a row's bytes.
    is_negative_zero = value == 0 and math.copysign(1, value) < 0
    return int(value) if value.is_integer() and abs(value) <= _EXACT and not is_negative_zero else value


def float_of(value: Any) -> float:
    """Returns a number of JSON or Arrow, or that of a text, as float64; NaN: it is no finite number."""
    try:
        if isinstance(value, str):
            truth = TRUTH.get(value.strip().lower())
            found = truth if truth is not None else math.nan if "_" in value else float(value)
        else:
            found = float(value) if isinstance(value, int | float | Decimal) else math.nan
    except (ValueError, OverflowError):
        return math.nan
    return found if math.isfinite(found) else math.nan


def number_of(value: Any, *, where: str, column: str) -> float:
    """Returns a number, a truth value (1 or 0) or the number of a text; a DataError where it is none, or not finite."""
    found = float_of(value)
    if math.isnan(found):
        raise DataError(f"{where} column '{column}' is {value!r}, not a number; fix or remove the row")
    return found


def class_name(value: Any, *, where: str, column: str) -> str:
    """Returns the name of a class that is text, a whole number or a truth value; a DataError for others."""
    if str(value).strip() in ("-1", "-100"):
        raise DataError(f"{where} column '{column}' is {value}, which marks a row without a class; remove the row")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    if isinstance(value, str) and value.strip():
        return value.strip()
    found = "has no value" if value is None or value == "" else f"is {value!r}, which is no class"
    raise DataError(f"{where} column '{column}' {found}; give a text or a whole number")


def class_names(
    found: Sequence[str], *, label: str, known: Sequence[str] | None, named: Sequence[str] | None = None
) -> list[str]:
    """Returns the names of the classes in the order of their numbers.

    Those that a model was trained on (`known`), else those that the file names (`named`), else those found, sorted
    (whole numbers by their value).

    Raises:
        DataError: A class is not known, or there are too many.
    """
    distinct, given = set(found), named if known is None else known
    if given is not None:
        unknown = sorted(distinct - set(given))
        if unknown:
            which = "which the run was not trained on" if known is not None else "none of those that the file names"
            shown = ", ".join(given[:5]) + (", ..." if len(given) > 5 else "")
            raise DataError(f"{label} has class '{unknown[0]}', {which} (its classes: {shown}); remove these rows")
        return list(given)
    if len(distinct) > _MAX_CLASSES:
        raise DataError(f"{label} has {len(distinct):,} classes; set task=regression, or data.label to another column")
    are_numbers = all(name.removeprefix("-").isdecimal() for name in distinct)
    return sorted(distinct, key=lambda name: (int(name), name) if are_numbers else (0, name))


def numbered(found: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Returns the number of each class: int32."""
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[name] for name in found], np.int32)


def saved_classes(reading: Mapping[str, Any] | None, kind: str) -> list[str] | None:
    """Returns the classes of a saved `Data.reading` of a kind of data; None: there are none."""
    return reading.get("classes") if reading is not None and reading.get("kind") == kind else None
