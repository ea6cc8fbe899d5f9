"""Curves out of metrics.jsonl: one series a metric, thinned to what a picture can show."""

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAX_POINTS = 1000


@dataclass(frozen=True)
class Curve:
    """A metric over steps. `low` and `high` bound the values behind each point; without thinning they equal it."""

    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    is_thinned: bool


def read_series(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The numbers of a metrics file as (steps, values) a metric, in float64, ordered by step.

    Null, text and lines that are no row (a torn last line of a running job) are left out; a missing file has none.
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
    """A curve of at most `max_points` points: means over equal bins, with the smallest and largest value of each."""
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
    """The thinned curve of a metric, or None when the run did not log it."""
    return thin(*series[name]) if name in series else None
