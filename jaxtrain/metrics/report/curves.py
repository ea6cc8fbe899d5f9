"""Curves from metrics.jsonl: one series per metric, thinned to as many points as a picture can show."""

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Series = Mapping[str, tuple[np.ndarray, np.ndarray]]
Gaps = Mapping[str, np.ndarray]

MAX_POINTS = 200
# Above it neighbouring floats are more than 1 apart; a step of such a size is damage.
_LARGEST_STEP = 2**53
# Fewer points are seen as they are.
_FEWEST_TO_SMOOTH = 24


@dataclass(frozen=True)
class Curve:
    """A metric over steps.

    Attributes:
        steps: step of each point; means over bins where the curve is thinned.
        values: value of each point; means over bins where the curve is thinned.
        low: smallest value of each bin; equal to `values` where the curve is not thinned.
        high: largest value of each bin; equal to `values` where the curve is not thinned.
        is_thinned: whether a point stands for several rows.
        starts: index of each point that begins a piece of its own, because rows before it had no finite value.
    """

    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    is_thinned: bool
    starts: Sequence[int] = ()


def read_series(path: Path) -> tuple[Series, Gaps]:
    """Read the numbers of a metrics file.

    Text and incomplete lines (as the last line of a running job may be) are ignored; a missing file has no metrics.

    Args:
        path: a `metrics.jsonl`.

    Returns:
        Name of a metric -> (steps, values), float64, ordered by step, of its finite values; and name of a metric ->
        steps of the rows that hold null in its place, or a number that no float holds.

    Raises:
        OSError: the file cannot be read.
    """
    columns: dict[str, tuple[array, array]] = {}
    gaps: dict[str, array] = {}
    if not path.exists():
        return {}, {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if not isinstance(step, int) or abs(step) > _LARGEST_STEP:
                continue
            for name, value in row.items():
                # Arrays of doubles: lists of Python numbers take five times the memory on a long run.
                if name == "step" or not (value is None or isinstance(value, (int, float))):
                    continue
                if value is None or not _is_finite(value):
                    gaps.setdefault(name, array("d")).append(step)
                else:
                    steps, values = columns.setdefault(name, (array("d"), array("d")))
                    steps.append(step)
                    values.append(value)
    series = {}
    for name, (steps, values) in columns.items():
        order = np.argsort(np.asarray(steps), kind="stable")
        series[name] = (np.asarray(steps)[order], np.asarray(values)[order])
    return series, {name: np.sort(np.asarray(steps)) for name, steps in gaps.items()}


def _is_finite(value: float | int) -> bool:
    """Whether a number is finite as a float; integers of JSON may be of any size."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def piece_starts(steps: np.ndarray, gaps: np.ndarray | None) -> np.ndarray:
    """Find where a series has a gap.

    Args:
        steps: of the finite values, ordered.
        gaps: steps of rows without a finite value; None: there is none.

    Returns:
        Index of each value that has such rows right before it, and a value before those. A gap that is narrower than a
        point of a picture is left out: it would not be seen, and hundreds of them would leave nothing to smooth.
    """
    if gaps is None or not len(steps):
        return np.zeros(0, int)
    starts = np.unique(np.searchsorted(steps, gaps[(gaps > steps[0]) & (gaps < steps[-1])]))
    return starts[MAX_POINTS * (steps[starts] - steps[starts - 1]) > steps[-1] - steps[0]]


def thin(
    steps: np.ndarray, values: np.ndarray, *, starts: Sequence[int] | np.ndarray = (), max_points: int = MAX_POINTS
) -> Curve:
    """Thin a series to at most `max_points` points.

    Args:
        steps: step of each value.
        values: values of a metric, in order.
        starts: where pieces begin, from `piece_starts`.
        max_points: more values are averaged over equal bins, with the smallest and largest value of each bin. A bin
            ends at a gap, so that there is up to one point more per gap.
    """
    starts = np.asarray(starts, int)
    if len(values) <= max_points:
        return Curve(steps, values, values, values, False, starts.tolist())
    bins = np.union1d(np.arange(max_points) * len(values) // max_points, starts)
    sizes = np.diff(bins, append=len(values))
    low, high = np.minimum.reduceat(values, bins), np.maximum.reduceat(values, bins)
    # Divided first: a sum of large values may be infinite where their mean is not.
    means = np.add.reduceat(values / np.repeat(sizes, sizes), bins)
    return Curve(
        steps=np.add.reduceat(steps, bins) / sizes,
        # Rounding must not move the mean of equal values.
        values=np.clip(means, low, high),
        low=low,
        high=high,
        is_thinned=True,
        starts=np.searchsorted(bins, starts).tolist(),
    )


def smoothed(values: np.ndarray, starts: Sequence[int] | np.ndarray = ()) -> np.ndarray | None:
    """Average each value with its neighbours: a centred window of a fifteenth of the values, narrower at both ends.

    A centred window does not lag behind a falling loss, as an exponential average does. No window crosses a gap.

    Args:
        values: of a metric, in order.
        starts: where pieces begin, from `piece_starts`.

    Returns:
        As many values; None for few values, which need no smoothing.
    """
    count = len(values)
    if count < _FEWEST_TO_SMOOTH:
        return None
    index, edges = np.arange(count), np.concatenate([[0], np.asarray(starts, int), [count]])
    sizes = np.diff(edges)
    before, after = index - np.repeat(edges[:-1], sizes), np.repeat(edges[1:], sizes) - 1 - index
    half = np.minimum(max(3, count // 30), np.minimum(before, after))
    # Divided first: a sum of large values may be infinite where their mean is not.
    return _window_sums(values / count, index - half, 2 * half + 1) * (count / (2 * half + 1))


def _window_sums(values: np.ndarray, first: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Sum windows of values, each by itself: of differences of one running sum a huge value would leave nothing.

    A window is put together from blocks whose sizes are powers of two, which takes log(size) passes.

    Args:
        values: float64 [N].
        first: index of the first value of each window, [M].
        sizes: number of values of each window, [M].
    """
    total, at, blocks, size = np.zeros(len(first)), first.copy(), values, 1
    while True:
        chosen = (sizes & size) > 0
        total[chosen] += blocks[at[chosen]]
        at[chosen] += size
        if 2 * size > sizes.max():
            return total
        blocks, size = blocks[:-size] + blocks[size:], 2 * size


def last_text(path: Path, name: str) -> tuple[int, str] | None:
    """Read the last text of a metrics file under a name, such as `sample`, with its step; None where there is none."""
    found = None
    if not path.exists():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            # Rows of numbers are by far the most; parsing them again would double the time of a long file.
            if f'"{name}"' not in line:
                continue
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get(name), str):
                found = (row["step"], row[name])
    return found
