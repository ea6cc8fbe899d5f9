"""Curves of a run as a matplotlib figure, for notebooks and scripts. No jax here."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from jaxtrain.errors import ConfigError

# What a row of metrics.jsonl holds besides the loss and the task's metrics.
_STANDARD = (
    *("step", "grad_norm", "learning_rate", "loss_scale", "skipped_steps", "tokens", "examples", "tokens_per_second"),
    *("examples_per_second", "step_seconds", "data_wait_seconds", "model_flops_utilization", "device_memory_bytes"),
)
_WIDTH_INCHES, _HEIGHT_INCHES = 4.6, 3.0
_MOST_COLUMNS = 3
# Above this ratio of the largest to the smallest loss, a linear axis shows nothing of the end.
_LOG_RATIO = 50
_TRAIN, _EVALUATION = "#2563c9", "#d9661f"


class CurveFigure(Figure):
    """A figure that a notebook shows once, whether or not pyplot is in use."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def figure_html(figure: Figure) -> str:
    """A figure as an `<img>` that holds its SVG: several on one page cannot share ids, and need no file."""
    buffer = io.BytesIO()
    # Text stays text, which is small; the date would make every picture another one.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="curves over steps" style="max-width:100%" src="data:image/svg+xml;base64,{encoded}">'


def task_metrics(history: Mapping[str, np.ndarray]) -> list[str]:
    """The loss and the task's metrics, without `eval_`, in the order in which they were logged.

    Args:
        history: the result of `read_history`.
    """
    names = dict.fromkeys(name.removeprefix("eval_") for name in history)
    # exp(loss) shows what the loss shows.
    return [name for name in names if name not in _STANDARD and name != "perplexity"]


def draw_history(history: Mapping[str, np.ndarray], names: Sequence[str], *, title: str) -> CurveFigure:
    """Draw metrics over steps, one panel each, with training and evaluation in one panel.

    Args:
        history: the result of `read_history`.
        names: metrics, with or without `eval_`; none: those of `task_metrics`.
        title: of the figure.

    Raises:
        ConfigError: there is no such metric.
    """
    known = [name for name in dict.fromkeys(name.removeprefix("eval_") for name in history) if name != "step"]
    for name in names:
        if name not in known and (name == "step" or name not in history):
            raise ConfigError(f"the run logged no metric {name!r}; it logged {', '.join(known) or 'nothing yet'}")
    # `eval_loss`, as the history names it, is drawn in the panel of `loss`.
    chosen = list(dict.fromkeys(name.removeprefix("eval_") for name in names)) or task_metrics(history)
    columns = max(1, min(len(chosen), _MOST_COLUMNS))
    rows = max(1, -(-len(chosen) // columns))
    figure = CurveFigure(figsize=(_WIDTH_INCHES * columns, _HEIGHT_INCHES * rows), layout="constrained")
    if title:
        figure.suptitle(title, parse_math=False)
    for place, name in enumerate(chosen, 1):
        _draw(figure.add_subplot(rows, columns, place), history, name)
    if not chosen:
        axes = figure.add_subplot()
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no metrics were logged yet", ha="center")
    return figure


def _draw(axes: Any, history: Mapping[str, np.ndarray], name: str) -> None:
    lines = [("train", name, _TRAIN), ("evaluation", f"eval_{name}", _EVALUATION)]
    lowest, highest = np.inf, -np.inf
    for label, key, color in lines:
        if key not in history:
            continue
        known = np.isfinite(history[key])
        if not known.any():
            continue
        steps, values = history["step"][known], history[key][known]
        marker = "o" if len(steps) <= 20 else None
        axes.plot(steps, values, color=color, label=label, linewidth=1.4, marker=marker, markersize=3)
        lowest, highest = min(lowest, values.min()), max(highest, values.max())
    if 0 < lowest < highest / _LOG_RATIO:
        axes.set_yscale("log")
    axes.set_title(name.replace("_", " "), fontsize=10, parse_math=False)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.lines) > 1:
        axes.legend(frameon=False)
