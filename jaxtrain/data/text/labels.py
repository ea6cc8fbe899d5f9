"""Classes and numbers of labelled rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.text.numbers import float_of
from jaxtrain.errors import DataError

_MAX_CLASSES = 100_000
_NO_CLASS, _MAYBE_NO_CLASS = "-100", "-1"
_NO_CLASS_AS_FLOAT = ("-100.0", "-1.0")


def class_name(value: Any, *, where: str, column: str) -> str:
    """Returns the name of a class that a file gives as text, a whole number or a truth value.

    Raises:
        DataError: It is missing, or something else.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str) and value.strip():
        return value.strip().removesuffix(".0") if value.strip() in _NO_CLASS_AS_FLOAT else value.strip()
    found = "has no value" if value in (None, "") or not str(value).strip() else f"is {value!r}, which is no class"
    raise DataError(f"{where} column '{column}' {found}; give a text or a whole number")


def unlabelled(found: Sequence[str], known: Sequence[str] | None) -> np.ndarray:
    """Returns which rows have no class, bool [N]: -100, and -1 unless it is a number beside others of which none is 0.

    Args:
        found: As `class_name` returns them.
        known: The classes that a model was trained on, or that the file names; None: those of the data.
    """
    others = set(found) - {_NO_CLASS, _MAYBE_NO_CLASS} if known is None else set(known)
    is_class = _MAYBE_NO_CLASS in others
    if known is None:
        is_class = bool(others) and "0" not in others and all(_is_whole(name) for name in others)
    return np.isin(np.array(found, object), [_NO_CLASS] if is_class else [_NO_CLASS, _MAYBE_NO_CLASS])


def check_labelled(
    found: Sequence[str], is_unlabelled: np.ndarray, name_of: Callable[[int], str], *, column: str
) -> None:
    """Raises a DataError for the first row without a class among those to train on; `name_of` says where a row is."""
    if is_unlabelled.any():
        first = int(np.flatnonzero(is_unlabelled)[0])
        raise DataError(
            f"{name_of(first)} column '{column}' is {found[first]}, by which other libraries mark a row without a "
            "class; remove the row, or name its class otherwise"
        )


def _is_whole(name: str) -> bool:
    return name.removeprefix("-").isdecimal()


def number_of(value: Any, *, where: str, column: str) -> float:
    """Returns the number that a file gives: a number, a truth value (1 or 0), or the text of a number.

    Raises:
        DataError: It is none, or not finite.
    """
    found = float_of(value)
    if math.isnan(found):
        raise DataError(f"{where} column '{column}' is {value!r}, not a number; fix or remove the row")
    return found


def class_names(
    found: Sequence[str], *, label: str, known: Sequence[str] | None, named: Sequence[str] | None = None
) -> list[str]:
    """Returns the names of the classes in the order of their numbers.

    Args:
        found: The class of each row, or of each word.
        label: Name of the data in messages.
        known: The classes that a model was trained on; None: those of the data, sorted (whole numbers by their value).
        named: The classes that the file names, in their order, which stays where `known` is None.

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
    if named is not None:
        unknown = sorted(distinct - set(named))
        if unknown:
            raise DataError(
                f"{label} has class '{unknown[0]}', none of the {len(named)} that the file names; remove it"
            )
        return list(named)
    if len(distinct) > _MAX_CLASSES:
        raise DataError(f"{label} has {len(distinct):,} classes; set task=regression, or data.label to another column")
    are_numbers = all(map(_is_whole, distinct))
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
