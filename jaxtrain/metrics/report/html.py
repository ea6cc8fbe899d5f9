"""What every page is made of: its frame, escaped text, tables, numbers as people read them."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from jaxtrain.metrics.report.style import REPORT_STYLE, STYLE


class Markup(str):
    """Text that is HTML already."""


def page(title: str, sections: Iterable[str]) -> str:
    """Make a complete page: the title of its window, not escaped, and HTML in its order."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)} - jaxtrain</title>\n<style>{STYLE}{REPORT_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(title: str, body: str) -> str:
    """Make a section with a heading; nothing where it has no body."""
    return f"<section><h2>{text(title)}</h2>{body}</section>" if body else ""


def soft(words: str) -> str:
    """A paragraph in a soft colour; nothing without words."""
    return f'<p class="soft">{text(words)}</p>' if words else ""


def word_list(lines: Iterable[tuple[str, str]]) -> str:
    """Sentences below one another, each (good, bad or empty, sentence)."""
    items = "".join(f'<li class="{kind}">{text(line)}</li>' for kind, line in lines)
    return f'<ul class="words">{items}</ul>' if items else ""


def folded(summary: str, body: str) -> str:
    """Fold a part of the page under one line; a reader opens it."""
    return f"<details><summary>{text(summary)}</summary>{body}</details>"


def facts(rows: Mapping[str, Any]) -> str:
    """Make a table of keys and values; rows without a value are left out, a list of texts has one line per text."""
    cells = []
    for key, value in rows.items():
        if value in (None, "", [], ()):
            continue
        lines = value if isinstance(value, list) and all(isinstance(item, str) for item in value) else [value]
        shown = "<br>".join(text(one if isinstance(one, str) else json.dumps(one, default=str)) for one in lines)
        cells.append(f'<tr><th scope="row">{breakable(key)}</th><td>{shown}</td></tr>')
    return f'<table class="facts">{"".join(cells)}</table>' if cells else ""


def grid(header: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[int] = ()) -> str:
    """Make a table, which scrolls on its own where the page is narrow; a cell that is a `Markup` is HTML.

    The columns `numbers` are aligned to the right.
    """
    kinds = [' class="n"' if column in numbers else "" for column in range(len(header))]
    top = "".join(f'<th scope="col"{kind}>{text(name)}</th>' for kind, name in zip(kinds, header, strict=True))
    body = ""
    for row in rows:
        cells = (cell if isinstance(cell, Markup) else breakable(cell) for cell in row)
        body += f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in zip(kinds, cells, strict=True))}</tr>"
    return f'<div class="wide"><table class="grid"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def text(value: object) -> str:
    """Escape a text for HTML; control characters, which a sample of raw bytes may hold, become visible characters."""
    shown = "".join(character if character >= " " or character in "\n\t" else "\ufffd" for character in str(value))
    return escape(shown, quote=True)


def breakable(value: object) -> str:
    """Escape a text whose lines may break after the `/`, `.` and `_` of a path, which has no spaces."""
    if re.fullmatch(r"[-+]?[\d,.]+(e[-+]?\d+)?( \S+)?", str(value)):
        return text(value)
    return re.sub(r"([/._])(?=\w)", r"\1<wbr>", text(value))


def rounded(value: float | None) -> str | None:
    """A number with four digits; None stays None."""
    return None if value is None else f"{value:.4g}"


def mapping(value: object) -> Mapping[str, Any]:
    """The value where it is a mapping, else an empty one: a page shows what it can of a damaged record."""
    return value if isinstance(value, Mapping) else {}


def number(value: object) -> float | int | None:
    """The value where it is a number, else None."""
    return value if isinstance(value, (int, float)) else None


def moment(value: object) -> str:
    """A time of `run.json` as people read it; empty where it is none."""
    try:
        return datetime.fromisoformat(str(value)).strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    except ValueError:
        return ""
