"""One page about plans that opens anywhere, with no network, no script and no other file."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from jaxtrain.config.yaml_file import to_yaml
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.metrics.report.style import STYLE
from jaxtrain.plan.report.page_plots import cost_picture, memory_picture, roofline_picture, time_picture
from jaxtrain.plan.report.rows import dollars, headings, hours, labels, remarks, sections, verdict
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.runtime.files import write_text_atomic

_STYLE = """
figure { overflow-x: auto; margin: 0; }
figure svg { min-width: 46rem; }
.wide { overflow-x: auto; }
.wide table { width: auto; min-width: 60%; }
.wide th, .wide td { width: auto; padding-right: 1.4rem; min-width: 8rem; max-width: 24rem; }
.wide th { min-width: 11rem; }
.wide thead th, .wide .section { color: var(--ink); font-weight: 600; }
.wide .section { padding-top: 1.1rem; }
.wide .share { text-align: right; min-width: 4rem; }
ul { margin: 0; padding-left: 1.2rem; } li { margin: .25rem 0; overflow-wrap: anywhere; }
.verdicts { list-style: none; padding: 0; margin-top: 1rem; }
details { margin: .5rem 0; } summary { cursor: pointer; margin-bottom: .4rem; }
"""


def write_page(estimates: Sequence[Estimate], path: Path) -> None:
    """Writes estimates as one page: pictures, the table, advice and notes, configs.

    Args:
        estimates: one or more.
        path: of the HTML file, written whole or not at all.
    """
    if not estimates:
        raise ValueError("a page needs an estimate")
    body = [_header(estimates), _cards(estimates), *_pictures(estimates), _table(estimates)]
    for title, lines in remarks(estimates):
        items = "".join(f"<li>{_text(line)}</li>" for line in lines)
        body.append(f"<section><h2>{_text(title.capitalize())}</h2><ul>{items}</ul></section>")
    body.append(_configs(estimates))
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(_title(estimates))} - jaxtrain plan</title>\n<style>{STYLE}{_STYLE}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(part for part in body if part) + "\n</main>\n</body>\n</html>\n"
    )
    write_text_atomic(Path(path), page)


def _title(estimates: Sequence[Estimate]) -> str:
    configs = [estimate.config for estimate in estimates]
    return ", ".join(
        dict.fromkeys(one.name or getattr(one.model, "size", None) or f"a {one.model.kind}" for one in configs)
    )


def _header(estimates: Sequence[Estimate]) -> str:
    counts = dict.fromkeys(f"{format_count(estimate.num_parameters)} parameters" for estimate in estimates)
    targets = dict.fromkeys(estimate.target.name for estimate in estimates)
    lines = []
    for name, estimate in zip(labels(estimates), estimates, strict=True):
        kind = {True: "good", False: "bad", None: "plain"}[estimate.fits]
        lines.append(f'<li><b>{_text(name)}</b> <span class="{kind}">{_text(verdict(estimate))}</span></li>')
    return (
        f"<header><h1>Plan of {_text(_title(estimates))}</h1>"
        f"<p>{_text(' · '.join(counts))} · {_text(', '.join(targets))}</p>"
        f'<ul class="verdicts">{"".join(lines)}</ul></header>'
    )


def _cards(estimates: Sequence[Estimate]) -> str:
    """What matters, as a row of numbers: of the one estimate, or the best of several."""
    if len(estimates) == 1:
        cards = _single_cards(estimates[0])
    else:
        named = list(zip(labels(estimates), estimates, strict=True))
        fitting = [(name, one.cost) for name, one in named if one.fits is not False and one.cost is not None]
        cards = [("fit", f"{sum(one.fits is True for one in estimates)} of {len(estimates)}")]
        if fitting:
            name, cost = min(fitting, key=lambda item: item[1].hours)
            cards.append((f"fastest that fits: {hours(cost.hours)}", name))
        rents = [(name, cost.on_demand_usd) for name, cost in fitting if cost.on_demand_usd is not None]
        if rents:
            name, usd = min(rents, key=lambda item: item[1])
            cards.append((f"cheapest that fits, on demand: {dollars(usd)}", name))
        spots = [(name, cost.spot.usd) for name, cost in fitting if cost.spot is not None and cost.spot.is_sensible]
        if spots:
            name, usd = min(spots, key=lambda item: item[1])
            cards.append((f"cheapest that fits, spot: {dollars(usd)}", name))
    items = "".join(f"<div><dd>{_text(value)}</dd><dt>{_text(label)}</dt></div>" for label, value in cards)
    return f'<dl class="cards">{items}</dl>'


def _single_cards(estimate: Estimate) -> list[tuple[str, str]]:
    memory, exact, time, cost = estimate.memory, estimate.exact, estimate.time, estimate.cost
    peak = memory.total_bytes if exact is None else exact.peak_bytes
    cards = [("peak device memory", format_bytes(peak))]
    if time is not None:
        rate = estimate.tokens_per_second or estimate.rows_per_second
        cards.append((f"{estimate.workload.unit}/s", format_count(rate)))
        if time.model_flops_utilization is not None:
            cards.append(("model FLOPs utilization", f"{100 * time.model_flops_utilization:.1f} %"))
    if cost is not None:
        cards.append(("time to train", hours(cost.hours).replace(" hours", " h")))
        if cost.on_demand_usd is not None:
            cards.append(("on demand", dollars(cost.on_demand_usd)))
        if cost.spot is not None and cost.spot.is_sensible:
            cards.append(("spot", dollars(cost.spot.usd)))
    return cards


def _pictures(estimates: Sequence[Estimate]) -> list[str]:
    """Each picture in a section, or why there is none."""
    drawn = (
        ("Memory by part", memory_picture(estimates), "", ""),
        (
            "Roofline",
            roofline_picture(estimates),
            "The line is what the hardware can do at most: left of the dashed line memory bounds it, right of it the "
            "matmul units. Points are the blocks at the assumed efficiencies; those that only move data have none.",
            "No peak of the hardware is known for the number format of the run.",
        ),
        (
            "Time by part",
            time_picture(estimates),
            "Of one step on one device; traffic only as far as it does not hide behind compute.",
            "No step time is known.",
        ),
        (
            "Cost against time",
            cost_picture(estimates),
            "Of the whole run; lower left is better.",
            "No price or no step time is known.",
        ),
    )
    timeless = [name for name, one in zip(labels(estimates), estimates, strict=True) if one.time is None]
    found = []
    for title, picture, note, missing in drawn:
        if timeless and title != "Memory by part":
            note += f" Without a step time and so not shown: {_text(', '.join(timeless))}."
        shown = f"<p>{missing}</p>" if picture is None else f"<figure>{picture}</figure>"
        note = f"<p>{note}</p>" if note and picture is not None else ""
        found.append(f"<section><h2>{title}</h2>{note}{shown}</section>")
    return found


def _table(estimates: Sequence[Estimate]) -> str:
    heads = headings(estimates, labels(estimates))
    kinds = ["" if head != "share" or len(estimates) > 1 else ' class="share"' for head in heads]
    rows = []
    for section in sections(estimates):
        rows.append(f'<tr><th class="section" colspan="{len(heads) + 1}">{_text(section.title)}</th></tr>')
        for row in section.rows:
            cells = "".join(f"<td{kind}>{_text(cell)}</td>" for kind, cell in zip(kinds, row.cells, strict=True))
            rows.append(f"<tr><th>{_text(row.label)}</th>{cells}</tr>")
    top = "".join(f"<th{kind}>{_text(head)}</th>" for kind, head in zip(kinds, heads, strict=True))
    return (
        '<section><h2>Numbers</h2><div class="wide"><table>'
        f"<thead><tr><th></th>{top}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _configs(estimates: Sequence[Estimate]) -> str:
    """Each config once, folded, under the targets that it is for."""
    about: dict[str, list[str]] = {}
    for name, estimate in zip(labels(estimates), estimates, strict=True):
        about.setdefault(to_yaml(estimate.config.model_dump(mode="json")), []).append(name)
    parts = "".join(
        f"<details><summary>{_text(', '.join(names))}</summary><pre>{_text(config)}</pre></details>"
        for config, names in about.items()
    )
    return f"<section><h2>Config</h2>{parts}</section>"


def _text(value: str) -> str:
    """Escaped for HTML. Spaces that align numbers become as wide as digits, which HTML keeps."""
    stripped = value.lstrip(" ")
    return "\u2007" * (len(value) - len(stripped)) + escape(stripped, quote=True)
