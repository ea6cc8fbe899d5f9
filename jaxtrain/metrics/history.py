"""The metrics of a run as columns, read from metrics.jsonl. No jax here."""

import json
import math
from array import array
from collections.abc import Iterator, Mapping
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
    for name, (places, column) in values.items():
        history[name] = np.full(len(steps), np.nan)
        # Of several values of one step, NumPy keeps the last.
        history[name][places_of[np.array(places, np.int64)]] = np.array(column)
    return history


def last_evaluation(history: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The metrics of the last evaluation, with its `step`; empty where there was none.

    Args:
        history: the result of `read_history`.
    """
    names = [name for name in history if name.startswith("eval_")]
    known = np.zeros(len(history["step"]), bool)
    for name in names:
        known |= ~np.isnan(history[name])
    if not known.any():
        return {}
    last = int(np.flatnonzero(known)[-1])
    return {"step": int(history["step"][last]), **{name: float(history[name][last]) for name in names}}


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
