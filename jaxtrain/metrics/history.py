"""The metrics of a run as columns, read from metrics.jsonl. No jax here."""

import json
import math
from collections.abc import Mapping
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
    rows: dict[int, dict[str, float]] = {}
    for row in _rows(path):
        numbers = {name: _number(value) for name, value in row.items() if name != "step"}
        rows.setdefault(row["step"], {}).update({k: value for k, value in numbers.items() if value is not None})
    steps = sorted(rows)
    names = dict.fromkeys(name for step in steps for name in rows[step])
    columns = {name: np.array([rows[step].get(name, math.nan) for step in steps]) for name in names}
    return {"step": np.array(steps, np.int64), **columns}


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


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            found.append(row)
    return found


def _number(value: object) -> float | None:
    """The value as a float; NaN for null, which stands for a number that is not finite, and None for a text."""
    if value is None:
        return math.nan
    return float(value) if isinstance(value, int | float) else None
