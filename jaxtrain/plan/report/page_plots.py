"""The plots of a plan's page as inline SVG: blocks under the roofline, and cost against time.

All points are predicted at assumed rates, and so they are hollow; ranges are dashed. Text takes its colours from the
page, so that one picture serves light and dark. No jax here.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtrain.metrics.format import format_count
from jaxtrain.plan.report.amounts import dollars, hours
from jaxtrain.plan.report.page_bars import is_timed
from jaxtrain.plan.report.page_html import PALETTE, block_colors, legend, rate_text, seconds_text, swatch, text
from jaxtrain.plan.report.rows import labels
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.time.record import BlockTime
from jaxtrain.plan.time.step import peak_rate

# In units of the picture. It is shown in 0.75 to 1.2 times this size, so that its text is readable on a phone too.
_WIDTH, _HEIGHT = 480.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 14.0, 12.0, 46.0
# Between the numbers under the points of a roofline, as a share of the width.
_GAP = 0.045
# Rooflines beyond this many are folded.
_OPEN = 2


@dataclass(frozen=True)
class _Frame:
    """A plot with two logarithmic axes: their limits in the plot's units."""

    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, value: float) -> float:
        """The place of a value on the horizontal axis, in units of the picture."""
        return _LEFT + _share(value, self.x) * (_WIDTH - _LEFT - _RIGHT)

    def up(self, value: float) -> float:
        """The place of a value on the vertical axis, in units of the picture."""
        return _HEIGHT - _BOTTOM - _share(value, self.y) * (_HEIGHT - _TOP - _BOTTOM)


def _share(value: float, limits: tuple[float, float]) -> float:
    return math.log(value / limits[0]) / math.log(limits[1] / limits[0])


def roofline_pictures(estimates: Sequence[Estimate]) -> str | None:
    """A roof for each estimate that may fit, with its blocks as numbered points; None where there is none to place."""
    shades, found = block_colors(estimates), []
    for name, one in zip(labels(estimates), estimates, strict=True):
        blocks = [b for b in one.time.blocks if b.intensity > 0 and b.seconds > 0] if one.time else []
        peak, bandwidth = peak_rate(one.target, one.config.precision.policy), one.target.hardware.memory_bandwidth
        if not blocks or not peak or not bandwidth or one.fits is False:
            continue
        ordered = sorted(blocks, key=lambda block: block.intensity)
        policy = one.config.precision.policy
        roof = f"{rate_text(peak, 'FLOP/s')} in {policy} and {rate_text(bandwidth, 'B/s')} of memory per device"
        keys = []
        for number, block in enumerate(ordered, 1):
            rate = rate_text(block.flops / block.seconds, "FLOP/s")
            said = f"{block.name}: {_intensity(block.intensity)} FLOPs per byte, {rate}, {seconds_text(block.seconds)}"
            keys.append((f'<i class="number" style="--c:{shades[block.name]}">{number}</i>', said))
        picture = _roof(ordered, peak, bandwidth, shades)
        found.append(f"<div><p><b>{text(name)}</b>: {text(roof)}</p><figure>{picture}</figure>{legend(keys)}</div>")
    if not found:
        return None
    first = f'<div class="plots">{"".join(found[:_OPEN])}</div>'
    rest = f'<div class="plots">{"".join(found[_OPEN:])}</div>'
    return first + (f"<details><summary>{len(found) - _OPEN} more</summary>{rest}</details>" if found[_OPEN:] else "")


