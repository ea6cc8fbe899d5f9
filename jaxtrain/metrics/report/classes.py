"""What a classifier gets wrong: the confusion matrix, or the largest confusions in words, and the worst mistakes."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.metrics.report.files import RunFiles, read_json
from jaxtrain.metrics.report.html import mapping, number, rounded, section, text

_MOST_CLASSES = 20
_MOST_CONFUSIONS = 10
_LONG_NAME = 5


def mistakes(run: RunFiles) -> str:
    """Make the section from `held_out.json`; nothing where the run has no such file, or a damaged one."""
    found = read_json(run.run_dir / "held_out.json")
    if found.get("task") != "classification" or not _is_count(found.get("rows")):
        return ""
    rows, right = int(found["rows"]), number(found.get("right")) or 0
    of_rows = number(found.get("of_rows")) or rows
    read = int(number(found.get("read")) or rows)
    ignored = read - rows
    part = f"among {read:,} spread over {of_rows:,}" if ignored > 0 else f"spread over {of_rows:,}"
    some = f" ({part})" if of_rows > read else ""
    step = number(found.get("step"))
    past = step is not None and run.last_step is not None and run.last_step > step
    when = "" if step is None else f" after step {int(step):,}" + (", an earlier end of this run" if past else "")
    note = f"{int(right):,} of {rows:,} held-out rows{some} were classified correctly{when}."
    if ignored > 0:
        more = "1 further row is" if ignored == 1 else f"{ignored:,} further rows are"
        note += f" {more} not counted, for an ignored target or the weight 0."
    if found.get("has_weights") is True:
        note += " Rows are counted here without their weights; the held-out accuracy weighs them."
    names = _names(found)
    matrix, confusions = _matrix(found, names), _confusions(found, names)
    worst = _worst(found, names)
    body = f'<p class="soft">{text(note)}</p>'
    if right == rows:
        return section("Mistakes", body)
    columns = [part for part in (matrix + confusions, worst) if part]
    return section("Mistakes", body + f'<div class="beside">{"".join(f"<div>{part}</div>" for part in columns)}</div>')


def _names(found: Mapping[str, Any]) -> Sequence[str] | None:
    names = found.get("classes")
    return [str(name) for name in names] if isinstance(names, list) else None


def _class(names: Sequence[str] | None, number: int) -> str:
    return names[number] if names is not None and 0 <= number < len(names) else str(number)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _cells(found: Mapping[str, Any], key: str) -> list[tuple[int, int, int]]:
    cells = found.get(key)
    return [
        (cell[0], cell[1], cell[2])
        for cell in (cells if isinstance(cells, list) else ())
        if isinstance(cell, list) and len(cell) == 3 and all(map(_is_count, cell))
    ]


def _matrix(found: Mapping[str, Any], names: Sequence[str] | None) -> str:
    """Make the table of counts, a row per class and a column per prediction, shaded by the share of the row."""
    count = number(found.get("num_classes")) or 0
    cells = {(target, predicted): number for target, predicted, number in _cells(found, "matrix")}
    if not cells or not 2 <= count <= _MOST_CLASSES:
        return ""
    classes = range(int(count))
    # Long names would make the columns wide: these have the numbers of the classes, which the rows explain.
    is_numbered = names is not None and any(len(_class(names, i)) > _LONG_NAME for i in classes)
    heads = [str(i) if is_numbered else _class(names, i) for i in classes]
    head = "".join(
        f'<th scope="col" title="{text(_class(names, i))}">{text(shown)}</th>' for i, shown in enumerate(heads)
    )
    lines = []
    for target in classes:
        whole = sum(cells.get((target, predicted), 0) for predicted in classes)
        row = []
        for predicted in classes:
            number_here = cells.get((target, predicted), 0)
            share = number_here / whole if whole else 0.0
            color = "var(--series-1)" if target == predicted else "var(--series-2)"
            # The square root lifts the few mistakes of a good classifier above the page's colour.
            strength = round(70 * math.sqrt(share))
            title = f"{_class(names, target)} taken for {_class(names, predicted)}: {number_here} of {whole}"
            style = f' style="background:color-mix(in srgb,{color} {strength}%,transparent)"' if number_here else ""
            row.append(f'<td{style} title="{text(title)}">{number_here or "·"}</td>')
        label = text(_class(names, target))
        number_first = f"{target} " if is_numbered else ""
        lines.append(f'<tr><th scope="row" title="{label}">{number_first}{label}</th>{"".join(row)}</tr>')
    return (
        '<h3>Confusion matrix</h3><p class="soft">A row is a class, a column what the model took it for.</p>'
        f'<div class="wide"><table class="matrix"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _confusions(found: Mapping[str, Any], names: Sequence[str] | None) -> str:
    """Say the largest confusions in words where the classes are too many for a matrix."""
    if found.get("matrix") is not None:
        return ""
    cells = _cells(found, "confusions")[:_MOST_CONFUSIONS]
    items = "".join(
        f"<li>{text(_class(names, target))} taken for {text(_class(names, predicted))}: "
        f"{count:,} {'time' if count == 1 else 'times'}</li>"
        for target, predicted, count in cells
    )
    return f'<h3>Most frequent confusions</h3><ul class="words">{items}</ul>' if items else ""


def _worst(found: Mapping[str, Any], names: Sequence[str] | None) -> str:
    listed = found.get("mistakes")
    items = []
    for one in map(mapping, listed if isinstance(listed, list) else ()):
        row, target, predicted = (one.get(key) for key in ("row", "target", "predicted"))
        if not (isinstance(row, int) and isinstance(target, int) and isinstance(predicted, int)):
            continue
        sure = number(one.get("confidence"))
        shown = picture(one.get("picture"), f"held-out row {row}")
        said = f", {100 * sure:.0f} % sure" if sure is not None else ""
        items.append(
            f"<li>{shown}<b>{text(_class(names, target))}</b> taken for "
            f"<b>{text(_class(names, predicted))}</b>{said}<br>"
            f'<span class="soft">row {row:,}, loss {rounded(number(one.get("loss"))) or "not finite"}</span></li>'
        )
    if not items:
        return ""
    return (
        '<h3>Worst mistakes</h3><p class="soft">The wrong predictions of the largest loss; rows are '
        f'numbered within the held-out rows, from 0.</p><ul class="mistakes">{"".join(items)}</ul>'
    )


def picture(encoded: object, said: str) -> str:
    """A PNG in base64 as an image, which `said` describes; nothing where it is none."""
    # Only what base64 is made of: nothing else can end the attribute.
    if not isinstance(encoded, str) or re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", encoded) is None:
        return ""
    return f'<img alt="{text(said)}" src="data:image/png;base64,{encoded}">'
