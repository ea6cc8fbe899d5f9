"""What `repr` and a notebook show of a run: its state, its last metrics and its curves. No jax here."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.metrics.format import format_duration
from jaxtrain.metrics.history import last_metrics, read_history
from jaxtrain.metrics.runinfo import read_run_info
from jaxtrain.runtime.card import card, table


def run_text(run_dir: Path) -> str:
    """A run in two or three lines; files that are missing leave out their part."""
    info = read_run_info(run_dir)
    metrics = ", ".join(f"{name} {value:.5g}" for name, value in _last_metrics(run_dir).items())
    return "\n  ".join(line for line in (f"{run_dir}: {_state(info)}", _model(info), metrics) if line)


def run_card(title: str, run_dir: Path, *, facts: Mapping[str, object]) -> str:
    """A run as HTML: its title, facts (name -> value, before those of the run), last metrics, curves."""
    from jaxtrain.metrics.figure import draw_history, figure_html

    info, history = read_run_info(run_dir), read_history(run_dir / "metrics.jsonl")
    devices, seconds = info.get("devices") or {}, (info.get("final") or {}).get("wall_seconds")
    shown = {
        **facts,
        "state": _state(info),
        "model": _model(info),
        "data": "; ".join((info.get("data") or {}).get("description") or ()),
        "devices": f"{devices['count']} x {devices['kind']}" if devices else None,
        "wall time": None if seconds is None else format_duration(seconds),
    }
    rows = [(name, f"{value:.5g}") for name, value in _last_metrics(run_dir).items()]
    curves = figure_html(draw_history(history, (), title="")) if len(history["step"]) else ""
    return card(title, shown, body=table(("metric", "last value"), rows) + curves)


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
