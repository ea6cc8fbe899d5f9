"""One page about plans that opens anywhere, with no network and no other file. No jax here."""

from collections.abc import Sequence
from pathlib import Path

from jaxtrain.config.files import to_yaml
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.metrics.report.style import STYLE as REPORT_STYLE
from jaxtrain.plan.catalogue.hardware import Target
from jaxtrain.plan.report.amounts import dollars, hours
from jaxtrain.plan.report.page_bars import is_timed, memory_bars, range_text, time_bars, why_untimed
from jaxtrain.plan.report.page_candidates import candidates
from jaxtrain.plan.report.page_html import seconds_text, text
from jaxtrain.plan.report.page_layout import layout_pictures
from jaxtrain.plan.report.page_plots import cost_picture, roofline_pictures
from jaxtrain.plan.report.page_style import SCRIPT, STYLE
from jaxtrain.plan.report.rows import headings, labels, remarks, sections, verdict
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.search.layouts import Found
from jaxtrain.runtime.files import write_text_atomic


def write_page(
    estimates: Sequence[Estimate],
    path: Path,
    *,
    searches: Sequence[tuple[Target, Found]] = (),
    rejected: Sequence[Estimate] = (),
) -> None:
    """Writes estimates as one page: pictures, candidates of a search, the table, advice and notes, configs.

    Args:
        estimates: one or more.
        path: of the HTML file, written whole or not at all.
        searches: targets with what a search found for them.
        rejected: layouts of the searches that fit by formulas and that the compiler found too large.
    """
    if not estimates:
        raise ValueError("a page needs an estimate")
    body = [_header(estimates), _cards(estimates), _advice(estimates)]
    if searches:
        body.append(f"<section><h2>Candidates of the search</h2>{candidates(searches, estimates, rejected)}</section>")
    body += [*_pictures(estimates), _table(estimates)]
    body += [_lines(title, lines) for title, lines in remarks(estimates) if title != "advice"]
    body += [_assumed_figures(estimates), _configs(estimates)]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(_title(estimates))} - jaxtrain plan</title>\n"
        f"<style>{REPORT_STYLE}{STYLE}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(part for part in body if part) + f"\n</main>\n<script>{SCRIPT}</script>\n"
        "</body>\n</html>\n"
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
        said = f'<span class="{kind}">{text(verdict(estimate))}</span> {text(estimate.fitted or "")}'
        lines.append(f"<li><b>{text(name)}</b> {said}</li>")
    return (
        f"<header><h1>Plan of {text(_title(estimates))}</h1>"
        f"<p>{text(' · '.join(counts))} · {text(', '.join(targets))}</p>"
        f'<ul class="verdicts">{"".join(lines)}</ul></header>'
    )


def _cards(estimates: Sequence[Estimate]) -> str:
    """What matters, as a row of numbers: of the one estimate, or the best of several."""
    if len(estimates) == 1:
        cards = _single_cards(estimates[0])
    else:
        named = list(zip(labels(estimates), estimates, strict=True))
        fitting = [(name, one.cost) for name, one in named if one.fits is not False and one.cost is not None]
        cards = [(f"{sum(one.fits is True for one in estimates)} of {len(estimates)}", "fit")]
        if fitting:
            name, cost = min(fitting, key=lambda item: item[1].hours)
            cards.append((_short_hours(cost.hours), f"fastest that fits: {name}"))
        rents = [(name, cost.on_demand_usd) for name, cost in fitting if cost.on_demand_usd is not None]
        if rents:
            name, usd = min(rents, key=lambda item: item[1])
            cards.append((dollars(usd), f"cheapest that fits, on demand: {name}"))
        spots = [(name, cost.spot.usd) for name, cost in fitting if cost.spot is not None and cost.spot.is_sensible]
        if spots:
            name, usd = min(spots, key=lambda item: item[1])
            cards.append((dollars(usd), f"cheapest that fits, spot: {name}"))
    items = "".join(f"<div><dd>{text(value)}</dd><dt>{text(label)}</dt></div>" for value, label in cards)
    return f'<dl class="cards">{items}</dl>'


def _short_hours(count: float) -> str:
    return hours(count).replace(" hours", " h").replace(" minutes", " min")


