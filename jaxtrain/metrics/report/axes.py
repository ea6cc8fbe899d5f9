"""The axis of a picture: its range, its ticks with their texts, and where a value is on it."""

import math
import re
from dataclasses import dataclass

import numpy as np

from jaxtrain.metrics.format import format_count

_LOG_RATIO = 50
_MOST_TICKS = 6
# Beyond these, differences of values are infinite or zero.
_LARGEST, _SMALLEST = 1e300, 1e-300
# A share of a value that means of equal values may differ by.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Scale:
    """An axis.

    Attributes:
        low, high: its range; low < high.
        is_log: whether it is logarithmic; then low > 0.
        ticks: (value, text).
    """

    low: float
    high: float
    is_log: bool
    ticks: tuple[tuple[float, str], ...]

    def share(self, values: np.ndarray) -> np.ndarray:
        """Where values are on the axis: 0 at its low end, 1 at its high end."""
        if self.is_log:
            with np.errstate(divide="ignore", invalid="ignore"):
                shares = np.log(np.maximum(values, self.low) / self.low) / math.log(self.high / self.low)
        else:
            shares = (np.clip(values, -_LARGEST, _LARGEST) - self.low) / (self.high - self.low)
        return np.clip(shares, -1.0, 2.0)


def make_scale(
    low: float, high: float, *, may_be_log: bool = False, from_zero: bool = False, is_whole: bool = False
) -> Scale:
    """Choose the range and the ticks of an axis that shows values from `low` to `high`.

    Args:
        low, high: of the values; may be equal.
        may_be_log: whether the axis is logarithmic where the values span a large range.
        from_zero: whether a linear axis begins at zero.
        is_whole: whether values are whole numbers (steps); the axis then ends at its last value.
    """
    low, high = max(-_LARGEST, min(low, _LARGEST)), max(-_LARGEST, min(high, _LARGEST))
    if may_be_log and low > 0 and high > _LOG_RATIO * low:
        return _log_scale(low, high)
    if from_zero:
        low = min(low, 0.0)
    if high - low < max(_SMALLEST, _ROUNDING * max(abs(low), abs(high))):
        room = 0.5 if is_whole else 0.1 * abs(high) or 1.0
        low, high = (0.0 if low == 0.0 else low - room), high + room
    spacing = _spacing(low, high, is_whole=is_whole)
    if not is_whole:
        # The values do not touch the edges.
        room = 0.04 * (high - low)
        low, high = (low if from_zero and low >= 0 else low - room), high + room
    first = math.ceil(low / spacing - 1e-9)
    values = [index * spacing for index in range(first, math.floor(high / spacing + 1e-9) + 1)]
    largest = max(abs(low), abs(high))
    # As many digits as tell neighbouring ticks apart.
    digits = max(4, 1 + math.ceil(math.log10(largest / spacing)))
    return Scale(low, high, False, tuple((value, _tick(value, largest, digits)) for value in values[: 2 * _MOST_TICKS]))


def _log_scale(low: float, high: float) -> Scale:
    low, high = low / 1.15, high * 1.15
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    every = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
    values = [10.0**power for power in range(first, last + 1, every)]
    if len(values) < 3:
        between = (factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5))
        values = [value for value in between if low <= value <= high]
    return Scale(low, high, True, tuple((value, _tick(value, high)) for value in values))


def _spacing(low: float, high: float, *, is_whole: bool) -> float:
    """The distance of ticks: 1, 2 or 5 times a power of ten, so that there are at most five or six of them."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return max(1.0, spacing) if is_whole else spacing


def _tick(value: float, largest: float, digits: int = 4) -> str:
    """The text of a tick: counts with a suffix on axes from 10,000 on, else up to `digits` digits."""
    # 1e18 and not 1e+18: a plus sign is wider than a digit, and tells nothing.
    return _tick_number(value, largest, digits).replace("e+", "e")


def _tick_number(value: float, largest: float, digits: int) -> str:
    if largest < 10_000 or 0 < abs(value) < 1:
        return f"{value:.{digits}g}"
    if digits > 4:
        # A suffix leaves three digits.
        return f"{value:,.0f}" if value.is_integer() and largest < 1e15 else f"{value:.{digits}g}"
    if largest >= 1e15:
        return f"{value:.2g}"
    # 2k and not 2.00k, because ticks are round numbers.
    return re.sub(r"\.0+(?=[kMBT]|$)|(?<=\.\d)0(?=[kMBT])", "", format_count(value))
