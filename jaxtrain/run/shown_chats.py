"""What the report shows of the rows of a run on chats: the first conversations with the tokens that have a loss."""

from typing import Any

from jaxtrain.data import Data
from jaxtrain.data.shown import ShownPart, shown_rows

_MOST_ROWS = 4
# Enough to read, few enough for a small page.
_MOST_PARTS, _MOST_CHARACTERS = 4, 3000


def shown_chats(data: Data) -> dict[str, Any] | None:
    """Returns JSON values for `rows.json`; None for data without conversations.

    Args:
        data: of the run.
    """
    if data.counts is None:
        return None
    rows = shown_rows(data.train, _MOST_ROWS, data.tokenizer)
    parts = [(row.number, part) for row in rows for part in row.parts][:_MOST_PARTS]
    return {
        "description": list(data.description),
        "counts": data.counts,
        "parts": [{"row": number, **_part(part)} for number, part in parts],
    }


def _part(part: ShownPart) -> dict[str, Any]:
    spans, left = [], _MOST_CHARACTERS
    for span in part.spans:
        spans.append({"text": span.text[:left], "trained": span.trained})
        left -= len(span.text)
        if left <= 0:
            spans.append({"text": " [...]", "trained": False})
            break
    return {"name": part.name, "tokens": part.tokens, "trained": part.trained, "spans": spans}
