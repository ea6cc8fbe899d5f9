"""One page about plans that opens anywhere, with no network and no other file. No jax here.

What formulas give is pale with a dashed edge, what a compiler found is solid; `title` has the words of each mark.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from jaxtrain.config.files import to_yaml
from jaxtrain.metrics.format import format_bytes
from jaxtrain.metrics.report.html import STYLE as REPORT_STYLE
from jaxtrain.plan.estimate import Estimate
from jaxtrain.plan.search import Found, describe_layout, why_not
from jaxtrain.plan.show import answer_lines, dollars, hours, labels, merged, remarks, sections, units_of, verdict
from jaxtrain.plan.targets import Target
from jaxtrain.plan.time import StepTime
from jaxtrain.runtime.files import write_text_atomic

# Told apart from their neighbours, and visible on white and on black.
_PALETTE = (
    *("#4c78c8", "#e8853d", "#4fa866", "#c94f4f", "#8f6bbf", "#b08a3e", "#d976b4", "#3aa6b9"),
    *("#a3b944", "#8a6552", "#6f8fa8", "#e3b23c", "#5b5fc7", "#2f8f83", "#b7638a", "#93a0ad"),
)
# Candidates of a search that are listed: as many as `plan --json` lists, and a few that do not fit.
_FITTING, _TOO_LARGE = 20, 5
_KIND = {True: "good", False: "bad", None: "plain"}
_STYLE = """
ul { margin: 0; padding-left: 1.2rem; } li, p { overflow-wrap: anywhere; }
.legend { list-style: none; padding: 0; margin: .6rem 0 0; }
.legend { font-size: .85rem; display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; }
.legend i { display: inline-block; width: 1.1rem; height: .75rem; margin-right: .45rem; }
.bar { margin: .8rem 0; } .bar p { margin: 0 0 .2rem; font-size: .92rem; }
.track { position: relative; height: 1.7rem; background: var(--panel); overflow: hidden; }
.track.thin { height: .8rem; margin-top: 3px; }
.track span, .whisker span, .whisker i { position: absolute; top: 0; bottom: 0; }
.segment { background: color-mix(in srgb, var(--c) 55%, transparent); border: 1px dashed var(--c); }
.compiled { background: var(--ink); } .capacity { width: 3px; margin-left: -3px; background: var(--bad); }
.reserved { background: repeating-linear-gradient(135deg, var(--line) 0 3px, transparent 3px 7px); }
.whisker { position: relative; height: .9rem; }
.whisker span { top: .4rem; border-top: 2px dashed var(--ink); }
.whisker i { border-left: 3px solid var(--ink); }
.wide { overflow-x: auto; } .wide table { width: auto; min-width: 60%; }
.wide th, .wide td { width: auto; padding-right: 1.4rem; max-width: 24rem; } .wide th { min-width: 7rem; }
.wide .section, .wide thead th { color: var(--ink); font-weight: 600; }
tr.chosen { background: var(--panel); } tr.over td { color: var(--soft); }
details { margin: .5rem 0; } summary { cursor: pointer; }
@media print { .track, .legend i { print-color-adjust: exact; } }
"""


def write_page(
    estimates: Sequence[Estimate],
    path: Path,
    *,
    searches: Sequence[tuple[Target, Found]] = (),
    rejected: Sequence[Estimate] = (),
) -> None:
    """Writes estimates as one page: bars of memory and time, candidates of a search, the table, notes, configs.

    Args:
        estimates: one or more.
        path: of the HTML file, written whole or not at all.
        searches: targets with what a search found for them.
        rejected: layouts of the searches that fit by formulas and that the compiler found too large.
    """
    configs = [one.config for one in estimates]
    names = [one.name or getattr(one.model, "size", None) or f"a {one.model.kind}" for one in configs]
    title = ", ".join(dict.fromkeys(names))
    said = remarks(estimates)
    advice = {"what makes it fit": said.pop("advice")} if "advice" in said else {}
    body = [
        f"<header><h1>Plan of {_text(title)}</h1>{_answers(estimates)}</header>",
        *(_section(name, _list(lines)) for name, lines in advice.items()),
    ]
    if searches:
        tables = [_candidates(target, found, [*estimates, *rejected]) for target, found in searches]
        body.append(_section("Candidates of the search", "".join(tables)))
    body += [
        _section("Memory by part", _memory_bars(estimates)),
        _section("Time by part", _time_bars(estimates)),
        _section("Numbers", _table(estimates)),
        *(_section(name, _list(lines)) for name, lines in said.items()),
        _section("Config", _configs(estimates)),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)} - jaxtrain plan</title>\n<style>{REPORT_STYLE}{_STYLE}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )
    write_text_atomic(Path(path), page)


def _text(value: str) -> str:
    """Text for HTML; spaces that align numbers become as wide as digits, which HTML keeps."""
    stripped = value.lstrip(" ")
    return "\u2007" * (len(value) - len(stripped)) + escape(stripped, quote=True)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title[:1].upper() + title[1:])}</h2>{body}</section>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"


def seconds_text(seconds: float) -> str:
    """A time of one step with its unit: `37.5 ms`, `2.31 s`."""
    if not math.isfinite(seconds):
        return "not known"
    scaled, unit = (1e6 * seconds, "µs") if 0 < seconds < 1e-3 else (1e3 * seconds, "ms")
    scaled, unit = (seconds, "s") if seconds >= 1 else (scaled, unit)
    return f"{scaled:,.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"


def _range(time: StepTime) -> str:
    """A step's time with its range: `147 ms (118 ms to 200 ms)`."""
    return f"{seconds_text(time.seconds)} ({seconds_text(time.low_seconds)} to {seconds_text(time.high_seconds)})"