def _roof(blocks: Sequence[BlockTime], peak: float, bandwidth: float, shades: dict[str, str]) -> str:
    rates = [block.flops / block.seconds for block in blocks]
    ridge = peak / bandwidth
    low, high = min(blocks[0].intensity, ridge) / 3, max(blocks[-1].intensity, ridge) * 3
    top = 2 * max(peak, *rates)
    bottom = min(*rates, low * bandwidth) / 4
    frame = _Frame((low, high), (bottom, top))
    drawn = [_axes(frame, "FLOPs per byte moved to and from memory", "FLOP/s of one device", _count, _rate)]
    corners = ((low, low * bandwidth), (ridge, peak), (high, peak))
    points = " ".join(f"{frame.across(x):.1f},{frame.up(y):.1f}" for x, y in corners)
    said = f"<title>at most: {rate_text(peak, 'FLOP/s')}, and {rate_text(bandwidth, 'B/s')} from memory</title>"
    drawn.append(f'<polyline class="roof" points="{points}">{said}</polyline>')
    x = frame.across(ridge)
    drawn.append(f'<line class="ridge" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    width = _WIDTH - _LEFT - _RIGHT
    places = spread([_share(block.intensity, frame.x) for block in blocks], _GAP)
    foot = _HEIGHT - _BOTTOM - 8
    for number, (block, rate, place) in enumerate(zip(blocks, rates, places, strict=True), 1):
        x, y, below = frame.across(block.intensity), frame.up(rate), _LEFT + place * width
        color = shades[block.name]
        drawn.append(f'<path class="leader" stroke="{color}" d="M{below:.1f} {foot - 11}L{x:.1f} {y:.1f}"/>')
        said = (
            f"{block.name}: {_intensity(block.intensity)} FLOPs per byte, {rate_text(rate, 'FLOP/s')} at the assumed "
            f"efficiency, {seconds_text(block.seconds)} per step"
        )
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="5"'
        drawn.append(f'<circle class="point" stroke="{color}" {place}><title>{text(said)}</title></circle>')
        drawn.append(f'<text x="{below:.1f}" y="{foot}" text-anchor="middle">{number}</text>')
    return _svg("Blocks of a step under the roofline", drawn)


def _intensity(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


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


@dataclass(frozen=True)
class _Price:
    """One point of the cost plot: what a run costs, and how long it takes."""

    kind: str
    hours: float
    usd: float
    # Shortest and longest time as shares of the likely one; None where the estimate gives no range of it.
    span: tuple[float, float] | None


def cost_picture(estimates: Sequence[Estimate]) -> str | None:
    """Cost against time, on demand and spot, of what may fit; None where no price is known."""
    shown = []
    for name, one in zip(labels(estimates), estimates, strict=True):
        prices = [price for price in _prices(one) if 0 < price.usd < math.inf and 0 < price.hours < math.inf]
        if prices:
            shown.append((name, prices))
    if not shown:
        return None
    ends = [price.span or (1.0, 1.0) for _, prices in shown for price in prices]
    every = [price for _, prices in shown for price in prices]
    factors = [(price, factor) for price, span in zip(every, ends, strict=True) for factor in span]
    longest = max(price.hours for price in every)
    # No tick of a short run is 0.0002 hours.
    unit, per_hour = ("seconds", 3600) if longest < 1 / 30 else ("minutes", 60) if longest < 2 else ("hours", 1)
    frame = _Frame(
        _limits([per_hour * price.hours * factor for price, factor in factors]),
        _limits([price.usd * factor for price, factor in factors]),
    )
    drawn = [_axes(frame, f"{unit} to train", "US dollars", lambda value: f"{value:,.4g}", _usd)]
    keys = []
    for (name, prices), color in zip(shown, itertools.cycle(PALETTE)):
        said = []
        for price in prices:
            drawn.append(_price(frame, per_hour, price, name, color))
            said.append(f"{price.kind} {dollars(price.usd)} in {hours(price.hours)}{_ends(price)}")
        keys.append((swatch(color), f"{name}: {'; '.join(said)}"))
    kinds = {price.kind for price in every}
    marks = []
    if "on demand" in kinds:
        marks.append(('<i class="mark"></i>', "on demand; dashed: from the lowest to the highest step time"))
    if "spot" in kinds:
        words = "spot, with lost work, saves and restarts, at the likely step time"
        marks.append(('<i class="mark diamond"></i>', words))
    return f'<figure class="wide-plot">{_svg("Cost against time", drawn)}</figure>{legend([*keys, *marks])}'


def _usd(value: float) -> str:
    if value < 0.01:  # `dollars` says the same of all of them
        return f"${value:.1g}"
    return dollars(value).removesuffix(".00") if value < 10_000 else f"${_count(value)}"


def _prices(one: Estimate) -> list[_Price]:
    if not is_timed(one) or one.cost is None or one.time is None:
        return []
    cost, time, found = one.cost, one.time, []
    if cost.on_demand_usd is not None:
        span = (time.low_seconds / time.seconds, time.high_seconds / time.seconds)
        found.append(_Price("on demand", cost.hours, cost.on_demand_usd, span if max(span) < math.inf else None))
    if cost.spot is not None and cost.spot.is_sensible:
        found.append(_Price("spot", cost.spot.hours, cost.spot.usd, None))
    return found


def _ends(price: _Price) -> str:
    if price.span is None:
        return ""
    low, high = price.span
    return (
        f" ({dollars(price.usd * low)} in {hours(price.hours * low)} to "
        f"{dollars(price.usd * high)} in {hours(price.hours * high)})"
    )


def _price(frame: _Frame, per_hour: int, price: _Price, name: str, color: str) -> str:
    x, y = frame.across(per_hour * price.hours), frame.up(price.usd)
    said = f"<title>{text(f'{name}, {price.kind}: {dollars(price.usd)} in {hours(price.hours)}{_ends(price)}')}</title>"
    value = f'data-hours="{price.hours!r}" data-usd="{price.usd!r}" data-of="{text(name)}"'
    if price.span is None:
        return f'<path class="point" stroke="{color}" d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z" {value}>{said}</path>'
    low, high = price.span
    ends = [(frame.across(per_hour * price.hours * factor), frame.up(price.usd * factor)) for factor in (low, high)]
    line = "L".join(f"{across:.1f} {up:.1f}" for across, up in ends)
    return (
        f'<path class="span" stroke="{color}" d="M{line}"/>'
        f'<circle class="point" stroke="{color}" cx="{x:.1f}" cy="{y:.1f}" r="5.5" {value}>{said}</circle>'
    )


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis: all values with room around them, and enough of a decade for ticks."""
    low, high = min(values), max(values)
    room = max(1.0, 6 / (high / low)) ** 0.5
    return low / 1.25 / room, high * 1.25 * room


def _log_ticks(limits: tuple[float, float], most: int) -> list[float]:
    """Round values within the limits: 1, 2 and 5 of each decade, or only every so many decades."""
    first, last = math.floor(math.log10(limits[0])), math.ceil(math.log10(limits[1]))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**power for power in range(first, last + 1) for f in factors]
        found = [value for value in found if limits[0] <= value <= limits[1]]
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]


def _axes(frame: _Frame, across: str, up: str, x_text: Callable[[float], str], y_text: Callable[[float], str]) -> str:
    parts = []
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in _log_ticks(frame.x, 7):
        x = frame.across(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text(x_text(value))}</text>')
    for value in _log_ticks(frame.y, 7):
        y = frame.up(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text(y_text(value))}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{across}</text>')
    at = (_TOP + bottom) / 2
    parts.append(f'<text x="12" y="{at}" text-anchor="middle" transform="rotate(-90 12 {at})">{up}</text>')
    return "".join(parts)


def _count(value: float) -> str:
    """Ticks are round: 10k and not 10.0k."""
    return f"{value:.3g}" if value < 1000 else re.sub(r"\.0+(?=[kMBT]|$)", "", format_count(value))


def _rate(value: float) -> str:
    return rate_text(value, "").rstrip()


def _svg(title: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{text(title)}">{"".join(parts)}</svg>'
