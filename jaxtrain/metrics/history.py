"""The metrics of a run as rows, as columns and as a figure, read from metrics.jsonl. No jax here."""

import io
import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Series = Mapping[str, tuple[np.ndarray, np.ndarray]]

# What a row of metrics.jsonl holds besides the loss and the task's metrics; exp(loss) shows what the loss shows.
STANDARD = (
    *("step", "grad_norm", "learning_rate", "loss_scale", "skipped_steps", "tokens", "examples", "tokens_per_second"),
    *("examples_per_second", "step_seconds", "data_wait_seconds", "model_flops_utilization", "device_memory_bytes"),
    "perplexity",
)

# Above this ratio of the largest to the smallest loss, a linear axis shows nothing of the end.
_LOG_RATIO = 50


def read_rows(path: Path, *, num_bytes: float = math.inf) -> Iterator[dict[str, Any]]:
    """Read the complete rows within the first bytes of a `metrics.jsonl`; a missing file has none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            num_bytes -= len(line)
            if num_bytes < 0:
                return
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row


def read_series(path: Path) -> Series:
    """Read the numbers of a file: metric -> (steps, values), float64 [N], ordered by step; NaN where it was not finite.

    Of a step that was written twice the later value is taken.
    """
    # Arrays of numbers: lists of Python numbers take many times the memory on a long run.
    columns: dict[str, tuple[array, array]] = {}
    for row in read_rows(path):
        for name, value in row.items():
            if name != "step" and (value is None or isinstance(value, int | float)):
                steps, values = columns.setdefault(name, (array("d"), array("d")))
                steps.append(row["step"])
                values.append(math.nan if value is None else value)
    series = {}
    for name, (steps, values) in columns.items():
        # `unique` finds the first of equal steps: that of the reversed rows is the last.
        ordered, places = np.unique(np.array(steps)[::-1], return_index=True)
        series[name] = ordered, np.array(values)[::-1][places]
    return series


def read_history(path: Path) -> dict[str, np.ndarray]:
    """Read the numbers of a `metrics.jsonl` as columns of one length.

    Returns:
        `step`, int64 [N] ascending, each step once, then each metric, float64 [N]: NaN where a step has no such value
        (evaluation runs at few steps) or where it was not finite.
    """
    series = read_series(path)
    steps = np.unique(np.concatenate([np.zeros(0), *(steps for steps, _ in series.values())]))
    history: dict[str, np.ndarray] = {"step": steps.astype(np.int64)}
    for name, (known, values) in series.items():
        history[name] = np.full(len(steps), np.nan)
        history[name][np.searchsorted(steps, known)] = values
    return history


def last_evaluation(path: Path) -> dict[str, float]:
    """The metrics of the last evaluation, with its `step`, NaN where one was not finite; empty where there was none."""
    found = {name: one for name, one in read_series(path).items() if name.startswith("eval_")}
    last = max((steps[-1] for steps, _ in found.values()), default=0)
    metrics = {name: float(values[-1]) for name, (steps, values) in found.items() if steps[-1] == last}
    return {"step": int(last), **metrics} if metrics else {}


def last_metrics(path: Path, names: Sequence[str]) -> dict[str, float]:
    """The last step, the last value of those of `names` that were logged, and the last evaluation."""
    series = read_series(path)
    found = {name: float(series[name][1][-1]) for name in names if name in series}
    steps = {"step": int(max(steps[-1] for steps, _ in series.values()))} if series else {}
    return {**steps, **found, **last_evaluation(path), **steps}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested config to dotted keys; an empty group is a value of its own."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found |= flat(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return found


def draw_history(history: Mapping[str, np.ndarray], names: Sequence[str], *, title: str) -> "Figure":
    """Draw metrics over steps as a matplotlib figure, one panel each, with training and evaluation in one panel.

    Args:
        history: the result of `read_history`.
        names: metrics, with or without `eval_`; none: the loss and the task's metrics.
        title: of the figure.

    Raises:
        ConfigError: there is no such metric.
    """
    from matplotlib.figure import Figure

    class CurveFigure(Figure):
        """A figure that a notebook shows once, whether or not pyplot is in use."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=110)
            return buffer.getvalue()

    known = [name for name in dict.fromkeys(name.removeprefix("eval_") for name in history) if name != "step"]
    chosen = list(dict.fromkeys(name.removeprefix("eval_") for name in names))
    for name in chosen:
        if name not in known:
            raise ConfigError(f"the run logged no metric {name!r}; it logged {', '.join(known) or 'nothing yet'}")
    chosen = chosen or [name for name in known if name not in STANDARD]
    columns = max(1, min(len(chosen), 3))
    rows = max(1, -(-len(chosen) // columns))
    figure = CurveFigure(figsize=(4.6 * columns, 3.0 * rows), layout="constrained")
    figure.suptitle(title, parse_math=False)
    for place, name in enumerate(chosen, 1):
        axes = figure.add_subplot(rows, columns, place)
        drawn = np.zeros(0)
        for label, key, color in (("train", name, "#2563c9"), ("evaluation", f"eval_{name}", "#d9661f")):
            finite = np.isfinite(history.get(key, np.zeros(0)))
            if finite.any():
                steps, values = history["step"][finite], history[key][finite]
                marker = "o" if len(steps) <= 20 else None
                axes.plot(steps, values, color=color, label=label, linewidth=1.4, marker=marker, markersize=3)
                drawn = np.concatenate([drawn, values])
        if len(drawn) and 0 < drawn.min() < drawn.max() / _LOG_RATIO:
            axes.set_yscale("log")
        axes.set_title(name.replace("_", " "), fontsize=10, parse_math=False)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
    return figure
