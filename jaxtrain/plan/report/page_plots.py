"""The pictures of a plan's page as inline SVG: memory by part, roofline, time by part, cost against time.

Text takes its colours from the page, so that one picture serves light and dark; parts have colours of their own.
"""

import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jaxtrain.metrics.format import format_count
from jaxtrain.plan.report.rows import bubble_seconds, dollars, labels, merged
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.time.record import BlockTime, StepTime
from jaxtrain.plan.time.step import peak_rate

# matplotlib knows no CSS: it draws in these colours and the SVG gets the page's variables in their place.
_INK, _GRID, _PAGE, _BAD = "#010203", "#040506", "#070809", "#0a0b0c"
_VARIABLES = {_INK: "var(--ink)", _GRID: "var(--line)", _PAGE: "var(--page)", _BAD: "var(--bad)"}
# Told apart from their neighbours and seen on white and on black.
_PALETTE = (
    *("#4c78c8", "#e8853d", "#4fa866", "#c94f4f", "#8f6bbf", "#b08a3e", "#d976b4", "#3aa6b9"),
    *("#a3b944", "#8a6552", "#6f8fa8", "#e3b23c", "#5b5fc7", "#2f8f83", "#b7638a", "#93a0ad"),
)
_WIDTH_INCHES = 10.4
_FONT_POINTS = 9.0
# Of a letter, as a share of the font's size: a little more than what most letters of a sans serif take.
_LETTER = 0.56
# Times further apart than this are drawn as shares of each step: the shortest bar could not be read.
_MOST_RATIO = 6.0


def memory_picture(estimates: Sequence[Estimate]) -> str:
    """Memory of one device by part: a bar a target, capacity as a line, the compiler's peak as a diamond."""
    parts = merged(one.memory.parts for one in estimates)
    colors = _colors(parts)
    most = max(_memory_reach(one) for one in estimates)
    unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)

    def draw(axes: Any) -> None:
        for y, one in enumerate(estimates):
            left = 0.0
            for part, count in one.memory.parts.items():
                axes.barh(y, count / size, 0.62, left, color=colors[part], edgecolor=_PAGE, linewidth=0.6)
                left += count / size
            capacity = one.memory.capacity_bytes
            if capacity is not None:
                axes.plot([capacity / size] * 2, [y - 0.42, y + 0.42], color=_BAD, linewidth=2.2)
            if one.exact is not None:
                diamond = dict(marker="D", markersize=7, markerfacecolor=_PAGE, markeredgecolor=_INK)
                axes.plot(one.exact.peak_bytes / size, y, linestyle="", zorder=5, **diamond)
            text = f"{one.memory.total_bytes / size:,.1f}"
            text += "" if one.exact is None else f", compiler {one.exact.peak_bytes / size:,.1f}"
            text += f" {unit}" if capacity is None else f" of {capacity / size:,.1f} {unit}"
            _end_text(axes, _memory_reach(one) / size, y, text)
        axes.set_xlabel(f"{unit} of one device at the peak")

    keys = [_patch(part, colors[part]) for part in parts]
    if any(one.memory.capacity_bytes is not None for one in estimates):
        keys.append(_line("capacity", color=_BAD, linewidth=2.2))
    if any(one.exact is not None for one in estimates):
        keys.append(_line("peak by the compiler", color=_INK, marker="D", markerfacecolor=_PAGE, linestyle=""))
    return _bars(estimates, draw, keys, most / size, title="Memory by part")


def _memory_reach(estimate: Estimate) -> int:
    exact = 0 if estimate.exact is None else estimate.exact.peak_bytes
    return max(estimate.memory.total_bytes, estimate.memory.capacity_bytes or 0, exact)


