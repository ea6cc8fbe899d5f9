"""What `repr` and a notebook show of a run: its state, its last metrics and its curves. No jax here."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.metrics.format import format_duration
from jaxtrain.metrics.history import last_metrics, read_history
from jaxtrain.metrics.runinfo import read_run_info
from jaxtrain.runtime.card import card, table

_SHOWN = ("loss", "accuracy", "learning_rate")


def run_text(run_dir: Path) -> str:
    """A run in two or three lines; files that are missing leave out their part."""
    info = read_run_info(run_dir)
    lines = [f"{run_dir}: {_state(info)}", _model(info), _metrics_text(run_dir)]
    return "\n  ".join(line for line in lines if line)


def run_card(title: str, run_dir: Path, *, facts: Mapping[str, object]) -> str:
    """A run as HTML: facts, last metrics, curves.

    Args:
        title: of the card.
        run_dir: directory of the run.
        facts: name -> value, before those of the run.
    """
    from jaxtrain.metrics.figure import draw_history, figure_html

    rows = run_dir / "metrics.jsonl"
    info, history, last = read_run_info(run_dir), read_history(rows), _last_metrics(rows)
    data = _mapping(info.get("data")).get("description") or []
    devices = _mapping(info.get("devices"))
    seconds = _mapping(info.get("final")).get("wall_seconds")
    shown = {
        **facts,
        "state": _state(info),
        "model": _model(info),
        "data": "; ".join(map(str, data)),
        "devices": f"{devices['count']} x {devices['kind']}" if {"count", "kind"} <= set(devices) else None,
        "wall time": format_duration(seconds) if isinstance(seconds, int | float) else None,
    }
    metrics = table(("metric", "last value"), [(name, f"{value:.5g}") for name, value in last.items()])
    curves = figure_html(draw_history(history, (), title="")) if len(history["step"]) else ""
    return card(title, shown, body=metrics + curves)


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
