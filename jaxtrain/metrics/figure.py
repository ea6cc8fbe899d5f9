"""Curves of a run as a matplotlib figure, for notebooks and scripts. No jax here."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from jaxtrain.errors import ConfigError
from jaxtrain.metrics.history import STANDARD

# Above this ratio of the largest to the smallest loss, a linear axis shows nothing of the end.
_LOG_RATIO = 50


class CurveFigure(Figure):
    """A figure that a notebook shows once, whether or not pyplot is in use."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def draw_history(history: Mapping[str, np.ndarray], names: Sequence[str], *, title: str) -> CurveFigure:
    """Draw metrics over steps, one panel each, with training and evaluation in one panel.

    Args:
        history: the result of `read_history`.
        names: metrics, with or without `eval_`; none: the loss and the task's metrics.
        title: of the figure.

    Raises:
        ConfigError: there is no such metric.
    """
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
