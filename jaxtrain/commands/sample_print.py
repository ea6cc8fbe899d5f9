"""Printing of texts as they are written, and of what the model thought of their tokens. No jax here."""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain.commands.output import print_table, print_text

if TYPE_CHECKING:
    from jaxtrain.inference.written import TokenScore, Written


def print_stream(written: "Iterable[Written]", count: int, *, scored: bool) -> None:
    """Print texts as they are written: those of a batch one after another, with an empty line between them.

    Args:
        written: of a batch.
        count: texts in it.
        scored: whether the log-probabilities of a text follow it.

    Raises:
        KeyboardInterrupt: Ctrl-C; the line is ended first.
    """
    waiting: list[list[str]] = [[] for _ in range(count)]
    scores: list[list[TokenScore]] = [[] for _ in range(count)]
    ended, current = [False] * count, 0
    begun = False
    try:
        for one in written:
            scores[one.row].extend(one.scores)
            ended[one.row] = ended[one.row] or one.ended
            waiting[one.row].append(one.text)
            while current < count:
                text = "".join(waiting[current])
                waiting[current].clear()
                if text:
                    print_text(text, end="", flush=True, is_content=True)
                    begun = True
                if not ended[current]:
                    break
                print_text("")
                begun = False
                if scored:
                    print_scores(scores[current])
                current += 1
                if current < count:
                    print_text("")
    except KeyboardInterrupt:
        if begun:
            print_text("", flush=True)
        raise


def gathered(written: "Iterable[Written]", count: int) -> "tuple[list[str], list[list[TokenScore]]]":
    """The texts of a batch, and the scores of their new tokens, when all are written."""
    texts: list[list[str]] = [[] for _ in range(count)]
    scores: list[list[TokenScore]] = [[] for _ in range(count)]
    for one in written:
        texts[one.row].append(one.text)
        scores[one.row].extend(one.scores)
    return ["".join(parts) for parts in texts], scores


def print_scores(scores: "Sequence[TokenScore]") -> None:
    """Print a table of tokens with their log-probabilities; texts are quoted as in JSON."""
    rows = []
    for one in scores:
        likeliest = "  ".join(f"{_quoted(text)} {value:.4f}" for text, value in one.top)
        rows.append([f"{one.log_probability:.4f}", _quoted(one.text), *([likeliest] if one.top else [])])
    width = max(map(len, rows), default=2)
    rows = [[*row, *[""] * (width - len(row))] for row in rows]
    print_table(["logprob", "token", "likeliest"][:width], rows)


def scores_json(scores: "Sequence[TokenScore]") -> list[dict[str, Any]]:
    """The scores of a text as JSON values."""
    return [
        {
            "token": one.text,
            "logprob": one.log_probability,
            "top_logprobs": [{"token": text, "logprob": value} for text, value in one.top],
        }
        for one in scores
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
