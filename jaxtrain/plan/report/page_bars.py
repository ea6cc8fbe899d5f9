"""The bars of a plan's page: memory by part against the capacity, and a step's time by part with its range.

A bar of formulas is pale with a dashed edge, what a compiler found is solid. No jax here.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence

from jaxtrain.plan.report.page_html import (
    PALETTE,
    axis,
    block_colors,
    colors,
    digits,
    hover,
    legend,
    seconds_text,
    swatch,
    text,
)
from jaxtrain.plan.report.rows import bubble_seconds, labels, merged, verdict
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.time.record import StepTime

# Times further apart than this are drawn as shares of each step: the shortest bar could not be read.
_MOST_RATIO = 6.0
# A device that is filled less than this gets a second bar, in which the parts can be told apart.
_LITTLE = 0.35


def memory_bars(estimates: Sequence[Estimate]) -> str:
    """Memory of one device by part: a bar per estimate, with the capacity and, where there is one, the compiler's peak.

    Args:
        estimates: one or more.
    """
    most = max(_reach(one) for one in estimates)
    unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    # A model of a few MiB on a device of many GiB: each number in a unit of its own.
    part_unit, part_size = (unit, size)
    if max(max(one.memory.total_bytes, _peak(one)) for one in estimates) < 2**30:
        part_unit, part_size = "MiB", 2**20
    names = merged(one.memory.parts for one in estimates)
    shades = colors(names)

    def words(count: float) -> str:
        small = 0 < count / part_size < 0.005
        return f"< 0.01 {part_unit}" if small else f"{count / part_size:,.2f} {part_unit}"

    bars = []
    for name, one in zip(labels(estimates), estimates, strict=True):
        bars.append(_memory_bar(name, one, most, shades, words))
    keys = []
    for part in names:
        count = estimates[0].memory.parts.get(part, 0)
        total = estimates[0].memory.total_bytes
        shown = f"{part}: {words(count)}, {100 * count / total:.1f} %" if len(estimates) == 1 and total else part
        keys.append((swatch(shades[part], "assumed"), shown))
    if any(one.memory.capacity_bytes is not None for one in estimates):
        keys.append(('<i class="swatch line"></i>', "capacity of the device"))
    if any(one.memory.reserved_bytes and one.memory.capacity_bytes for one in estimates):
        keys.append(('<i class="swatch reserved"></i>', "reserved for runtime and libraries"))
    if any(one.exact is not None for one in estimates):
        keys.append(('<i class="swatch compiled"></i>', "peak by the hardware's own compiler"))
    return "".join(bars) + axis(most / size, f"{unit} of one device, at the peak of a step") + legend(keys)


def _peak(estimate: Estimate) -> int:
    return 0 if estimate.exact is None else estimate.exact.peak_bytes


def _reach(estimate: Estimate) -> int:
    return max(estimate.memory.total_bytes, estimate.memory.capacity_bytes or 0, _peak(estimate), 1)


def _memory_bar(name: str, one: Estimate, most: int, shades: Mapping[str, str], words: Callable[[float], str]) -> str:
    memory, total = one.memory, one.memory.total_bytes
    parts = _memory_parts(one, most, shades, words)
    taken = max(total, _peak(one))
    enlarged = ""
    if 0 < taken < _LITTLE * most:
        again = f'<div class="track thin">{"".join(_memory_parts(one, taken, shades, words))}</div>'
        again = re.sub("data-(bytes|compiled)=", "data-again=", again + _compiled(one, taken, words))
        enlarged = f'<p class="unit">the same, {digits(most / taken)} times as wide:</p>{again}'
    if memory.capacity_bytes is not None:
        usable = memory.capacity_bytes - memory.reserved_bytes
        if memory.reserved_bytes:
            said = f"reserved for runtime and libraries: {memory.reserved_bytes / 2**30:,.2f} GiB"
            place = f"left:{100 * usable / most:.3f}%;width:{100 * memory.reserved_bytes / most:.3f}%"
            parts.append(f'<span class="reserved" style="{place}" {hover(said)}></span>')
        said = f"capacity of the device: {memory.capacity_bytes / 2**30:,.2f} GiB"
        place = f"left:{100 * memory.capacity_bytes / most:.3f}%"
        parts.append(f'<span class="capacity" style="{place}" {hover(said)}></span>')
    kind = {True: "good", False: "bad", None: "plain"}[one.fits]
    head = f'<b>{text(name)}</b> <span class="{kind}">{text(verdict(one))}</span>'
    track = f'<div class="track">{"".join(parts)}</div>'
    return (
        f'<div class="bar" data-memory="{text(name)}"><p>{head}</p>{track}{_compiled(one, most, words)}{enlarged}</div>'
    )


def _memory_parts(one: Estimate, reach: int, shades: Mapping[str, str], words: Callable[[float], str]) -> list[str]:
    """The parts of memory beside each other, on a scale that ends at `reach` bytes."""
    left, parts, total = 0, [], one.memory.total_bytes
    for part, count in one.memory.parts.items():
        if count:
            said = f"{part}: {words(count)}, {100 * count / total:.1f} % of {words(total)}, by formulas"
            value = f'data-part="{text(part)}" data-bytes="{count}"'
            parts.append(_segment(left / reach, count / reach, shades[part], said, value))
            left += count
    return parts


def _compiled(one: Estimate, reach: int, words: Callable[[float], str]) -> str:
    if one.exact is None:
        return ""
    said = f"peak by the hardware's own compiler: {words(one.exact.peak_bytes)}"
    value = f'data-compiled="{one.exact.peak_bytes}" style="width:{100 * one.exact.peak_bytes / reach:.3f}%"'
    return f'<div class="track thin"><span class="compiled" {value} {hover(said)}></span></div>'


def _segment(left: float, width: float, color: str, said: str, value: str, kind: str = "") -> str:
    place = f"left:{100 * left:.3f}%;width:{100 * width:.3f}%;--c:{color}"
    return f'<span class="segment {kind}" style="{place}" {value} {hover(said)}></span>'


def is_timed(estimate: Estimate) -> bool:
    """Whether an estimate has a time to draw: it may fit, and its time is known and finite."""
    return estimate.fits is not False and estimate.time is not None and 0 < _whole(estimate.time) < math.inf


def why_untimed(estimates: Sequence[Estimate]) -> list[str]:
    """A line per reason why estimates have no time in the pictures, with their names."""
    reasons: dict[str, list[str]] = {}
    for name, one in zip(labels(estimates), estimates, strict=True):
        if one.fits is False:
            reasons.setdefault("does not fit", []).append(name)
        elif one.time is None:
            reasons.setdefault("no step time is known", []).append(name)
        elif not is_timed(one):
            reasons.setdefault("sends over a link whose rate is not known", []).append(name)
    return [f"Not shown, {reason}: {', '.join(names)}." for reason, names in reasons.items()]


def _whole(time: StepTime) -> float:
    return sum(time_parts(time).values())


def time_bars(estimates: Sequence[Estimate]) -> str | None:
    """Time of a step by part, with its range; None where no estimate that may fit has a time."""
    shown = [(name, one.time) for name, one in zip(labels(estimates), estimates, strict=True) if is_timed(one)]
    timed = [(name, time) for name, time in shown if time is not None]
    if not timed:
        return None
    seconds = [_whole(time) for _, time in timed]
    as_shares = max(seconds) > _MOST_RATIO * min(seconds)
    shades = block_colors(estimates)
    names = merged(time_parts(time) for _, time in timed)
    others = [name for name in names if name not in shades]
    shades |= dict(zip(others, itertools.cycle(reversed(PALETTE))))
    reach = max(_high(time) for _, time in timed)
    bars = [_time_bar(name, time, _high(time) if as_shares else reach, shades, others) for name, time in timed]
    keys = [(swatch(shades[name], "assumed striped" if name in others else "assumed"), name) for name in names]
    keys.append(('<i class="swatch range"></i>', "from the lowest to the highest time, and the likely one"))
    if as_shares:
        scale = '<p class="unit">Each bar has its own scale: the times are too far apart for a common one.</p>'
    else:
        factor, unit = (1e3, "ms") if reach < 10 else (1.0, "s")
        scale = axis(factor * reach, f"{unit} per step")
    return "".join(bars) + scale + legend(keys)


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


def _high(time: StepTime) -> float:
    return time.high_seconds if time.high_seconds < math.inf else _whole(time)


def range_text(time: StepTime) -> str:
    """A step's time with its range: `147 ms (118 ms to 200 ms)`."""
    return f"{seconds_text(time.seconds)} ({seconds_text(time.low_seconds)} to {seconds_text(time.high_seconds)})"


