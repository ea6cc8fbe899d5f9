"""Curves as inline SVG whose colours come from the page, so that one picture serves light and dark themes.

The picture is written here: matplotlib takes 0.7 s to import and to draw what is drawn in 20 ms here at the end of each
run, and its SVG is twice as large.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.metrics.format import format_count
from jaxtrain.metrics.report.html import rounded, text

# In pixels of a phone: wider pages show the picture larger, with its text.
_WIDTH, _HEIGHT, _BOTTOM, _RIGHT, _LETTER = 440, 260, 226, 428, 6.4
_MOST_POINTS = 200
_NUM_TITLES = 40
# Fewer points are seen as they are.
_FEWEST_TO_SMOOTH = 24
# Told apart without colours, too: by eye on paper, or by those who see no colours.
_DASHES = ("", "6 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2", "1 4", "8 2 2 2 2 2")
# Names on the picture have a rim of the page's colour, because curves pass behind them.
_ON_CURVES = "fill:var(--ink);stroke:var(--page);stroke-width:3.5;paint-order:stroke;stroke-linejoin:round"
# Values are on a logarithmic axis where they span more than this ratio, and only whose range is possible for a float32.
_LOG_RATIO, _LARGEST = 50, 1e38

Line = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Plot:
    """One picture: named curves over steps.

    `lines` are name -> (steps, values), ordered by step, NaN where a line is interrupted; over those in `smooth` a mean
    of neighbouring values is drawn. `reference` is the name and value of a dashed line, `best` the (step, value) that
    is marked; at `resumed` steps are short ticks. `looks` is name -> number of its colour and dash, where runs are
    compared: without the faint lines.
    """

    title: str
    unit: str
    lines: Mapping[str, Line]
    smooth: Sequence[str] = ()
    may_be_log: bool = False
    from_zero: bool = False
    reference: tuple[str, float] | None = None
    best: tuple[float, float] | None = None
    resumed: Sequence[int] = ()
    looks: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Curve:
    """A line of at most 200 points: means, smallest and largest values of equal bins of rows; NaN of bins without."""

    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray


def figure(plot: Plot) -> str:
    """Draw a plot with its caption; nothing where no line has a finite value."""
    lines = {name: thin(*line) for name, line in plot.lines.items() if np.isfinite(line[1]).any()}
    if not lines:
        return ""
    return f"<figure><figcaption>{text(plot.title)}</figcaption>{_svg(plot, lines)}</figure>"


def thin(steps: np.ndarray, values: np.ndarray) -> Curve:
    """Thin a series.

    Args:
        steps, values: float64 [N], N > 0; NaN where there is no value.
    """
    values = np.where(np.abs(values) < _LARGEST, values, np.nan)
    bins = np.arange(min(len(values), _MOST_POINTS)) * len(values) // min(len(values), _MOST_POINTS)
    known = np.isfinite(values)
    counts, sizes = np.add.reduceat(known, bins, dtype=int), np.diff(bins, append=len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.add.reduceat(np.where(known, values, 0.0), bins) / counts
    low, high = np.fmin.reduceat(values, bins), np.fmax.reduceat(values, bins)
    return Curve(np.add.reduceat(steps, bins) / sizes, means, low, high)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Average each value with its neighbours: a centred window of a fifteenth of the values, narrower at both ends.

    A centred window does not lag behind a falling loss, as an exponential average does. NaN stays NaN.
    """
    count, found = len(values), values.copy()
    for place in np.flatnonzero(np.isfinite(values)):
        half = min(max(3, count // 30), place, count - 1 - place)
        found[place] = np.nanmean(values[place - half : place + half + 1])
    return found


def nice_ticks(low: float, high: float, *, is_log: bool = False, is_whole: bool = False) -> list[float]:
    """Round numbers within a range: 1, 2 or 5 times a power of ten, five or six of them."""
    if is_log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        factors = (1, 2, 5) if last - first <= 2 else (1,)
        powers = range(first, last + 1, max(1, (last - first) // 6))
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        return [tick for tick in ticks if low <= tick <= high]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    spacing = max(1.0, spacing) if is_whole else spacing
    first, last = math.ceil(low / spacing - 1e-9), math.floor(high / spacing + 1e-9)
    return [index * spacing for index in range(first, last + 1)]


@dataclass(frozen=True)
class _Frame:
    """Where values are on the picture: its left and top edge in pixels, and the ranges of its axes."""

    left: float
    top: float
    steps: tuple[float, float]
    values: tuple[float, float]
    is_log: bool

    def x(self, steps: np.ndarray | float) -> np.ndarray:
        low, high = self.steps
        return self.left + (np.asarray(steps, float) - low) / (high - low) * (_RIGHT - self.left)

    def y(self, values: np.ndarray | float) -> np.ndarray:
        scale: Callable = np.log if self.is_log else np.asarray
        low, high = (scale(edge) for edge in self.values)
        shares = (scale(np.maximum(values, self.values[0]) if self.is_log else values) - low) / (high - low)
        return _BOTTOM - np.clip(shares, -0.02, 1.02) * (_BOTTOM - self.top)


def _svg(plot: Plot, curves: Mapping[str, Curve]) -> str:
    legend, top = _legend(plot, curves)
    first = min(curve.steps[0] for curve in curves.values())
    last = max(line[0][-1] for line in plot.lines.values())
    first = 0.0 if first <= max(0.5 * last, 1.0) else first
    steps = (first, last) if last > first else (first - 0.5, first + 0.5)
    low, high, is_log = _vertical(plot, curves)
    ticks = nice_ticks(low, high, is_log=is_log)
    largest = max(map(abs, ticks), default=0.0)
    labels = [_count(tick) if largest >= 10_000 else f"{tick:.6g}" for tick in ticks]
    frame = _Frame(12 + _LETTER * max(map(len, labels), default=1), top, steps, (low, high), is_log)
    grid = "".join(
        f'<path d="M{frame.left:.1f} {y:.1f}H{_RIGHT}" style="stroke:var(--line)"/>'
        f'<text x="{frame.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end" class="soft">{label}</text>'
        for y, label in zip(frame.y(np.array(ticks)), labels, strict=True)
    ) + "".join(
        f'<text x="{min(x, _RIGHT):.1f}" y="{_BOTTOM + 16}" text-anchor="{"end" if x > _RIGHT - 14 else "middle"}" '
        f'class="soft">{_count(tick) if steps[1] >= 10_000 else f"{tick:.0f}"}</text>'
        for tick in nice_ticks(*steps, is_whole=True)
        for x in (float(frame.x(tick)),)
    )
    grid += f'<text x="{_WIDTH / 2}" y="{_BOTTOM + 31}" text-anchor="middle" class="soft">step</text>' + "".join(
        f'<path d="M{frame.x(step):.1f} {_BOTTOM}v-9" style="stroke:var(--soft);stroke-width:1.6"/>'
        for step in plot.resumed
        if steps[0] < step < steps[1]
    )
    lines = "".join(_line(plot, frame, name, place, curve) for place, (name, curve) in enumerate(curves.items()))
    parts = (grid, lines, _marks(plot, frame), legend, _titles(frame, curves))
    label = f"{text(plot.title)} over steps"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _count(tick: float) -> str:
    """A large tick as people read it: 15k and not 15.0k, because ticks are round numbers."""
    return re.sub(r"\.0+(?=[kMBT])|(?<=\.\d)0(?=[kMBT])", "", format_count(tick)) if abs(tick) < 1e15 else f"{tick:.2g}"


def _vertical(plot: Plot, curves: Mapping[str, Curve]) -> tuple[float, float, bool]:
    """The range of the vertical axis, and whether it is logarithmic."""
    low = min(float(np.nanmin(curve.low)) for curve in curves.values())
    high = max(float(np.nanmax(curve.high)) for curve in curves.values())
    if plot.reference is not None and plot.reference[1] <= 1.6 * high:
        low, high = min(low, plot.reference[1]), max(high, plot.reference[1])
    if plot.may_be_log and low > 0 and high > _LOG_RATIO * low:
        return low / 1.15, high * 1.15, True
    is_from_zero = low >= 0 and (plot.from_zero or low < 0.5 * high)
    low = 0.0 if is_from_zero else low
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-12):
        low, high = low - 0.1 * abs(low) - (low == 0), high + 0.1 * abs(high) + (high == 0)
    room = 0.04 * (high - low)
    return low if is_from_zero else low - room, high + room, False


def _legend(plot: Plot, curves: Mapping[str, Curve]) -> tuple[str, float]:
    """The unit and the names of the curves above the picture, in as many lines as they take; and its height."""
    parts = [f'<text x="2" y="13" class="soft">{text(plot.unit)}</text>']
    x, y = _LETTER * len(plot.unit) + 20, 13
    for place, name in enumerate(curves if len(curves) > 1 or plot.looks else ()):
        shown = name if len(name) <= 48 else f"{name[:24]}…{name[-23:]}"
        size = 28 + _LETTER * len(shown)
        if x + size > _WIDTH:
            x, y = 2.0, y + 17
        parts.append(
            f'<path d="M{x:.0f} {y - 4}h18" style="fill:none;stroke-width:2.4;{_stroke(plot, name, place)}"/>'
            f'<text x="{x + 22:.0f}" y="{y}" style="fill:var(--ink)">{text(shown)}</text>'
        )
        x += size
    return "".join(parts), y + 13


def _stroke(plot: Plot, name: str, place: int, *, is_dashed: bool = True) -> str:
    number = place if plot.looks is None else plot.looks[name]
    dash = _DASHES[number % len(_DASHES)] if plot.looks is not None and is_dashed else ""
    return f"stroke:var(--series-{number % len(_DASHES) + 1})" + (f";stroke-dasharray:{dash}" if dash else "")


def _line(plot: Plot, frame: _Frame, name: str, place: int, curve: Curve) -> str:
    """A curve with its dots; of one run, what a smoothed or thinned one was made of is drawn faintly behind it."""
    is_smooth = name in plot.smooth and len(curve.steps) >= _FEWEST_TO_SMOOTH
    x, y, stroke = frame.x(curve.steps), frame.y(curve.values), _stroke(plot, name, place)
    lines = [(x, smoothed(curve.values) if is_smooth else curve.values, "stroke-width:2")]
    if plot.looks is None and (is_smooth or np.nanmax(curve.high - curve.low) > 0):
        # From the smallest to the largest value of each bin and back.
        ends = np.stack([curve.low, curve.high], axis=1).ravel()
        lines.insert(0, (np.repeat(x, 2), ends, "stroke-width:1;opacity:.4"))
    drawn = ""
    for at, values, style in lines:
        line = "".join(_path(at[piece], frame.y(values[piece])) for piece in _pieces(values))
        drawn += f'<path d="{line}" style="fill:none;stroke-linejoin:round;{style};{stroke}"/>'
    few = len(curve.steps) <= 12
    # Few points would be hard to see as a bare line, and one point between gaps would not be drawn at all.
    alone = [piece for piece in _pieces(curve.values) if few or piece.stop - piece.start == 1]
    dots = "".join(f"M{x[at]:.1f} {y[at]:.1f}h0" for piece in alone for at in range(piece.start, piece.stop))
    style = f"stroke-width:{6 if few else 3};stroke-linecap:round;{_stroke(plot, name, place, is_dashed=False)}"
    return drawn + (f'<path d="{dots}" style="{style}"/>' if dots else "")


def _pieces(values: np.ndarray) -> list[slice]:
    """The parts of a curve between its gaps, which no line crosses."""
    known = np.concatenate([[False], np.isfinite(values), [False]])
    edges = np.flatnonzero(known[1:] != known[:-1])
    return [slice(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def _path(x: np.ndarray, y: np.ndarray) -> str:
    """A line through points, each relative to the one before, in tenths of a pixel."""
    points = np.rint(10 * np.stack([x, y], axis=1)) / 10
    moves = "".join(f"l{dx:.4g} {dy:.4g}" for dx, dy in np.diff(points, axis=0).round(1))
    return f"M{points[0, 0]:g} {points[0, 1]:g}{moves}"


def _marks(plot: Plot, frame: _Frame) -> str:
    """The dashed reference with its name, and a ring around the best value."""
    parts = []
    if plot.reference is not None:
        name, value = plot.reference
        y = float(frame.y(value))
        if value > frame.values[1]:
            name, y = f"{name} (above the picture)", frame.top - 4
        else:
            style = "stroke:var(--ink);stroke-dasharray:5 4;opacity:.75"
            parts.append(f'<path d="M{frame.left:.1f} {y:.1f}H{_RIGHT}" style="{style}"/>')
        below = y + 14 if y < _BOTTOM - 18 else y - 6
        parts.append(
            f'<text x="{_RIGHT - 2}" y="{below:.1f}" text-anchor="end" style="{_ON_CURVES}">'
            f"{text(name)}: {rounded(value)}</text>"
        )
    if plot.best is not None:
        x, y = float(frame.x(plot.best[0])), float(frame.y(plot.best[1]))
        anchor, at = ("end", x - 8) if x > _WIDTH / 2 else ("start", x + 8)
        above = y - 9 if y > frame.top + 30 else y + 20
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" style="fill:none;stroke:var(--ink);stroke-width:1.6"/>'
            f'<text x="{at:.1f}" y="{above:.1f}" text-anchor="{anchor}" style="{_ON_CURVES};font-weight:600">'
            f"best {rounded(plot.best[1])}</text>"
        )
    return "".join(parts)


def _titles(frame: _Frame, curves: Mapping[str, Curve]) -> str:
    """Invisible strips whose titles give the values where the pointer is."""
    longest = max(curves.values(), key=lambda curve: len(curve.steps)).steps
    chosen = longest[np.unique(np.linspace(0, len(longest) - 1, min(_NUM_TITLES, len(longest))).astype(int))]
    near, wide = max(0.5, np.ptp(chosen) / (2 * len(chosen))), (_RIGHT - frame.left) / len(chosen)
    strips = []
    for x, step in zip(frame.x(chosen), chosen, strict=True):
        nearest = [(name, curve, int(np.abs(curve.steps - step).argmin())) for name, curve in curves.items()]
        said = [f"{name} {curve.values[at]:.4g}" for name, curve, at in nearest if abs(curve.steps[at] - step) <= near]
        strips.append(
            f'<rect x="{x - wide / 2:.0f}" y="{frame.top:.0f}" width="{wide:.0f}" height="{_BOTTOM - frame.top:.0f}">'
            f"<title>{text(f'step {step:,.0f}: ' + ', '.join(said))}</title></rect>"
        )
    return f'<g class="hits">{"".join(strips)}</g>'
