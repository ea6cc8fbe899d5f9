"""Small HTML cards by which a notebook shows records: a title, facts, a table. No jax here."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

_MOST_ROWS = 40
_CELL = "padding:0.1em 0.8em 0.1em 0;text-align:left;vertical-align:top"


def card(title: str, facts: Mapping[str, object], *, body: str = "") -> str:
    """Returns a card as self-contained HTML.

    Args:
        title: What is shown, as text.
        facts: Name -> value, as text; None and empty texts are left out.
        body: HTML below the facts.
    """
    rows = [(name, value) for name, value in facts.items() if value not in (None, "")]
    return (
        f'<div class="jaxtrain-card" style="font-size:0.9em"><strong>{escape(title)}</strong>'
        f"{table((), rows)}{body}</div>"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, most: int = _MOST_ROWS) -> str:
    """Returns a table as HTML; empty without rows.

    Args:
        header: Names of the columns; empty: none are shown.
        rows: Cells as text.
        most: Number of rows that are shown; a line below says how many there are besides.
    """
    listed = list(rows)
    if not listed:
        return ""
    lines = []
    if header:
        lines.append("<tr>" + "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in header) + "</tr>")
    for row in listed[:most]:
        cells = "".join(f'<td style="{_CELL}">{escape(str(value))}</td>' for value in row)
        lines.append(f"<tr>{cells}</tr>")
    more = f"<p>and {len(listed) - most:,} more</p>" if len(listed) > most else ""
    return f'<table style="border-collapse:collapse;margin:0.3em 0">{"".join(lines)}</table>{more}'