def _answers(estimates: Sequence[Estimate]) -> str:
    """The first lines of the terminal for each estimate: whether it fits, its time, its cost."""
    lists = []
    for name, one in zip(labels(estimates), estimates, strict=True):
        lists.append(f'<p class="{_KIND[one.fits]}"><b>{_text(name)}</b></p>{_list(answer_lines(one))}')
    return "".join(lists)


def _span(kind: str, left: float, width: float, words: str, data: str = "") -> str:
    """A mark from `left` on, both in percent."""
    return f'<span class="{kind}" style="left:{left:.3f}%;width:{width:.3f}%{data} title="{_text(words)}"></span>'


def _parts(parts: Mapping[str, float], reach: float, shades: Mapping[str, str], words: Mapping[str, str]) -> str:
    """Parts beside each other, on a scale that ends at `reach`."""
    left, found = 0.0, []
    data = "seconds" if any(isinstance(count, float) for count in parts.values()) else "bytes"
    for part, count in parts.items():
        value = f';--c:{shades[part]}" data-part="{_text(part)}" data-{data}="{count!r}"'
        found.append(_span("segment", 100 * left / reach, 100 * count / reach, words[part], value))
        left += count
    return "".join(found)


def _shades(names: Sequence[str]) -> dict[str, str]:
    return dict(zip(names, itertools.cycle(_PALETTE)))


def _legend(shades: Mapping[str, str]) -> str:
    marks = "".join(
        f'<li><i class="segment" style="--c:{shade}"></i>{_text(name)}</li>' for name, shade in shades.items()
    )
    return f'<ul class="legend">{marks}</ul>'


def _memory_bars(estimates: Sequence[Estimate]) -> str:
    """Memory of one device by part: a bar per estimate, with the capacity and, where there is one, the compiler's peak.

    All are as wide as what the device has, or the estimate takes.
    """
    units, shades = units_of(estimates), _shades(merged(one.memory.parts for one in estimates))
    bars = []
    for name, one in zip(labels(estimates), estimates, strict=True):
        memory, total = one.memory, one.memory.total_bytes
        reach = max(total, memory.capacity_bytes or 0, one.peak_bytes, 1)
        words = {
            part: f"{part}: {units.memory(count)}, {100 * count / total:.1f} %, by formulas"
            for part, count in memory.parts.items()
        }
        parts = _parts(memory.parts, reach, shades, words)
        if memory.capacity_bytes is not None:
            reserved, end = 100 * memory.reserved_bytes / reach, 100 * memory.capacity_bytes / reach
            parts += _span("reserved", end - reserved, reserved, "reserved for runtime and libraries", '"')
            parts += _span("capacity", end, 0.3, f"capacity: {format_bytes(memory.capacity_bytes)}", '"')
        thin = ""
        if one.exact is not None:
            peak = one.exact.peak_bytes
            said = f"peak by the hardware's own compiler: {units.memory(peak)}"
            mark = _span("compiled", 0, 100 * peak / reach, said, f'" data-compiled="{peak}"')
            thin = f'<div class="track thin">{mark}</div><p>{_text(said)}</p>'
        head = f'<b>{_text(name)}</b> <span class="{_KIND[one.fits]}">{_text(verdict(one))}</span>'
        bars.append(
            f'<div class="bar" data-memory="{_text(name)}"><p>{head}</p><div class="track">{parts}</div>{thin}</div>'
        )
    return "".join(bars) + _legend(shades)


def _time_parts(time: StepTime) -> dict[str, float]:
    """Seconds of a step by part, in the order to draw; parts of no time are left out."""
    parts: dict[str, float] = {}
    exposed = ((f"exposed traffic over {one.axis}", one.exposed_seconds) for one in time.traffic)
    for name, seconds in (*((block.name, block.seconds) for block in time.blocks), *exposed):
        parts[name] = parts.get(name, 0.0) + seconds
    return {
        name: seconds for name, seconds in (parts | {"pipeline bubble": time.bubble_seconds}).items() if seconds > 0
    }


