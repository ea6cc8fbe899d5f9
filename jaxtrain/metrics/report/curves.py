"""Curves from metrics.jsonl: one series per metric, thinned to as many points as a picture can show."""

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAX_POINTS = 200
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
    """

    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    is_thinned: bool


def read_series(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read the numbers of a metrics file.

    Null, text and incomplete lines (as the last line of a running job may be) are ignored; a missing file has no
    metrics.

    Args:
        path: a `metrics.jsonl`.

    Returns:
        Name of a metric -> (steps, values), float64, ordered by step.
    """
    columns: dict[str, tuple[array, array]] = {}
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if not isinstance(step, int):
                continue
            for name, value in row.items():
                if name != "step" and isinstance(value, (int, float)) and np.isfinite(value):
                    # Arrays of doubles: lists of Python numbers take five times the memory on a long run.
                    steps, values = columns.setdefault(name, (array("d"), array("d")))
                    steps.append(step)
                    values.append(value)
    series = {}
    for name, (steps, values) in columns.items():
        order = np.argsort(np.asarray(steps), kind="stable")
        series[name] = (np.asarray(steps)[order], np.asarray(values)[order])
    return series


def thin(steps: np.ndarray, values: np.ndarray, *, max_points: int = MAX_POINTS) -> Curve:
    """Thin a series to at most `max_points` points.

    Args:
        steps: step of each value.
        values: values of a metric, in order.
        max_points: more values are averaged over equal bins, with the smallest and largest value of each bin.
    """
    if len(values) <= max_points:
        return Curve(steps, values, values, values, False)
    starts = np.arange(max_points) * len(values) // max_points
    sizes = np.diff(starts, append=len(values))
    return Curve(
        steps=np.add.reduceat(steps, starts) / sizes,
        values=np.add.reduceat(values, starts) / sizes,
        low=np.minimum.reduceat(values, starts),
        high=np.maximum.reduceat(values, starts),
        is_thinned=True,
    )


def curve(series: Mapping[str, tuple[np.ndarray, np.ndarray]], name: str) -> Curve | None:
    """Thin the curve of one metric.

    Args:
        series: the result of `read_series`.
        name: of the metric.

    Returns:
        The curve; None where the run did not log the metric.
    """
    return thin(*series[name]) if name in series else None


def smoothed(values: np.ndarray) -> np.ndarray | None:
    """Average each value with its neighbours: a centred window of a fifteenth of the values, narrower at both ends.

    A centred window does not lag behind a falling loss, as an exponential average does.

    Args:
        values: of a metric, in order.

    Returns:
        As many values; None for few values, which need no smoothing.
    """
    count = len(values)
    if count < _FEWEST_TO_SMOOTH:
        return None
    index = np.arange(count)
    half = np.minimum(max(3, count // 30), np.minimum(index, count - 1 - index))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)


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
