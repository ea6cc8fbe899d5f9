"""What a run on chats read: its first conversations as the model saw them, and what was cut or dropped."""

from typing import Any

from jaxtrain.metrics.report.files import RunFiles, read_json
from jaxtrain.metrics.report.html import mapping, number, section, text

# Key of the counts -> what a reader calls it.
_COUNTS = {"conversations": "conversations", "pairs": "pairs of answers", "tokens": "tokens"}


def chats(run: RunFiles) -> str:
    """Make the section from `rows.json`; nothing where the run has no such file, or a damaged one."""
    found = read_json(run.run_dir / "rows.json")
    parts = [mapping(part) for part in found.get("parts") or ()] if isinstance(found.get("parts"), list) else []
    if not parts:
        return ""
    key = (
        '<p class="key"><b class="trained">tokens with a loss</b> and <span class="untrained">tokens that the model '
        "only reads</span></p>"
    )
    shown = "".join(_part(part) for part in parts)
    return section("Rows as the model sees them", f"{_counts(mapping(found.get('counts')))}{key}{shown}")


def _counts(counts: Any) -> str:
    said = [f"{value:,} {name}" for key, name in _COUNTS.items() if (value := number(counts.get(key))) is not None]
    tokens, trained = number(counts.get("tokens")), number(counts.get("trained_tokens"))
    if tokens and trained is not None:
        said.append(f"{100 * trained / tokens:.0f} % of them with a loss")
    length = number(counts.get("row_length"))
    if length is not None:
        cut, dropped = (int(number(counts.get(key)) or 0) for key in ("cut", "dropped"))
        said.append(f"{cut:,} cut to {length:,} tokens, {dropped:,} dropped")
    return f"<p>{text(', '.join(said))}.</p>" if said else ""


def _part(part: Any) -> str:
    spans = [mapping(span) for span in part.get("spans") or ()]
    words = "".join(
        f'<span class="{"trained" if span.get("trained") else "untrained"}">{text(span.get("text", ""))}</span>'
        for span in spans
    )
    sizes = f"{number(part.get('tokens')) or 0:,} tokens, {number(part.get('trained')) or 0:,} with a loss"
    title = f"row {number(part.get('row')) or 0}, {part.get('name')}: {sizes}"
    return f'<figure class="chat"><figcaption>{text(title)}</figcaption><pre>{words}</pre></figure>'
