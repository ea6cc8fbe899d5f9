"""What `repr` and a notebook show of a run: its state, its last metrics and its curves. No jax here."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.metrics.history import last_metrics
from jaxtrain.metrics.runinfo import read_run_info


def run_text(run_dir: Path) -> str:
    """A run in two or three lines; files that are missing leave out their part."""
    info = read_run_info(run_dir)
    metrics = ", ".join(f"{name} {value:.5g}" for name, value in _last_metrics(run_dir).items())
    return "\n  ".join(line for line in (f"{run_dir}: {_state(info)}", _model(info), metrics) if line)


def _state(info: Mapping[str, Any]) -> str:
    steps = ((info.get("config") or {}).get("train") or {}).get("steps")
    return f"{info.get('status') or 'no run.json'}{'' if steps is None else f' ({steps:,} steps)'}"


def _model(info: Mapping[str, Any]) -> str:
    model = info.get("model") or {}
    return f"{model['name']}, {model['num_parameters']:,} parameters" if model else ""


def _last_metrics(run_dir: Path) -> dict[str, float]:
    found = last_metrics(run_dir / "metrics.jsonl", ("loss", "accuracy", "learning_rate"))
    # Null in the rows of an optimizer from Python whose rate is not known.
    return {name: value for name, value in found.items() if name != "learning_rate" or not math.isnan(value)}
