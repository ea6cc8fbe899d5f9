"""What every page is made of: its frame and style sheet, escaped text, tables, numbers as people read them."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

# Two columns on a desktop, one on a phone, in the reader's light or dark colours.
_STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --panel: #f5f6f8; --ink: #1d2430; --soft: #5b6472; --line: #d9dde3;
  --series-1: #1f5fbf; --series-2: #c8500a; --series-3: #1d7f4e; --series-4: #8a4fb0;
  --series-5: #8a6a00; --series-6: #b0306a; --series-7: #007c91; --series-8: #5b6472;
  --good: #1f7a45; --bad: #b3261e;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #14171c; --panel: #1d2229; --ink: #e4e8ee; --soft: #9aa4b2; --line: #343b46;
    --series-1: #6ea8ff; --series-2: #ffa366; --series-3: #6fd19c; --series-4: #c99bea;
    --series-5: #e0c050; --series-6: #ff8fbc; --series-7: #56cfe1; --series-8: #b4bcc8;
    --good: #6fd19c; --bad: #ff8a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1140px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .7rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; }
header p { color: var(--soft); margin: .3rem 0 0; }
.status {
  font-size: .8rem; font-weight: 600; vertical-align: middle; white-space: nowrap;
  padding: .15rem .6rem; border-radius: 1rem; border: 1px solid currentColor;
}
.good { color: var(--good); } .bad { color: var(--bad); } .plain { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1.3rem 0 0; }
.cards div { background: var(--panel); border-radius: .5rem; padding: .6rem .8rem; }
.cards dd { margin: 0; font-size: 1.4rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.cards dt { color: var(--soft); font-size: .85rem; }
pre {
  background: var(--panel); border-radius: .5rem; padding: 1rem; margin: 0; max-height: 32rem; overflow: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; font: .88rem/1.5 ui-monospace, Menlo, Consolas, monospace;
}
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1.2rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: .2rem; }
svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); }
th { width: 50%; font-weight: 400; color: var(--soft); overflow-wrap: anywhere; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
section > .facts th, details > .facts th { width: 11rem; }
@media (max-width: 30rem) { section > .facts th, details > .facts th { width: 38%; } }
.cards { grid-template-columns: repeat(auto-fill, minmax(8.4rem, 1fr)); }
.soft { color: var(--soft); fill: var(--soft); } p { margin: .3rem 0 .7rem; max-width: 62rem; }
.words { margin: 1.1rem 0 0; padding: 0; list-style: none; }
.words li { margin: .35rem 0; padding-left: .8rem; border-left: 3px solid var(--line); max-width: 62rem; }
.words .good { border-color: var(--good); color: inherit; } .words .bad { border-color: var(--bad); color: inherit; }
.wide { overflow-x: auto; }
.grid th { width: auto; color: var(--soft); font-weight: 600; white-space: nowrap; }
.grid td { overflow-wrap: break-word; }
.grid td:not(.n) { min-width: 6.5rem; } .grid .n { text-align: right; white-space: nowrap; }
.grid th, .grid td { padding-right: 1rem; } .grid th:last-child, .grid td:last-child { padding-right: 0; }
details { margin: .6rem 0; } summary { cursor: pointer; padding: .2rem 0; color: var(--soft); }
.prompt { color: var(--series-2); } .sample { color: var(--ink); }
.key { font-size: .85rem; color: var(--soft); } .key b { font-weight: 600; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.hits rect { fill: transparent; } .hits rect:hover { fill: var(--ink); opacity: .08; }
.bar { display: flex; height: 1.7rem; border-radius: .35rem; overflow: hidden; margin: .4rem 0 .6rem; }
.bar span { min-width: 1px; border-right: 1px solid var(--page); }
.bar-key { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 15rem), 1fr)); gap: .15rem 1.2rem;
  margin: 0; padding: 0; list-style: none; font-size: .88rem; font-variant-numeric: tabular-nums; }
.bar-key i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .45rem; }
@media print {
  body { font-size: 11pt; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  main { max-width: none; padding: 0; } pre { max-height: none; } h2 { break-after: avoid; }
  figure, tr, .cards, .bar { break-inside: avoid; }
  .plots { grid-template-columns: 1fr 1fr; }
}
"""


class Markup(str):
    """Text that is HTML already."""


def page(title: str, sections: Iterable[str]) -> str:
    """Make a complete page: the title of its window, not escaped, and HTML in its order."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)} - jaxtrain</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
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
