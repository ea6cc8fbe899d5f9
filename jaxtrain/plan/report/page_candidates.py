"""The candidates of a search as a table: those that fit by time, then the nearest to fitting. No jax here."""

from collections.abc import Sequence

from jaxtrain.metrics.format import format_bytes
from jaxtrain.plan.catalogue.hardware import Target
from jaxtrain.plan.report.amounts import dollars, hours
from jaxtrain.plan.report.page_bars import range_text
from jaxtrain.plan.report.page_html import text
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.search.layouts import Found, describe_layout, why_not

# As many as `plan --json` lists, and a few that do not fit.
_FITTING = 20
_TOO_LARGE = 5


def candidates(
    searches: Sequence[tuple[Target, Found]], estimates: Sequence[Estimate], rejected: Sequence[Estimate] = ()
) -> str:
    """A table per target.

    Args:
        searches: targets with what was found for them.
        estimates: those that the page shows in full; the first of a target that may fit is the chosen one.
        rejected: those that fit by formulas and that the compiler found too large.
    """
    return "".join(_table(target, found, [*estimates, *rejected]) for target, found in searches)


def _table(target: Target, found: Found, estimates: Sequence[Estimate]) -> str:
    mine = [one for one in estimates if one.target == target]
    chosen = next((one for one in mine if one.fits is not False), None)
    rows = []
    for place, one in enumerate(found.ranked[:_FITTING], 1):
        same = next((each for each in mine if each.config == one.config), None)
        mark, kind = "", ""
        if same is not None and same is chosen:
            mark, kind = "chosen", ' class="chosen"'
        elif same is not None:
            mark = "compared" if same.fits is not False else "does not fit, by the compiler"
        step = "not known" if one.time is None else range_text(one.time)
        cost = one.cost
        whole = "not known" if cost is None else f"{hours(cost.hours)}, {dollars(cost.on_demand_usd)}"
        cells = (step, whole) if same is None or same.fits is not False else ("", "")
        rows.append(_row(f"{place}", same or one, found, cells, mark, kind))
    if len(found.ranked) > _FITTING:
        rows.append(f'<tr><td></td><td colspan="5">{len(found.ranked) - _FITTING:,} more fit</td></tr>')
    for one in found.too_large[:_TOO_LARGE]:
        rows.append(_row("-", one, found, ("", ""), "does not fit", ' class="over"'))
    if len(found.too_large) > _TOO_LARGE:
        more = len(found.too_large) - _TOO_LARGE
        rows.append(f'<tr class="over"><td></td><td colspan="5">{more:,} more do not fit</td></tr>')
    heads = ("", "layout", "step, predicted", "memory of one device", "whole run, on demand", "")
    head = "".join(f"<th>{text(one)}</th>" for one in heads)
    reasons = "".join(f"<li>{text(line)}</li>" for line in why_not(found))
    return (
        f"<p><b>{text(target.name)}</b>: {len(found.ranked):,} of {found.tried:,} layouts fit by formulas, "
        f"{len(found.too_large):,} are too large, {len(found.refused):,} are impossible.</p>"
        f'<div class="wide candidates"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f"<ul>{reasons}</ul>"
    )


def _row(place: str, one: Estimate, found: Found, cells: tuple[str, str], mark: str, kind: str) -> str:
    peak, room, share = one.peak_bytes, one.room_bytes, ""
    if room:
        used = 100 * peak / room
        over = " over" if used > 100 else ""
        share = (
            f'<span class="meter{over}"><i style="width:{min(used, 100):.1f}%"></i></span>'
            f"{used:.1f} % of {format_bytes(room)}"
            f"{', by the compiler' if one.exact is not None else ''}"
        )
    columns = (
        place,
        text(describe_layout(one.config, found.vary)),
        text(cells[0]),
        f"{format_bytes(peak)} {share}",
        text(cells[1]),
        f"<b>{text(mark)}</b>" if mark else "",
    )
    return f"<tr{kind}>{''.join(f'<td>{column}</td>' for column in columns)}</tr>"
