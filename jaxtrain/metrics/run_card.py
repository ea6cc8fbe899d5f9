"""What `repr` and a notebook show of a run: its state, its last metrics and its curves. No jax here."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.metrics.history import last_metrics
from jaxtrain.metrics.runinfo import read_run_info

_SHOWN = ("loss", "accuracy", "learning_rate")


def run_text(run_dir: Path) -> str:
    """A run in two or three lines; files that are missing leave out their part."""
    info = read_run_info(run_dir)
    lines = [f"{run_dir}: {_state(info)}", _model(info), _metrics_text(run_dir)]
    return "\n  ".join(line for line in lines if line)


def _state(info: Mapping[str, Any]) -> str:
    steps = _mapping(_mapping(info.get("config")).get("train")).get("steps")
    asked = f" ({steps:,} steps)" if isinstance(steps, int) else ""
    return f"{info.get('status') or 'no run.json'}{asked}"


def _model(info: Mapping[str, Any]) -> str:
    model = _mapping(info.get("model"))
    count = model.get("num_parameters")
    return f"{model.get('name')}, {count:,} parameters" if isinstance(count, int) else ""


def _metrics_text(run_dir: Path) -> str:
    metrics = _last_metrics(run_dir / "metrics.jsonl")
    return ", ".join(f"{name} {value:.5g}" for name, value in metrics.items())


def _last_metrics(rows: Path) -> dict[str, float]:
    found = last_metrics(rows, _SHOWN)
    # Null in the rows of an optimizer from Python whose rate is not known.
    return {name: value for name, value in found.items() if name != "learning_rate" or not math.isnan(value)}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
