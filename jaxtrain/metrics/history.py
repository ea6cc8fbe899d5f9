"""The metrics of a run as columns, read from metrics.jsonl. No jax here."""

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def read_history(path: Path) -> dict[str, np.ndarray]:
    """Read the rows of a metrics file as columns of one length.

    Where a step was written twice, as by a run that went on from an earlier step, the later value is taken. Texts and
    incomplete lines (as the last line of a running job may be) are left out; a missing file has no rows.

    Args:
        path: a `metrics.jsonl`.

    Returns:
        `step`, int64 [N] ascending, each step once, then each metric, float64 [N]: NaN where a step has no such value
        (evaluation runs at few steps) or where it was not finite.
    """
    return _read(path)[0]


def last_evaluation(path: Path) -> dict[str, float]:
    """The metrics of the last evaluation, with its `step`, NaN where one was not finite; empty where there was none.

    Args:
        path: a `metrics.jsonl`.
    """
    return _last_evaluation(*_read(path))


def last_metrics(path: Path, names: Sequence[str]) -> dict[str, float]:
    """The last step, the last value of each of some metrics, and the last evaluation; NaN where one was not finite.

    Args:
        path: a `metrics.jsonl`.
        names: of metrics; those that no row has are left out.
    """
    history, places = _read(path)
    if not len(history["step"]):
        return {}
    found = {name: float(history[name][places[name].max()]) for name in names if name in history}
    evaluated = {name: value for name, value in _last_evaluation(history, places).items() if name != "step"}
    return {"step": int(history["step"][-1]), **found, **evaluated}


def _last_evaluation(history: Mapping[str, np.ndarray], places: Mapping[str, np.ndarray]) -> dict[str, float]:
    ends = {name: int(found.max()) for name, found in places.items() if name.startswith("eval_")}
    if not ends:
        return {}
    last = max(ends.values())
    found = {name: float(history[name][last]) for name, end in ends.items() if end == last}
    return {"step": int(history["step"][last]), **found}


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The columns of `read_history`, and for each metric the places of the rows that have it, finite or not.

    A column alone does not say it: NaN stands for a row without the metric and for a value that was not finite.
    """
    numbers = array("q")
    # Arrays of numbers: dicts of Python numbers take many times the memory on a long run.
    values: dict[str, tuple[array, array]] = {}
    for row in _rows(path):
        place = len(numbers)
        numbers.append(row["step"])
        for name, value in row.items():
            number = _number(value)
            if number is not None and name != "step":
                places, column = values.setdefault(name, (array("q"), array("d")))
                places.append(place)
                column.append(number)
    steps, places_of = np.unique(np.array(numbers, np.int64), return_inverse=True)
    history: dict[str, np.ndarray] = {"step": steps}
    places_with: dict[str, np.ndarray] = {}
    for name, (places, column) in values.items():
        history[name] = np.full(len(steps), np.nan)
        places_with[name] = places_of[np.array(places, np.int64)]
        # Of several values of one step, NumPy keeps the last.
        history[name][places_with[name]] = np.array(column)
    return history, places_with


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The complete rows of a file, each with its `step`."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row


def _number(value: object) -> float | None:
    """The value as a float; NaN for null, which stands for a number that is not finite, and None for a text."""
    if value is None:
        return math.nan
    return float(value) if isinstance(value, int | float) else None
