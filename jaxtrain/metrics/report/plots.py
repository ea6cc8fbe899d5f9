"""Curves as inline SVG whose colours come from the page, so that one picture serves light and dark themes.

The picture is written here and not by a plotting library: a point costs about five bytes, so that a page of many
curves stays small, and the values go with it for whoever points at a curve.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.metrics.report.axes import Scale, make_scale
from jaxtrain.metrics.report.curves import Curve
from jaxtrain.metrics.report.html import rounded, text

# In pixels of a phone: wider pages show the picture larger, with its text.
_WIDTH, _HEIGHT = 440, 260
_BOTTOM, _RIGHT = 34, 12
_LETTER = 6.4
_MOST_LETTERS = 48
_NUM_COLORS = 8
# Told apart without colours, too: by eye on paper, or by those who see no colours.
DASHES = ("", "6 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2", "1 4", "8 2 2 2 2 2")
_NUM_TITLES = 16
# Names on the picture have a rim of the page's colour, because curves pass behind them.
_ON_CURVES = "fill:var(--ink);stroke:var(--page);stroke-width:3.5;paint-order:stroke;stroke-linejoin:round"


@dataclass(frozen=True)
class Reference:
    """A value that curves are compared with, drawn as a dashed line with its name.

    Attributes:
        name: of the value.
        value: on the vertical axis.
    """

    name: str
    value: float


@dataclass(frozen=True)
class Plot:
    """One picture: named curves over steps.

    Attributes:
        title: caption of the picture.
        y_label: name and unit of the vertical axis.
        curves: (name, curve) in the order of the legend.
        may_be_log: whether the vertical axis is logarithmic where the values span a large range.
        from_zero: whether the vertical axis begins at zero, so that the jitter of a steady rate looks small.
        smoothed: name of a curve -> the same smoothed, which is drawn over it.
        references: dashed lines.
        best: (step, value) that is marked as the best; None: no mark.
        resumed: steps after which the run was resumed, drawn as short ticks.
        with_dashes: whether curves differ in their dashes besides their colours.
        looks: number of the colour and dash of each curve, from 0; None: in order.
    """

    title: str
    y_label: str
    curves: Sequence[tuple[str, Curve]]
    may_be_log: bool = False
    from_zero: bool = False
    smoothed: Sequence[tuple[str, Curve]] = ()
    references: Sequence[Reference] = ()
    best: tuple[float, float] | None = None
    resumed: Sequence[int] = ()
    with_dashes: bool = False
    looks: Sequence[int] | None = None


def draw_svg(plot: Plot, *, prefix: str) -> str:
    """Draw a plot as an `<svg>` element for an HTML page.

    Args:
        plot: the plot; every curve holds at least one point.
        prefix: begins every id, because the ids of several pictures on a page must differ.
    """
    legend, top = _legend(plot)
    steps = np.concatenate([curve.steps for _, curve in plot.curves])
    first, last = float(steps.min()), max(_last_step(curve) for _, curve in plot.curves)
    x = make_scale(0.0 if first <= max(0.5 * last, 1.0) else first, last, is_whole=True)
    y = _vertical(plot)
    left = 12 + max(_LETTER * len(label) for _, label in y.ticks)
    box = (left, float(top), float(_WIDTH - _RIGHT), float(_HEIGHT - _BOTTOM))
    frame = _Frame(box, x, y)
    clip = (
        f'<clipPath id="{prefix}-box"><rect x="{box[0] - 4:.1f}" y="{box[1] - 4:.1f}" '
        f'width="{box[2] - box[0] + 8:.1f}" height="{box[3] - box[1] + 8:.1f}"/></clipPath>'
    )
    lines = f'{clip}<g clip-path="url(#{prefix}-box)">{_lines(plot, frame)}</g>'
    parts = [_grid(plot, frame), lines, _marks(plot, frame), legend, _titles(plot, frame)]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(plot.title)} over steps" '
        f"data-plot='{_values(plot, frame)}'>{''.join(parts)}</svg>"
    )


def _last_step(curve: Curve) -> float:
    """The last step of a curve; that of a thinned one is half a bin behind its last point."""
    last = float(curve.steps[-1])
    return math.floor(last + float(last - curve.steps[-2]) / 2) if curve.is_thinned else last


@dataclass(frozen=True)
class _Frame:
    """Where values are on the picture: left, top, right and bottom in pixels, and the two scales."""

    box: tuple[float, float, float, float]
    x_scale: Scale
    y_scale: Scale

    def x(self, steps: np.ndarray) -> np.ndarray:
        return self.box[0] + self.x_scale.share(steps) * (self.box[2] - self.box[0])

    def y(self, values: np.ndarray) -> np.ndarray:
        return self.box[3] - self.y_scale.share(values) * (self.box[3] - self.box[1])


def _vertical(plot: Plot) -> Scale:
    low = min(float(curve.low.min()) for _, curve in plot.curves)
    high = max(float(curve.high.max()) for _, curve in plot.curves)
    for reference in plot.references:
        if _is_near(reference.value, high):
            low, high = min(low, reference.value), max(high, reference.value)
    is_steady = low >= 0 and (plot.from_zero or low < 0.5 * high)
    return make_scale(low, high, may_be_log=plot.may_be_log, from_zero=is_steady)


def _is_near(value: float, high: float) -> bool:
    """Whether a reference is drawn to scale: one far above would press the curves against the axis."""
    return value <= 1.6 * high


def _numbered(plot: Plot) -> list[tuple[int, str, Curve]]:
    """Each curve with the number of its look."""
    looks = range(len(plot.curves)) if plot.looks is None else plot.looks
    return [(number, name, curve) for number, (name, curve) in zip(looks, plot.curves, strict=True)]


def _color(number: int) -> str:
    return f"var(--series-{number % _NUM_COLORS + 1})"


def _dash(plot: Plot, number: int) -> str:
    pattern = DASHES[number % len(DASHES)] if plot.with_dashes else ""
    return f";stroke-dasharray:{pattern}" if pattern else ""


def _legend(plot: Plot) -> tuple[str, int]:
    """The unit and the names of the curves above the picture, in as many lines as they take; and its height."""
    parts = [f'<text x="2" y="13" style="fill:var(--soft)">{text(plot.y_label)}</text>']
    # One curve needs no name, unless its look tells which run it is of.
    is_named = len(plot.curves) > 1 or plot.looks is not None
    items = [(_shortened(name), number) for number, name, _ in _numbered(plot)] if is_named else []
    sizes = [28 + _LETTER * len(name) for name, _ in items]
    x, line = _LETTER * len(plot.y_label) + 20, 0
    if sum(sizes) > _WIDTH - x:
        x, line = 2.0, 1
    for (name, number), size in zip(items, sizes, strict=True):
        if x + size > _WIDTH and x > 2:
            x, line = 2.0, line + 1
        y = 13 + 17 * line
        parts.append(
            f'<path d="M{x:.0f} {y - 4}h18" style="fill:none;stroke:{_color(number)};stroke-width:2.4'
            f'{_dash(plot, number)}"/><text x="{x + 22:.0f}" y="{y}" style="fill:var(--ink)">{text(name)}</text>'
        )
        x += size
    return "".join(parts), 26 + 17 * line


def _shortened(name: str) -> str:
    """A name that fits on one line of the picture: its middle gives way."""
    return name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS // 2]}…{name[-_MOST_LETTERS // 2 + 1 :]}"


def _grid(plot: Plot, frame: _Frame) -> str:
    left, _, right, bottom = frame.box
    parts = []
    for value, label in frame.y_scale.ticks:
        y = float(frame.y(np.array(value)))
        parts.append(
            f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" style="stroke:var(--line)"/>'
            f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end" style="fill:var(--soft)">{label}</text>'
        )
    for value, label in frame.x_scale.ticks:
        x = float(frame.x(np.array(value)))
        anchor = "end" if x > right - 14 else "middle"
        parts.append(
            f'<text x="{min(x, right + 8):.1f}" y="{bottom + 16:.0f}" text-anchor="{anchor}" '
            f'style="fill:var(--soft)">{label}</text>'
        )
    middle = (left + right) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{bottom + 31:.0f}" text-anchor="middle" style="fill:var(--soft)">step</text>'
    )
    for step in plot.resumed:
        if frame.x_scale.low < step < frame.x_scale.high:
            x = float(frame.x(np.array(step)))
            parts.append(f'<path d="M{x:.1f} {bottom:.0f}v-9" style="stroke:var(--soft);stroke-width:1.6"/>')
    return f"<g>{''.join(parts)}</g>"


def _lines(plot: Plot, frame: _Frame) -> str:
    over = dict(plot.smoothed)
    parts = []
    for number, name, curve in _numbered(plot):
        color = _color(number)
        if curve.is_thinned:
            edges = (np.split(_points(frame, curve.steps, edge), curve.starts) for edge in (curve.high, curve.low))
            outlines = [np.concatenate([upper, lower[::-1]]) for upper, lower in zip(*edges, strict=True)]
            band = "".join(f"{_path(outline)}Z" for outline in outlines)
            parts.append(f'<path d="{band}" style="fill:{color};opacity:.22"/>')
        is_faint = name in over
        if not (is_faint and curve.is_thinned):
            style = f"fill:none;stroke:{color};stroke-width:{1 if is_faint else 1.9};stroke-linejoin:round"
            style += ";opacity:.45" if is_faint else _dash(plot, number)
            parts.append(f'<path d="{"".join(map(_path, _pieces(frame, curve)))}" style="{style}"/>')
        if is_faint:
            points = "".join(map(_path, _pieces(frame, over[name])))
            style = f"fill:none;stroke:{color};stroke-width:2.1;stroke-linejoin:round{_dash(plot, number)}"
            parts.append(f'<path d="{points}" style="{style}"/>')
        # Few points would be hard to see as a bare line, and one point between gaps would not be drawn at all.
        is_few = len(curve.steps) <= 12
        lone = [piece for piece in _pieces(frame, curve) if is_few or len(piece) == 1]
        if lone:
            dots = "".join(f"M{_tenths(x)} {_tenths(y)}h0" for x, y in np.concatenate(lone))
            width = 6 if is_few else 3
            parts.append(f'<path d="{dots}" style="stroke:{color};stroke-width:{width};stroke-linecap:round"/>')
    return "".join(parts)


def _pieces(frame: _Frame, curve: Curve) -> list[np.ndarray]:
    """The points of a curve between its gaps, which no line crosses."""
    return np.split(_points(frame, curve.steps, curve.values), curve.starts)


def _marks(plot: Plot, frame: _Frame) -> str:
    """Dashed references with their names, and a ring around the best value."""
    left, top, right, bottom = frame.box
    high = max(float(curve.high.max()) for _, curve in plot.curves)
    parts = []
    for reference in plot.references:
        name = f"{reference.name}: {rounded(reference.value)}"
        if _is_near(reference.value, high):
            y = float(frame.y(np.array(reference.value)))
            style = "stroke:var(--ink);stroke-dasharray:5 4;opacity:.75"
            parts.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" style="{style}"/>')
            # Below its line, unless the axis is there: above it, where curves begin near a guess, there may be no room.
            y += 14 if y < bottom - 18 else -6
        else:
            y, name = top + 10, f"{name} (above the picture)"
        parts.append(
            f'<text x="{right - 2:.0f}" y="{y:.1f}" text-anchor="end" style="{_ON_CURVES}">{text(name)}</text>'
        )
    if plot.best is not None:
        x, y = (float(value) for value in (frame.x(np.array(plot.best[0])), frame.y(np.array(plot.best[1]))))
        anchor, at = ("end", x - 8) if x > (left + right) / 2 else ("start", x + 8)
        above = y - 9 if y > top + 30 else y + 20
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" style="fill:none;stroke:var(--ink);stroke-width:1.6"/>'
            f'<text x="{at:.1f}" y="{above:.1f}" text-anchor="{anchor}" style="{_ON_CURVES};font-weight:600">'
            f"best {rounded(plot.best[1])}</text>"
        )
    return "".join(parts)


def _points(frame: _Frame, steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The points on the picture in tenths of a pixel, int64 [N, 2]."""
    return np.rint(10 * np.stack([frame.x(steps), frame.y(values)], axis=1)).astype(np.int64)