def time_picture(estimates: Sequence[Estimate]) -> str | None:
    """Time of a step by part: blocks, exposed traffic by axis, bubble. None where no step has a time."""
    shown = [(name, one) for name, one in zip(labels(estimates), estimates, strict=True) if _is_timed(one)]
    if not shown:
        return None
    parts = [time_parts(one.time) for _, one in shown if one.time]
    seconds = [sum(some.values()) for some in parts]
    as_shares = max(seconds) > _MOST_RATIO * min(seconds)
    scale = 1e3 if max(seconds) < 10 else 1.0
    unit = "ms" if scale == 1e3 else "s"
    colors = block_colors(estimates)
    names = merged(parts)
    others = [name for name in names if name not in colors]
    colors |= dict(zip(others, itertools.cycle(reversed(_PALETTE))))
    looks: dict[str, dict[str, Any]] = {
        name: dict(color=colors[name], hatch="////" if name in others else None) for name in names
    }

    def draw(axes: Any) -> None:
        for y, (some, whole) in enumerate(zip(parts, seconds, strict=True)):
            left, factor = 0.0, 100 / whole if as_shares else scale
            for part, taken in some.items():
                axes.barh(y, factor * taken, 0.62, left, edgecolor=_PAGE, linewidth=0.6, **looks[part])
                left += factor * taken
            time = shown[y][1].time
            assert time is not None, "only those with a time are shown"
            own_scale, own_unit = (1e3, "ms") if whole < 1 else (1.0, "s")
            low, likely, high = (_digits(own_scale * one) for one in (time.low_seconds, whole, time.high_seconds))
            _end_text(axes, left, y, f"{likely} {own_unit} ({low} to {high})")
        if as_shares:
            # No ticks above 100 %, where the times are written.
            axes.set_xticks(range(0, 101, 20))
        axes.set_xlabel("% of a step" if as_shares else f"{unit} of a step")

    keys = [_patch(name, **looks[name]) for name in names]
    reach = 100.0 if as_shares else scale * max(seconds)
    return _bars([one for _, one in shown], draw, keys, reach, title="Time by part", names=[name for name, _ in shown])


def time_parts(time: StepTime) -> dict[str, float]:
    """Seconds of a step by part, in the order to draw; parts of no time are left out."""
    parts: dict[str, float] = {}
    for block in time.blocks:
        parts[block.name] = parts.get(block.name, 0.0) + block.seconds
    for traffic in time.traffic:
        name = f"exposed traffic over {traffic.axis}"
        parts[name] = parts.get(name, 0.0) + traffic.exposed_seconds
    parts["pipeline bubble"] = bubble_seconds(time)
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def block_colors(estimates: Sequence[Estimate]) -> dict[str, str]:
    """The colour of each kind of block, in every picture."""
    names = merged([block.name for block in one.time.blocks] for one in estimates if one.time)
    return _colors(names)


