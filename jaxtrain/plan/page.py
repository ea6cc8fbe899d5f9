"""One page about plans that opens anywhere, with no network and no other file. No jax here.

What formulas give is pale with a dashed edge, what a compiler found is solid; `title` has the words of each mark.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from jaxtrain.metrics.report.html import STYLE as REPORT_STYLE
from jaxtrain.plan.estimate import Estimate
from jaxtrain.plan.show import (
    answer_lines,
    labels,
    merged,
    remarks,
    seconds_text,
    sections,
    size_text,
    step_text,
)
from jaxtrain.plan.time import StepTime
from jaxtrain.runtime.files import write_text_atomic

# Told apart from their neighbours, and visible on white and on black.
_PALETTE = (
    *("#4c78c8", "#e8853d", "#4fa866", "#c94f4f", "#8f6bbf", "#b08a3e", "#d976b4", "#3aa6b9"),
    *("#a3b944", "#8a6552", "#6f8fa8", "#e3b23c", "#5b5fc7", "#2f8f83", "#b7638a", "#93a0ad"),
)
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
@media print { .track, .legend i { print-color-adjust: exact; } }
"""


def write_page(estimates: Sequence[Estimate], path: Path, *, searches: Sequence[Sequence[str]] = ()) -> None:
    """Writes estimates as one page: the answers, bars of memory and time, what searches found, all rows, assumptions.

    Args:
        estimates: one or more.
        path: of the HTML file, written whole or not at all.
        searches: lines about each search, as `search_lines` gives them.
    """
    configs = [one.config for one in estimates]
    names = [one.name or getattr(one.model, "size", None) or f"a {one.model.kind}" for one in configs]
    title = _text(", ".join(dict.fromkeys(names)))
    body = [f"<header><h1>Plan of {title}</h1>{_answers(estimates)}</header>"]
    found = "".join(f'<div class="wide"><pre>{_text(chr(10).join(lines))}</pre></div>' for lines in searches)
    body += [_section("Candidates of the search", found)] if searches else []
    body += [
        _section("Memory by part", _memory_bars(estimates)),
        _section("Time by part", _time_bars(estimates)),
        _section("Numbers", _table(estimates)),
        *(_section(name.capitalize(), _list(lines)) for name, lines in remarks(estimates).items()),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} - jaxtrain plan</title>\n<style>{REPORT_STYLE}{_STYLE}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )
    write_text_atomic(Path(path), page)


def _text(value: str) -> str:
    """Text for HTML; spaces that align numbers become as wide as digits, which HTML keeps."""
    stripped = value.lstrip(" ")
    return "\u2007" * (len(value) - len(stripped)) + escape(stripped, quote=True)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"


def _answers(estimates: Sequence[Estimate]) -> str:
    """The first lines of the terminal for each estimate."""
    answers = []
    for one in estimates:
        first, *rest = answer_lines(one)
        answers.append(f'<p class="{_KIND[one.fits]}"><b>{_text(first)}</b></p>{_list(rest)}')
    return "".join(answers)


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
    """Memory of one device by part: a bar per estimate, with the capacity and the peak of a compiler."""
    shades = _shades(merged(one.memory.parts for one in estimates))
    bars = []
    for name, one in zip(labels(estimates), estimates, strict=True):
        memory, total = one.memory, one.memory.total_bytes
        reach = max(total, memory.capacity_bytes or 0, one.peak_bytes, 1)
        words = {
            part: f"{part}: {size_text(count)}, {100 * count / total:.1f} %, by formulas"
            for part, count in memory.parts.items()
        }
        parts, said = _parts(memory.parts, reach, shades, words), f"{size_text(total)} by formulas"
        if memory.capacity_bytes is not None:
            reserved, end = 100 * memory.reserved_bytes / reach, 100 * memory.capacity_bytes / reach
            parts += _span("reserved", end - reserved, reserved, "reserved for runtime and libraries", '"')
            parts += _span("capacity", end, 0.3, f"capacity: {size_text(memory.capacity_bytes)}", '"')
            said += f", of {size_text(memory.capacity_bytes)}"
        thin = ""
        if one.exact is not None:
            peak = one.exact.peak_bytes
            by = f"{size_text(peak)} by the hardware's own compiler"
            thin = _span("compiled", 0, 100 * peak / reach, by, f'" data-compiled="{peak}"')
            thin = f'<div class="track thin">{thin}</div><p>{by}</p>'
        bars.append(
            f'<div class="bar" data-memory="{_text(name)}"><p><b>{_text(name)}</b> {_text(said)}</p>'
            f'<div class="track">{parts}</div>{thin}</div>'
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
    """Time of a step by part, each bar as wide as the highest time of its range; and whose is not shown."""
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
            f'<div class="bar" data-time="{_text(name)}"><p><b>{_text(name)}</b> {_text(step_text(time))}, bound by '
            f'{_text(time.bound)}</p><div class="track">{_parts(parts, reach, shades, words)}</div>'
            f'<div class="whisker" {data} title="{_text(step_text(time))}">{whisker}</div></div>'
        )
    without = [name for name, _ in named if name not in timed]
    note = f"<p>Not shown, without a time: {_text(', '.join(without))}.</p>" if without else ""
    return "".join(bars) + _legend(shades) + note


def _table(estimates: Sequence[Estimate]) -> str:
    heads = "".join(f"<th>{_text(name)}</th>" for name in labels(estimates))
    rows = []
    for title, cells in sections(estimates).items():
        rows.append(f'<tr><th class="section" colspan="{len(estimates) + 1}">{_text(title)}</th></tr>')
        for label, some in cells.items():
            rows.append(f"<tr><th>{_text(label)}</th>{''.join(f'<td>{_text(cell)}</td>' for cell in some)}</tr>")
    head = f"<thead><tr><th></th>{heads}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'
