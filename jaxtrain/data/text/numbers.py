"""What counts as a number in a file: one rule for training, evaluation and prediction."""

import math
from decimal import Decimal
from typing import Any

import numpy as np

from jaxtrain.errors import DataError

# Rounding to float32 takes less than 1e-5 of the variance of targets whose deviation is this many of its steps.
_STEPS_PER_DEVIATION = 100

# Truth values as pandas writes them into CSV files; in Parquet and JSON they are 1 and 0 too.
TRUTH = {"true": 1.0, "false": 0.0}

# Beyond it float64 has no room for every whole number.
_EXACT = 2**53


def number_in(text: str) -> float | None:
    """Returns the number that a text writes, a whole one as int; None: it writes no finite number.

    A whole number that is written with a point or an exponent is an int as far as float64 is exact.
    """
    # Python reads 2024_01 as 202401; elsewhere it is a date or a code.
    if "_" in text:
        return None
    try:
        return exact_number(int(text))
    except ValueError:
        pass
    try:
        return exact_number(float(text))
    except ValueError:
        return None


def exact_number(value: Any) -> float | None:
    """Returns a number of JSON or Arrow (a truth value is 1 or 0), a whole one as int; None: it is no finite number."""
    if isinstance(value, Decimal) and value.is_finite():
        value = int(value) if value == int(value) else float(value)
    if isinstance(value, int):
        return int(value) if not math.isnan(float_of(value)) else None
    if not isinstance(value, float) or not math.isfinite(value):
        return None
    if value == 0 and math.copysign(1, value) < 0:
        return value  # an int has no sign there, which is part of a row's bytes
    return int(value) if value.is_integer() and abs(value) <= _EXACT else value


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


def check_steps(numbers: np.ndarray, label: str) -> None:
    """Checks numbers to predict, [N, K], that are trained in float32.

    Raises:
        DataError: One is beyond float32, or rounding to it loses what tells the rows apart.
    """
    numbers = numbers.astype(np.float64)
    with np.errstate(over="ignore"):
        rounded = numbers.astype(np.float32)
    if not np.all(np.isfinite(rounded)):
        raise DataError(
            f"{label} has target {numbers[~np.isfinite(rounded)][0]:.6g}, beyond what float32 holds (3.4e38); give the "
            "targets in other units"
        )
    for column, values in enumerate(numbers.T):
        largest, deviation = np.abs(values).max(initial=0), values.std() if np.ptp(values) else 0.0
        step = np.spacing(np.float32(largest))
        if deviation and step * _STEPS_PER_DEVIATION > deviation and np.any(rounded[:, column] != values):
            of = f" in column {column + 1}" if numbers.shape[1] > 1 else ""
            raise DataError(
                f"{label} has targets up to {largest:.15g}{of} with a deviation of {deviation:.3g}, and float32, in "
                f"which they are trained, has steps of {step:.3g} there; subtract a constant from them, such as "
                f"{values.min():.15g}, or give them in other units"
            )
