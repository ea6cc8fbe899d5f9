"""What the column to predict of a table holds: whole numbers kept exact, fractions, or texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.skipped import BadRecordError
from jaxtrain.data.sources.table_columns import TableRows
from jaxtrain.data.text.records import exact_number, number_in
from jaxtrain.errors import DataError

_MAX_CLASSES = 1000

# A column of integers holds classes where it has few distinct values with several rows each, and quantities where most
# rows have a value of their own; in between (ages, years, labels of 100 classes) only the user knows.
_CERTAIN_CLASSES = 20
_ROWS_PER_CLASS = 2


def target_of(value: Any, *, where: str, column: str, as_numbers: bool) -> float | str:
    """Returns a target as a file gives it: a text without spaces around it, or a number, whole ones as int.

    Args:
        value: Text, or what JSON and Arrow have.
        where: File and line, for messages.
        column: Name of the column.
        as_numbers: Whether only numbers will do, so that texts are read as such.

    Raises:
        BadRecordError: There is no value, or it is no finite number.
    """
    if isinstance(value, str) and value.strip():
        if not as_numbers:
            return value.strip()
        number = number_in(value)
        if number is None:
            raise BadRecordError(
                f"{where} column '{column}' is {repr(value.strip())[:40]}, not a number; fix or remove the row, or set "
                "task=classification and data.task=classification"
            )
        return number
    number = exact_number(value)
    if number is None:
        found = "has no value" if value is None else f"is {repr(value)[:40]}, not a finite number"
        raise BadRecordError(f"{where} column '{column}' {found}; fill it, or remove the row or the column")
    return number


def target_array(values: Sequence[float | str]) -> np.ndarray:
    """Returns targets as an array [N].

    Numbers are int64 (beyond it Python's int) where all are whole, so that no two become one, and float64 otherwise.
    Beside a text, a number is the class of its text.
    """
    if any(isinstance(value, str) for value in values):
        return np.array([str(value) for value in values])
    if not all(isinstance(value, int) for value in values):
        return np.array(values, np.float64)
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array(values, object)


def check_not_mixed(found: TableRows) -> None:
    """Checks targets of which nothing says whether they are classes.

    Raises:
        DataError: Most are numbers that would be quantities but for a few texts, such as NA.
    """
    first, numbers = found.first_text, found.target_numbers
    if first is None or 2 * len(numbers) <= len(found.targets):
        return
    array = target_array(numbers)
    if _are_whole(array) and len(np.unique(array)) * _ROWS_PER_CLASS <= len(array):
        return
    raise DataError(
        f"{first.where} is {first.value!r}, and {len(numbers):,} of {len(found.targets):,} targets are numbers, such "
        f"as {numbers[0]}; fix or remove the row, or set task=regression and data.task=regression (a text is a bad "
        "record then, which data.on_bad_record=skip leaves out), or task=classification and data.task=classification"
    )


def are_class_numbers(values: np.ndarray, label: str) -> bool:
    """Returns whether numeric targets [N] are classes.

    Raises:
        DataError: They could be classes or quantities.
    """
    if not _are_whole(values):
        return False
    distinct = len(np.unique(values))
    if distinct * _ROWS_PER_CLASS > len(values) or distinct > _MAX_CLASSES:
        return False
    if distinct <= _CERTAIN_CLASSES:
        return True
    raise DataError(
        f"{label} has {distinct} distinct integers as targets of {len(values)} rows, which could be quantities or "
        "classes; set task=regression and data.task=regression, or task=classification and data.task=classification"
    )


def _are_whole(values: np.ndarray) -> bool:
    return values.dtype.kind in "iuO" or bool(np.all(values == np.round(values)))


def numbered_classes(values: np.ndarray, label: str, *, known: Sequence[str] | None) -> tuple[np.ndarray, list[str]]:
    """Returns the number of each class, int32 [N], and the names of the classes.

    Args:
        values: Texts or numbers.
        label: Name of the table in messages.
        known: Names of the classes in the order of their numbers; None: the classes of the table, sorted.

    Raises:
        DataError: There are several columns or too many classes, or one is not known.
    """
    if values.ndim != 1:
        raise DataError(f"{label} has targets of shape {values.shape}; classes need one column")
    distinct, classes = np.unique(values, return_inverse=True)
    if len(distinct) > _MAX_CLASSES:
        raise DataError(
            f"{label} has {len(distinct)} distinct targets, more than {_MAX_CLASSES} classes; set "
            + ("data.target to another column" if values.dtype.kind == "U" else "task=regression, data.task=regression")
        )
    names = [
        str(int(value)) if distinct.dtype.kind == "f" and value == int(value) else str(value) for value in distinct
    ]
    if known is not None:
        unknown = [name for name in names if name not in known]
        if unknown:
            shown = ", ".join(known[:5]) + (", ..." if len(known) > 5 else "")
            raise DataError(
                f"{label} has class '{unknown[0]}', which the run was not trained on (its classes: {shown}); "
                "remove these rows or rename the class"
            )
        return np.array([known.index(name) for name in names], np.int32)[classes], list(known)
    return classes.astype(np.int32), names


def as_known_classes(written: Sequence[str], known: Sequence[str], *, are_numbers: bool) -> list[str]:
    """Returns targets of a CSV file by the names of the classes that a model was trained on.

    Whether the codes of a file are texts (01, 2A) or numbers (01 is 1) depends on the others in it, and another file
    may have fewer of them: the class that is written so comes first, and then the one of the same number.

    Args:
        written: The targets as the file has them.
        known: Names of the classes.
        are_numbers: Whether all targets are numbers: beside texts (001, 2A), on both sides, a code is no other number.

    Returns:
        The name of each target's class; what is written, where it is none of them.
    """
    if not are_numbers and any(number_in(name) is None for name in known):
        return list(written)
    names = {text: text for text in known}
    for text in set(written) - names.keys():
        number = number_in(text)
        whole = str(int(number)) if number is not None and number == int(number) else str(number)
        names[text] = whole if whole in known else text
    return [names[text] for text in written]


def are_wanted_as_numbers(chosen: str | None, *, task: str | None, reading: Mapping[str, Any] | None) -> bool:
    """Returns whether targets are numbers whatever they look like.

    Args:
        chosen: `data.task`.
        task: The task of the run.
        reading: Of the table that a model was trained on; None: there is none.
    """
    if reading is not None:
        return reading["classes"] is None
    return (chosen or task) == "regression"
