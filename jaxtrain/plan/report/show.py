"""Estimates as a table for people and as JSON for tools. No jax, no matplotlib: `jaxtrain plan` must answer at once."""

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from jaxtrain.plan.report.rows import Section, brief, bubble_seconds, headings, labels, remarks, sections
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.time.record import StepTime
from jaxtrain.runtime.files import strict_json

_WIDTH = 120
_MOST_COLUMNS = 4
_LABEL_WIDTH = {1: 30, 2: 30, 3: 30, 4: 24}
# Of a single estimate: shares would otherwise stand far from what they are shares of.
_SINGLE_WIDTH = 64
_GAP = "  "


def table(estimates: Sequence[Estimate], *, full: bool = True) -> str:
    """Estimates side by side, for people: a column each, or one column with shares. Advice comes first.

    Args:
        estimates: one or more; more than four take several tables.
        full: whether all rows are shown, or those that most people ask for.

    Returns:
        Lines of at most 120 characters, without a line end after the last.
    """
    if not estimates:
        return "nothing to show"
    # Even tables: five estimates are better read as three and two than as four and one.
    num_tables = math.ceil(len(estimates) / _MOST_COLUMNS)
    names, blocks, start = labels(estimates), [], 0
    for index in range(num_tables):
        end = start + len(estimates) // num_tables + (index < len(estimates) % num_tables)
        some = estimates[start:end]
        shown = sections(some, like=estimates)
        blocks.append(_lay_out(headings(some, names[start:end]), shown if full else brief(shown)))
        start = end
    for title, lines in remarks(estimates):
        wrapped = (textwrap.fill(line, _WIDTH, initial_indent="- ", subsequent_indent="  ") for line in lines)
        blocks.insert(0 if title == "advice" else len(blocks), "\n".join([title, *wrapped]))
    return "\n\n".join(blocks)


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Everything an estimate says, with what follows from it, in types of strict JSON.

    Returns:
        Nested objects; units are in the keys, and infinities are null.
    """
    memory, time, cost = estimate.memory, estimate.time, estimate.cost
    return strict_json(
        {
            "target": {"name": estimate.target.name, **dataclasses.asdict(estimate.target)},
            "config": estimate.config.model_dump(mode="json"),
            "degrees": estimate.degrees,
            "workload": {
                **dataclasses.asdict(estimate.workload),
                "sequence_length": estimate.workload.sequence_length,
                "tokens": estimate.workload.tokens,
                "row_bytes": estimate.workload.row_bytes,
            },
            "num_parameters": estimate.num_parameters,
            "fits": estimate.fits,
            "memory": {
                "parts_bytes": memory.parts,
                "total_bytes": memory.total_bytes,
                "state_bytes": memory.state_bytes,
                "host_parts_bytes": memory.host_parts,
                "capacity_bytes": memory.capacity_bytes,
                "reserved_bytes": memory.reserved_bytes,
                "usable_bytes": memory.usable_bytes,
                "capacity_fraction": memory.total_bytes / memory.capacity_bytes if memory.capacity_bytes else None,
                "fits": memory.fits,
                "is_complete": memory.is_complete,
            },
            "exact": None if estimate.exact is None else dataclasses.asdict(estimate.exact),
            "exact_missing": estimate.exact_missing,
            "time": None if time is None else _time_json(estimate, time),
            "cost": None if cost is None else dataclasses.asdict(cost),
            "unknown": estimate.unknown,
            "fitted": estimate.fitted,
            "notes": estimate.notes,
            "advice": estimate.advice,
        }
    )


def _time_json(estimate: Estimate, time: StepTime) -> dict[str, Any]:
    values = dataclasses.asdict(time)
    blocks = [{**dataclasses.asdict(one), "intensity_flops_per_byte": one.intensity} for one in time.blocks]
    return {
        **values,
        "blocks": blocks,
        "bubble_seconds": bubble_seconds(time),
        "exposed_traffic_seconds": sum(one.exposed_seconds for one in time.traffic),
        "tokens_per_second": estimate.tokens_per_second,
        "rows_per_second": estimate.rows_per_second,
    }


def _lay_out(heads: Sequence[str], parts: Sequence[Section]) -> str:
    """Columns as wide as they must be, cells wrapped where all of them would be too wide together."""
    is_single = heads[-1] == "share"
    widths = _widths(heads, parts)
    label_width = _label_width(heads, parts)
    lines = _wrapped("", heads, widths, label_width)
    for section in parts:
        lines.append("")
        lines.append(section.title)
        for row in section.rows:
            cells = [*row.cells[:-1], f"{row.cells[-1]:>{widths[-1]}}"] if is_single else row.cells
            lines += _wrapped("  " + row.label, cells, widths, label_width)
    return "\n".join(line.rstrip() for line in lines)


def _label_width(heads: Sequence[str], parts: Sequence[Section]) -> int:
    return min(_LABEL_WIDTH[len(heads)], 2 + max(len(row.label) for section in parts for row in section.rows))


def _widths(heads: Sequence[str], parts: Sequence[Section]) -> list[int]:
    columns = list(zip(heads, *(row.cells for section in parts for row in section.rows), strict=True))
    wanted = [max(len(cell) for cell in column) for column in columns]
    if heads[-1] == "share":
        wanted[0] = min(wanted[0], _SINGLE_WIDTH)
    left = _WIDTH - _label_width(heads, parts) - len(heads) * len(_GAP)
    widths = []
    # The narrowest first: what they do not need goes to the others.
    for index, want in sorted(enumerate(wanted), key=lambda item: item[1]):
        widths.append((index, min(want, left // (len(wanted) - len(widths)))))
        left -= widths[-1][1]
    return [width for _, width in sorted(widths)]


def _wrapped(label: str, cells: Sequence[str], widths: Sequence[int], label_width: int) -> list[str]:
    columns = [textwrap.wrap(label, label_width, subsequent_indent="    ", drop_whitespace=True)]
    if label.startswith("  ") and columns[0]:
        columns[0][0] = "  " + columns[0][0].lstrip()
    for cell, width in zip(cells, widths, strict=True):
        columns.append([cell] if len(cell) <= width else textwrap.wrap(cell.strip(), width))
    height = max(len(column) for column in columns)
    lines = []
    for index in range(height):
        shown = [column[index] if index < len(column) else "" for column in columns]
        fitted = zip(shown, (label_width, *widths), strict=True)
        lines.append(_GAP.join(text.ljust(width) for text, width in fitted))
    return lines
