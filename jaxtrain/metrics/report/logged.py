"""What callbacks logged beside numbers: the last histogram and the last image of each name."""

import json
from collections.abc import Mapping
from typing import Any

from jaxtrain.metrics.report.classes import picture
from jaxtrain.metrics.report.files import RunFiles
from jaxtrain.metrics.report.html import section, text

_MOST_SHOWN = 24
_WIDTH, _HEIGHT = 320, 90


def logged(run: RunFiles) -> str:
    """Make the section from metrics.jsonl; nothing where no callback logged any."""
    found: dict[str, tuple[int, Mapping[str, Any]]] = {}
    path = run.run_dir / "metrics.jsonl"
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                # Rows of numbers are by far the most.
                if '"counts"' in line or '"png"' in line:
                    found |= _of_row(line)
    figures = "".join(
        f"<figure><figcaption>{text(name)}, step {step:,}</figcaption>"
        f"{picture(value['png'], name) if 'png' in value else _bars(value)}</figure>"
        for name, (step, value) in list(found.items())[:_MOST_SHOWN]
    )
    rest = len(found) - _MOST_SHOWN
    note = f'<p class="soft">{rest} more are in metrics.jsonl.</p>' if rest > 0 else ""
    return section("Logged by callbacks", f'{note}<div class="plots">{figures}</div>' if figures else "")


def _of_row(line: str) -> dict[str, tuple[int, Mapping[str, Any]]]:
    try:
        row = json.loads(line)
    except ValueError:  # a kill in the middle of a line
        return {}
    return {name: (row["step"], value) for name, value in row.items() if isinstance(value, dict)}


def _bars(value: Mapping[str, Any]) -> str:
    counts, edges = value["counts"], value["edges"]
    highest, wide = max([*counts, 1]), _WIDTH / max(len(counts), 1)
    bars = "".join(
        f'<rect x="{place * wide:.1f}" y="{_HEIGHT * (1 - count / highest):.1f}" width="{wide:.1f}" '
        f'height="{_HEIGHT * count / highest:.1f}"/>'
        for place, count in enumerate(counts)
        if count
    )
    ends = f'<text y="{_HEIGHT + 14}" fill="var(--soft)">{edges[0]:.3g}</text>' + (
        f'<text x="{_WIDTH}" y="{_HEIGHT + 14}" text-anchor="end" fill="var(--soft)">{edges[-1]:.3g}</text>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 18}"><g fill="var(--series-1)">{bars}</g>{ends}</svg>'