def _path(points: np.ndarray) -> str:
    """A line through points, each relative to the one before: five bytes a point instead of ten."""
    if not len(points):
        return ""
    moves = [f"{_tenths(x)}{_after(y)}" for x, y in np.diff(points, axis=0)]
    return f"M{_tenths(points[0, 0])}{_after(points[0, 1])}" + "".join(f"l{move}" for move in moves)


def _after(tenths: int) -> str:
    """A number behind another one: a minus sign separates them as well as a space."""
    return _tenths(tenths) if tenths < 0 else f" {_tenths(tenths)}"


def _tenths(tenths: int) -> str:
    whole, rest = divmod(abs(int(tenths)), 10)
    digits = f"{whole or ''}.{rest}" if rest else str(whole)
    return f"-{digits}" if tenths < 0 else digits


def _values(plot: Plot, frame: _Frame) -> str:
    """What the script needs to show values: the frame, the scales and the points, as JSON."""
    curves = []
    for number, name, curve in _numbered(plot):
        one = {"n": name, "c": number % _NUM_COLORS + 1, "s": _steps(curve.steps), "v": _digits(curve.values)}
        if curve.is_thinned:
            one |= {"l": _digits(curve.low, 3), "h": _digits(curve.high, 3)}
        curves.append(one)
    # A value of another curve is shown with its step while it is nearer than half the distance of that curve's points.
    near = max(float(curve.steps[-1] - curve.steps[0]) / max(1, 2 * (len(curve.steps) - 1)) for _, curve in plot.curves)
    content = {
        "box": [round(pixel, 1) for pixel in frame.box],
        "x": [frame.x_scale.low, frame.x_scale.high],
        "y": [frame.y_scale.low, frame.y_scale.high],
        "log": frame.y_scale.is_log,
        "near": near,
        "curves": curves,
    }
    packed = json.dumps(content, separators=(",", ":"), allow_nan=False)
    # The attribute has single quotes, since JSON is full of double ones.
    return packed.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;")