def _time_bar(name: str, time: StepTime, reach: float, shades: Mapping[str, str], others: Sequence[str]) -> str:
    whole, left, parts = _whole(time), 0.0, []
    bounds = {block.name: f", bound by {block.bound}" for block in time.blocks}
    for part, taken in time_parts(time).items():
        said = f"{part}: {seconds_text(taken)}, {100 * taken / whole:.1f} % of a step{bounds.get(part, '')}, predicted"
        value = f'data-part="{text(part)}" data-seconds="{taken!r}"'
        parts.append(
            _segment(left / reach, taken / reach, shades[part], said, value, "striped" if part in others else "")
        )
        left += taken
    low, high = 100 * time.low_seconds / reach, 100 * _high(time) / reach
    said = f"step time: likely {range_text(time)}"
    value = f'data-low="{time.low_seconds!r}" data-likely="{time.seconds!r}" data-high="{time.high_seconds!r}"'
    whisker = (
        f'<div class="whisker" {value} {hover(said)}><span style="left:{low:.3f}%;width:{high - low:.3f}%"></span>'
        f'<i style="left:{100 * time.seconds / reach:.3f}%"></i></div>'
    )
    head = f"<b>{text(name)}</b> {text(range_text(time))}, bound by {text(time.bound)}"
    track = f'<div class="track">{"".join(parts)}</div>'
    return f'<div class="bar" data-time="{text(name)}"><p>{head}</p>{track}{whisker}</div>'