def _colors(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name: the palette, then its tints, as a ResNet has more kinds of blocks."""
    tints = ("#" + "".join(f"{(int(color[at : at + 2], 16) + 255) // 2:02x}" for at in (1, 3, 5)) for color in _PALETTE)
    return dict(zip(names, itertools.cycle((*_PALETTE, *tints))))


def _is_timed(estimate: Estimate) -> bool:
    return estimate.time is not None and 0 < sum(time_parts(estimate.time).values()) < math.inf


def roofline_picture(estimates: Sequence[Estimate]) -> str | None:
    """A roof for each target, with the blocks under it as labelled points. None where there is no block to place."""
    shown = []
    for name, one in zip(labels(estimates), estimates, strict=True):
        blocks = [] if one.time is None else [b for b in one.time.blocks if b.intensity > 0 and b.seconds > 0]
        peak, bandwidth = peak_rate(one.target, one.config.precision.policy), one.target.hardware.memory_bandwidth
        if blocks and peak and bandwidth:
            shown.append((name, one, blocks, peak, bandwidth))
    if not shown:
        return None
    colors = block_colors(estimates)
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    inches = 4.5 if columns == 1 else 4.0

    def draw(figure: Any) -> None:
        figure.get_layout_engine().set(h_pad=0.12)
        for index, (name, one, blocks, peak, bandwidth) in enumerate(shown, 1):
            axes = figure.add_subplot(rows, columns, index)
            policy = one.config.precision.policy
            title = f"{name}\n{_tera(peak)}FLOP/s in {policy}, {_tera(bandwidth)}B/s of memory, a device"
            axes.set_title(title, fontsize=_FONT_POINTS, color=_INK)
            size_points = (72 * (_WIDTH_INCHES / columns - 0.9), 72 * (inches - 0.9))
            _draw_roof(axes, blocks, peak, bandwidth, colors, size_points)

    return _svg(draw, (_WIDTH_INCHES, inches * rows), title="Roofline")


def _tera(rate: float) -> str:
    scaled, prefix = (rate / 1e12, "T") if rate >= 1e11 else (rate / 1e9, "G")
    return f"{scaled:,.0f} {prefix}" if scaled >= 100 else f"{scaled:.3g} {prefix}"


def _draw_roof(
    axes: Any,
    blocks: Sequence[BlockTime],
    peak: float,
    bandwidth: float,
    colors: Mapping[str, str],
    size_points: tuple[float, float],
) -> None:
    """The roof, the blocks, and their names standing in a band at the bottom where no point is."""
    points = sorted((block.intensity, block.flops / block.seconds, block.name) for block in blocks)
    ridge = peak / bandwidth
    left, right = min(points[0][0], ridge) / 4, max(points[-1][0], ridge) * 4
    rates = [rate for _, rate, _ in points]
    top, lowest = 2 * max(peak, *rates), min(rates)
    width, height = size_points
    letters = max(len(name) for _, _, name in points)
    band = min(0.6, (letters * _LETTER * _FONT_POINTS + 14) / height)
    # So low that, in decades, the band has its share of the axis and ends just under the lowest point.
    bottom = lowest / 1.5 / (top / (lowest / 1.5)) ** (band / (1 - band))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.plot([left, ridge, right], [left * bandwidth, peak, peak], color=_INK, linewidth=1.4)
    axes.axvline(ridge, color=_GRID, linewidth=0.9, linestyle="--")
    wanted = [math.log(x / left) / math.log(right / left) for x, _, _ in points]
    for place, (x, y, name) in zip(spread(wanted, 1.35 * _FONT_POINTS / width), points, strict=True):
        line = dict(arrowstyle="-", color=colors[name], linewidth=0.8, shrinkA=0, shrinkB=0)
        axes.annotate("", (x, y), (place, band), textcoords="axes fraction", arrowprops=line)
        axes.plot(x, y, "o", color=colors[name], markeredgecolor=_PAGE, markersize=7, zorder=5)
        box = dict(transform=axes.transAxes, rotation=90, ha="center", va="top", color=_INK)
        axes.text(place, band - 4 / height, name, **box)
    axes.set_xlabel("FLOPs a byte", color=_INK)
    axes.set_ylabel("FLOP/s of a device", color=_INK)
    _dress(axes)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places from 0 to 1 in the given order, at least a gap apart and near what is wanted."""
    gap = min(gap, 0.96 / max(len(wanted), 1))

    def pushed(values: Sequence[float]) -> list[float]:
        return list(itertools.accumulate(values, lambda before, value: max(value, before + gap)))

    # Pushed to the right and to the left, both are at least a gap apart: so is their mean, which stays in the middle.
    right, left = pushed(wanted), [-place for place in reversed(pushed([-want for want in reversed(wanted)]))]
    places = [(one + other) / 2 for one, other in zip(right, left, strict=True)]
    inside = pushed([max(place, 0.02) for place in places])
    return [-place for place in reversed(pushed([max(-place, -0.98) for place in reversed(inside)]))]


def cost_picture(estimates: Sequence[Estimate]) -> str | None:
    """Cost against time, on demand and spot. None where no price is known."""
    shown = []
    for name, one in zip(labels(estimates), estimates, strict=True):
        name = name if one.fits is not False else f"{name} (does not fit)"
        cost = one.cost
        points = [] if cost is None else [("o", cost.hours, cost.on_demand_usd)]
        spot = None if cost is None else cost.spot
        points += [("D", spot.hours, spot.usd)] if spot is not None and spot.is_sensible else []
        points = [
            (mark, hours, usd) for mark, hours, usd in points if usd and 0 < usd < math.inf and 0 < hours < math.inf
        ]
        if points:
            shown.append((name, points))
    if not shown:
        return None
    limits = [_decade([point[axis] for _, points in shown for point in points]) for axis in (1, 2)]

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(limits[0])
        axes.set_ylim(limits[1])
        keys = [
            _line("on demand", color=_INK, marker="o", linestyle=""),
            _line("spot, with lost work and saves", color=_INK, marker="D", markerfacecolor=_PAGE, linestyle=""),
        ]
        for (name, points), color in zip(shown, itertools.cycle(_PALETTE)):
            axes.plot([x for _, x, _ in points], [y for _, _, y in points], color=color, linewidth=0.9)
            for mark, x, y in points:
                face = color if mark == "o" else _PAGE
                axes.plot(x, y, mark, markersize=8, markerfacecolor=face, markeredgecolor=color, markeredgewidth=1.8)
            keys.append(_patch(name, color))
        axes.set_xlabel("hours to train", color=_INK)
        axes.set_ylabel("US dollars", color=_INK)
        _dress(axes, x_form=lambda value: f"{value:,.4g}", y_form=dollars)
        # Names in a column of their own: beside the points those of alike targets would lie over each other.
        figure.legend(handles=keys, loc="outside right upper", frameon=False, labelcolor=_INK)

    return _svg(draw, (_WIDTH_INCHES, max(4.0, 0.6 + 0.21 * (len(shown) + 2))), title="Cost against time")


def _decade(values: Sequence[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis: all values with room around them, and enough of a decade for ticks."""
    low, high = min(values), max(values)
    spread = max(1.0, 10 / (high / low)) ** 0.5
    return low / 1.25 / spread, high * 1.25 * spread


def _bars(
    estimates: Sequence[Estimate], draw: Any, keys: Sequence[Any], reach: float, *, title: str, names: Any = None
) -> str:
    """A figure of one horizontal bar an estimate, the first on top, with the keys in columns below."""
    longest = max(len(key.get_label()) for key in keys)
    columns = max(1, min(len(keys), int(72 * _WIDTH_INCHES / ((longest + 6) * _LETTER * _FONT_POINTS))))

    def draw_all(figure: Any) -> None:
        axes = figure.add_subplot()
        draw(axes)
        # Right of the longest bar is the room for what is written at its end.
        axes.set_xlim(0, reach * 1.34)
        axes.set_ylim(len(estimates) - 0.4, -0.6)
        axes.set_yticks(range(len(estimates)), names or labels(estimates))
        axes.xaxis.label.set_color(_INK)
        _dress(axes, is_log=False)
        axes.grid(visible=False, axis="y")
        figure.legend(handles=keys, loc="outside lower left", ncols=columns, frameon=False, labelcolor=_INK)

    height = 0.75 + 0.46 * len(estimates) + 0.2 * math.ceil(len(keys) / columns)
    return _svg(draw_all, (_WIDTH_INCHES, height), title=title)


def _end_text(axes: Any, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (7, 0), textcoords="offset points", va="center", color=_INK)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _patch(label: str, color: str, hatch: str | None = None) -> Any:
    from matplotlib.patches import Patch

    return Patch(label=label, facecolor=color, edgecolor=_PAGE, linewidth=0.6, hatch=hatch)


def _line(label: str, **look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **look)


def _dress(axes: Any, *, is_log: bool = True, x_form: Any = None, y_form: Any = None) -> None:
    """Grid, spines and ticks as plain text: matplotlib's own powers of ten are drawn, not written."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if is_log:
        for axis, form in ((axes.xaxis, x_form), (axes.yaxis, y_form)):
            low, high = axis.get_view_interval()
            short = high / low < 1e3
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if short else (1,), numticks=9))
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter(FuncFormatter(lambda value, _, form=form: (form or _short_count)(value)))
    axes.tick_params(colors=_INK, which="both", length=0)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.patch.set_alpha(0.0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("bottom", "left"))
        spine.set_color(_GRID)


def _short_count(value: float) -> str:
    """Ticks are round: 10k and not 10.0k."""
    return f"{value:.3g}" if value < 1000 else re.sub(r"\.0+(?=[kMBT]|$)", "", format_count(value))


def _svg(draw: Any, size_inches: tuple[float, float], *, title: str) -> str:
    """What `draw` puts on a figure, as an `<svg>` element that shares its page with others."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    prefix = re.sub(r"\W+", "-", title.lower())
    # Text stays text, and what a user named with dollar signs is no formula.
    rc: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": prefix,
        "font.size": _FONT_POINTS,
        "text.parse_math": False,
    }
    with matplotlib.rc_context({**rc, "hatch.linewidth": 0.8}):
        figure = Figure(figsize=size_inches, layout="constrained")
        figure.patch.set_alpha(0.0)
        FigureCanvasSVG(figure)
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    head, body = svg[svg.index("<svg") :].split(">", 1)
    view_box = re.search(r'viewBox="[^"]*"', head)
    assert view_box is not None, "matplotlib writes a viewBox"
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(?:xlink:)?href="#', f'href="#{prefix}-', body).replace("url(#", f"url(#{prefix}-")
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)
    for color, variable in _VARIABLES.items():
        body = body.replace(color, variable)
    return f'<svg {view_box.group()} role="img" aria-label="{escape(title)}">{body.strip()}'