def _steps(steps: np.ndarray) -> list[float | int] | dict[str, float | int]:
    """The steps of a curve; where they are evenly spaced, the first, their distance and their count."""
    even = np.linspace(steps[0], steps[-1], len(steps))
    if len(steps) > 3 and np.abs(steps - even).max() < 0.5:
        return {"a": round(float(steps[0]), 2), "d": float((steps[-1] - steps[0]) / (len(steps) - 1)), "n": len(steps)}
    return _digits(steps, 7)


def _digits(values: np.ndarray, digits: int = 4) -> list[float | int]:
    shown = (float(f"{value:.{digits}g}") for value in values)
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in shown]


def _titles(plot: Plot, frame: _Frame) -> str:
    """Invisible strips whose titles give the values, for readers whose browser runs no script."""
    longest = max((curve for _, curve in plot.curves), key=lambda curve: len(curve.steps))
    count = min(_NUM_TITLES, len(longest.steps))
    chosen = np.unique(np.linspace(0, len(longest.steps) - 1, count).round().astype(int))
    left, top, right, bottom = frame.box
    centers = frame.x(longest.steps[chosen])
    edges = np.concatenate([[left], (centers[1:] + centers[:-1]) / 2, [right]])
    strips = []
    for start, end, index in zip(edges, edges[1:], chosen, strict=False):
        step = longest.steps[index]
        said = []
        for name, curve in plot.curves:
            nearest = int(np.abs(curve.steps - step).argmin())
            spacing = 0.5 if len(longest.steps) < 2 else (longest.steps[-1] - longest.steps[0]) / len(longest.steps)
            if abs(curve.steps[nearest] - step) <= max(spacing, 0.5):
                said.append(f"{name} {rounded(float(curve.values[nearest]))}")
        title = text(f"step {math.floor(step + 0.5):,}: {', '.join(said)}")
        strips.append(
            f'<rect x="{start:.0f}" y="{top:.0f}" width="{max(end - start, 1):.0f}" '
            f'height="{bottom - top:.0f}"><title>{title}</title></rect>'
        )
    return f'<g class="hits" style="fill:transparent">{"".join(strips)}</g>'
