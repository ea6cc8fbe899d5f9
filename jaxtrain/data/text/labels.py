"""Classes and numbers of labelled rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.text.numbers import float_of
from jaxtrain.errors import DataError

_MAX_CLASSES = 100_000
_NO_CLASS = ("-100", "-100.0")


def class_name(value: Any, *, where: str, column: str) -> str:
    """Returns the name of a class that a file gives as text, a whole number or a truth value.

    Raises:
        DataError: It is missing, something else, or the mark by which other libraries leave a row out.
    """
    if str(value).strip() in _NO_CLASS:
        raise DataError(
            f"{where} column '{column}' is {value!r}, by which other libraries mark what counts in no loss; remove the "
            "row, or name its class otherwise"
        )
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str) and value.strip():
        return value.strip()
    found = "has no value" if value in (None, "") or not str(value).strip() else f"is {value!r}, which is no class"
    raise DataError(f"{where} column '{column}' {found}; give a text or a whole number")


def number_of(value: Any, *, where: str, column: str) -> float:
    """Returns the number that a file gives: a number, a truth value (1 or 0), or the text of a number.

    Raises:
        DataError: It is none, or not finite.
    """
    found = float_of(value)
    if math.isnan(found):
        raise DataError(f"{where} column '{column}' is {value!r}, not a number; fix or remove the row")
    return found


def class_names(found: Sequence[str], *, label: str, known: Sequence[str] | None) -> list[str]:
    """Returns the names of the classes in the order of their numbers.

    Args:
        found: The class of each row, or of each word.
        label: Name of the data in messages.
        known: The classes that a model was trained on; None: those of the data, sorted (whole numbers by their value).

    Raises:
        DataError: A class is not known, or there are too many.
    """
    distinct = set(found)
    if known is not None:
        unknown = sorted(distinct - set(known))
        if unknown:
            shown = ", ".join(known[:5]) + (", ..." if len(known) > 5 else "")
            raise DataError(
                f"{label} has class '{unknown[0]}', which the run was not trained on (its classes: {shown}); remove "
                "these rows or rename the class"
            )
        return list(known)
    if len(distinct) > _MAX_CLASSES:
        raise DataError(f"{label} has {len(distinct):,} classes; set task=regression, or data.label to another column")
    are_numbers = all(name.removeprefix("-").isdecimal() for name in distinct)
    return sorted(distinct, key=lambda name: (int(name), name) if are_numbers else (0, name))


def saved_classes(reading: Mapping[str, Any] | None, kind: str) -> list[str] | None:
    """Returns the classes of a saved `Data.reading` of a kind of data; None: there are none."""
    if reading is None or reading.get("kind") != kind:
        return None
    return reading.get("classes")


def numbered(found: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Returns the number of each class: int32."""
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[name] for name in found], np.int32)