def _single_cards(estimate: Estimate) -> list[tuple[str, str]]:
    """Value and name of each card; a plan that does not fit has no speed and no cost."""
    exact, time, cost = estimate.exact, estimate.time, estimate.cost
    cards = [
        (
            format_bytes(estimate.peak_bytes),
            "peak memory of one device" + ("" if exact is None else ", by the compiler"),
        )
    ]
    if estimate.fits is False:
        return [
            *cards,
            (format_bytes(estimate.room_bytes), "that one device has for a step"),
            ("none", "time and cost: does not fit"),
        ]
    if time is not None:
        cards.append((seconds_text(time.seconds), f"step: {range_text(time)[:-1].partition('(')[2]}"))
        rate = estimate.tokens_per_second or estimate.rows_per_second
        cards.append((format_count(rate), f"{estimate.workload.unit}/s"))
        if time.model_flops_utilization is not None:
            cards.append((f"{100 * time.model_flops_utilization:.1f} %", "model FLOPs utilization"))
    if cost is not None:
        cards.append((_short_hours(cost.hours), f"to train {cost.steps:,} steps"))
        if cost.on_demand_usd is not None:
            cards.append((dollars(cost.on_demand_usd), "whole run, on demand"))
        if cost.spot is not None and cost.spot.is_sensible:
            cards.append((dollars(cost.spot.usd), "whole run, spot"))
    return cards


def _advice(estimates: Sequence[Estimate]) -> str:
    """The advice, high on the page: whoever reads that nothing fits wants to know what to do."""
    return next((_lines("what makes it fit", lines) for title, lines in remarks(estimates) if title == "advice"), "")


def _lines(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f"<section><h2>{text(title.capitalize())}</h2><ul>{items}</ul></section>"


def _pictures(estimates: Sequence[Estimate]) -> list[str]:
    """Each picture in a section, or why there is none."""
    untimed = "".join(f"<p>{text(line)}</p>" for line in why_untimed(estimates))
    unpriced = [
        name
        for name, one in zip(labels(estimates), estimates, strict=True)
        if is_timed(one) and (one.cost is None or (one.cost.on_demand_usd is None and one.cost.spot is None))
    ]
    costless = untimed + (f"<p>Not shown, no price is known: {text(', '.join(unpriced))}.</p>" if unpriced else "")
    drawn = (
        ("Layout", layout_pictures(estimates), "", ""),
        (
            "Memory by part",
            memory_bars(estimates),
            "Of one device when most is allocated. Pale with a dashed edge: by formulas. Solid: by the compiler.",
            "",
        ),
        (
            "Time by part",
            time_bars(estimates),
            "Of one step on one device, predicted at assumed efficiencies and not measured; traffic only as far as it "
            f"does not hide behind compute.{untimed}",
            untimed,
        ),
        (
            "Cost against time",
            cost_picture(estimates),
            f"Of the whole run; lower left is better. Hollow points: predicted, not measured.{costless}",
            costless,
        ),
        (
            "Roofline",
            roofline_pictures(estimates),
            "The line is the most that the hardware can do: left of the dashed line memory bounds a block, right of it "
            "the matmul units. Hollow points: blocks at the assumed efficiencies, not measured; blocks that only move "
            f"data have no point.{untimed}",
            untimed or "<p>No peak of the hardware is known for the number format of the run.</p>",
        ),
    )
    found = []
    for title, picture, note, missing in drawn:
        shown = missing if picture is None else f"<p>{note}</p>{picture}" if note else picture
        found.append(f"<section><h2>{title}</h2>{shown}</section>")
    return found


def _assumed_figures(estimates: Sequence[Estimate]) -> str:
    """The figures of the hardware that nobody published, each with what stands in its place."""
    lines = [
        f"{hardware.title}, {figure}: {source}"
        for hardware in {one.target.hardware.name: one.target.hardware for one in estimates}.values()
        for figure, source in hardware.sources.items()
        if source.startswith("assumed")
    ]
    return _lines("figures of the hardware that are assumed", lines) if lines else ""


def _table(estimates: Sequence[Estimate]) -> str:
    heads = headings(estimates, labels(estimates))
    kinds = ["" if head != "share" or len(estimates) > 1 else ' class="share"' for head in heads]
    rows = []
    for section in sections(estimates):
        rows.append(f'<tr><th class="section" colspan="{len(heads) + 1}">{text(section.title)}</th></tr>')
        for row in section.rows:
            cells = "".join(f"<td{kind}>{text(cell)}</td>" for kind, cell in zip(kinds, row.cells, strict=True))
            rows.append(f"<tr><th>{text(row.label)}</th>{cells}</tr>")
    top = "".join(f"<th{kind}>{text(head)}</th>" for kind, head in zip(kinds, heads, strict=True))
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
        f"<details><summary>{text(', '.join(names))}</summary><pre>{text(config)}</pre></details>"
        for config, names in about.items()
    )
    return f"<section><h2>Config</h2>{parts}</section>"
