"""Curves as inline SVG whose colours come from the page, so that one picture serves light and dark themes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxtrain.metrics.format import format_count
from jaxtrain.metrics.report.curves import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# matplotlib cannot use CSS: it draws in these colours, and in the SVG the page's variables replace them.
_INK, _GRID = "#010203", "#040506"
_SERIES = ("#0a0b01", "#0a0b02", "#0a0b03")
_VARIABLES = {
    _INK: "var(--ink)",
    _GRID: "var(--line)",
    **{color: f"var(--series-{number})" for number, color in enumerate(_SERIES, 1)},
}

# Small in points: the page shows the picture about 1.6 times larger on a desktop and in its own size on a phone, so
# that its text is readable on both.
_SIZE_INCHES = (4.8, 2.8)
_FONT_POINTS = 9
_LOG_RATIO = 50


@dataclass(frozen=True)
class Plot:
    """One picture: named curves over steps.

    Attributes:
        title: caption of the picture.
        y_label: name and unit of the vertical axis.
        curves: (name, curve) in the order of the legend.
        may_be_log: whether the vertical axis is logarithmic where the values span a large range.
        from_zero: whether the vertical axis begins at zero, so that the jitter of a steady rate looks small.
    """

    title: str
    y_label: str
    curves: Sequence[tuple[str, Curve]]
    may_be_log: bool = False
    from_zero: bool = False


def draw_svg(plot: Plot, *, prefix: str) -> str:
    """Draw a plot as an `<svg>` element for an HTML page.

    Args:
        plot: the plot; every curve holds at least one point.
        prefix: begins every id, because the ids of several pictures on a page must differ.
    """
    import io

    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Text stays text: small, selectable and in the page's font. The salt makes the picture reproducible.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix, "font.size": _FONT_POINTS}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        figure.patch.set_alpha(0.0)
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        _draw_curves(axes, plot)
        _dress(axes, plot)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue(), title=plot.title, prefix=prefix)


def _draw_curves(axes: "Axes", plot: Plot) -> None:
    for (label, curve), color in zip(plot.curves, _SERIES, strict=False):
        # Few points would be hard to see as a bare line, and one point would not be drawn at all.
        marker = "o" if len(curve.steps) <= 12 else None
        axes.plot(curve.steps, curve.values, color=color, label=label, linewidth=1.6, marker=marker, markersize=3.5)
        if curve.is_thinned:
            axes.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)


def _dress(axes: "Axes", plot: Plot) -> None:
    """Set the scales, ticks, labels and legend."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    lows = np.concatenate([curve.low for _, curve in plot.curves])
    highs = np.concatenate([curve.high for _, curve in plot.curves])
    is_log = plot.may_be_log and lows.min() > 0 and highs.max() > _LOG_RATIO * lows.min()
    if is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        if lows.min() >= 0 and (plot.from_zero or lows.min() < 0.5 * highs.max()):
            axes.set_ylim(bottom=0)
    # Ticks as plain text: matplotlib's own powers of ten are drawn, not written.
    axes.yaxis.set_major_formatter(FuncFormatter(_tick(highs.max())))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick(max(curve.steps[-1] for _, curve in plot.curves))))
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(plot.y_label, color=_INK)
    axes.tick_params(colors=_INK, which="both", length=0)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.patch.set_alpha(0.0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    if len(plot.curves) > 1:
        axes.legend(frameon=False, labelcolor=_INK, loc="best")


def _tick(largest: float) -> Callable[[float, int | None], str]:
    """Make the format of the ticks of an axis: counts with a suffix from 10,000 on, else up to four digits.

    Args:
        largest: the largest value on the axis.
    """

    def write(value: float, _: int | None) -> str:
        if largest < 10_000:
            return f"{value:.4g}"
        text = format_count(value)
        # 2k and not 2.00k, because ticks are round numbers.
        return re.sub(r"\.0+(?=[kMBT]|$)|(?<=\.\d)0(?=[kMBT])", "", text)

    return write


def _inline(svg: str, *, title: str, prefix: str) -> str:
    """Take the `<svg>` element out of a file, with ids, links, font sizes and colours that fit the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    view_box = re.search(r'viewBox="[^"]*"', head)
    assert view_box is not None, "matplotlib writes a viewBox"
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(?:xlink:)?href="#', f'href="#{prefix}-', body)
    body = body.replace("url(#", f"url(#{prefix}-")
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)
    for color, variable in _VARIABLES.items():
        body = body.replace(color, variable)
    return f'<svg {view_box.group()} role="img" aria-label="{title} over steps">{body.strip()}'