def _time_bars(estimates: Sequence[Estimate]) -> str:
    """Time of a step by part, each bar as wide as the highest time of its range; and whose is not shown, and why."""
    named = list(zip(labels(estimates), estimates, strict=True))
    timed = {name: one.time for name, one in named if one.fits is not False and one.time is not None}
    timed = {name: time for name, time in timed.items() if math.isfinite(time.seconds)}
    shades, bars = _shades(merged(_time_parts(time) for time in timed.values())), []
    for name, time in timed.items():
        parts, reach = _time_parts(time), time.high_seconds if math.isfinite(time.high_seconds) else time.seconds
        words = {
            part: f"{part}: {seconds_text(taken)}, {100 * taken / time.seconds:.1f} % of a step, predicted"
            for part, taken in parts.items()
        }
        low, likely = 100 * time.low_seconds / reach, 100 * time.seconds / reach
        data = f'data-low="{time.low_seconds!r}" data-likely="{time.seconds!r}" data-high="{time.high_seconds!r}"'
        whisker = f'<span style="left:{low:.3f}%;width:{100 - low:.3f}%"></span><i style="left:{likely:.3f}%"></i>'
        bars.append(
            f'<div class="bar" data-time="{_text(name)}"><p><b>{_text(name)}</b> {_text(_range(time))}, bound by '
            f'{_text(time.bound)}</p><div class="track">{_parts(parts, reach, shades, words)}</div>'
            f'<div class="whisker" {data} title="{_text(_range(time))}">{whisker}</div></div>'
        )
    reasons: dict[str, list[str]] = {}
    for name, one in named:
        if name not in timed:
            reasons.setdefault("does not fit" if one.fits is False else "no step time is known", []).append(name)
    lines = [f"Not shown, {reason}: {', '.join(some)}." for reason, some in reasons.items()]
    return "".join(bars) + _legend(shades) + "".join(f"<p>{_text(line)}</p>" for line in lines)


def _candidates(target: Target, found: Found, estimates: Sequence[Estimate]) -> str:
    """The candidates of a search as a table: those that fit by time, then the nearest to fitting.

    Of `estimates`, those that were compiled, the first of the target that may fit is the chosen one.
    """
    mine = [one for one in estimates if one.target == target]
    chosen = next((one for one in mine if one.fits is not False), None)
    rows = []
    for place, ranked in enumerate((*found.ranked[:_FITTING], *found.too_large[:_TOO_LARGE]), 1):
        same = next((each for each in mine if each.config == ranked.config), None)
        one, mark, kind = same or ranked, "" if same is None else "compared", ""
        step = whole = ""
        if one.fits is False:
            mark, kind = "does not fit" + (", by the compiler" if one.exact is not None else ""), "over"
        else:
            step = "not known" if one.time is None else _range(one.time)
            whole = "not known" if one.cost is None else f"{hours(one.cost.hours)}, {dollars(one.cost.on_demand_usd)}"
            if same is not None and same is chosen:
                mark = kind = "chosen"
        share = f", {100 * one.peak_bytes / one.room_bytes:.1f} %" if one.room_bytes else ""
        memory = f"{format_bytes(one.peak_bytes)}{share}"
        cells = (f"{place}", describe_layout(one.config, found.vary), step, memory, whole, mark)
        rows.append(f'<tr class="{kind}">{"".join(f"<td>{_text(cell)}</td>" for cell in cells)}</tr>')
    heads = ("", "layout", "step, predicted", "memory of one device", "whole run, on demand", "")
    head = "".join(f"<th>{_text(one)}</th>" for one in heads)
    return (
        f"<p><b>{_text(target.name)}</b>: {len(found.ranked):,} of {found.tried:,} layouts fit by formulas, "
        f"{len(found.too_large):,} are too large, {len(found.refused):,} are impossible.</p>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        f"{_list(why_not(found))}"
    )


def _table(estimates: Sequence[Estimate]) -> str:
    heads = "".join(f"<th>{_text(name)}</th>" for name in labels(estimates))
    rows = []
    for title, facts in sections(estimates, units_of(estimates)).items():
        rows.append(f'<tr><th class="section" colspan="{len(estimates) + 1}">{_text(title)}</th></tr>')
        for label, some in facts.items():
            rows.append(f"<tr><th>{_text(label)}</th>{''.join(f'<td>{_text(fact.text)}</td>' for fact in some)}</tr>")
    head = f"<thead><tr><th></th>{heads}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _configs(estimates: Sequence[Estimate]) -> str:
    """Each config once, folded, under the targets that it is for."""
    about: dict[str, list[str]] = {}
    for name, estimate in zip(labels(estimates), estimates, strict=True):
        about.setdefault(to_yaml(estimate.config.model_dump(mode="json")), []).append(name)
    return "".join(
        f"<details><summary>{_text(', '.join(names))}</summary><pre>{_text(config)}</pre></details>"
        for config, names in about.items()
    )
