"""Rows of tokens as people read them: the text of each conversation, in parts with and without a loss.

Shapes: L tokens per row.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxtrain.data.rows import Row
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.errors import DataError


@dataclass(frozen=True)
class ShownSpan:
    """Neighbouring tokens that all have a loss, or all have none.

    Attributes:
        text: What they say; their ids where there is no tokenizer.
        ids: The tokens.
        trained: Whether they have a loss.
    """

    text: str
    ids: tuple[int, ...]
    trained: bool


@dataclass(frozen=True)
class ShownPart:
    """A conversation, an answer of a pair, or a stretch of running text.

    Attributes:
        name: What it is.
        spans: Its tokens in their order; those that fill a row up are left out.
        tokens: How many tokens it has.
        trained: How many of them have a loss.
        places: How many of the row's L places it takes.
    """

    name: str
    spans: tuple[ShownSpan, ...]
    tokens: int
    trained: int
    places: int


@dataclass(frozen=True)
class ShownRow:
    """A row.

    Attributes:
        number: Which one of the training rows.
        length: L, of each answer for a pair.
        parts: What it holds.
    """

    number: int
    length: int
    parts: tuple[ShownPart, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the row as JSON values."""
        return asdict(self)


def shown_row(row: Row, number: int, tokenizer: Tokenizer | None) -> ShownRow:
    """Reads a row whose targets are its tokens one place later.

    Args:
        row: `inputs` [L], or `tokens` and `segments` [L], or a pair [2, L]; `targets` and optional `weights` alike.
        number: Of the row.
        tokenizer: Made its ids; None: the ids are shown.

    Raises:
        DataError: The row is of another form.
    """
    inputs: Any = row.get("inputs")
    targets: Any = row.get("targets")
    segments: Any = None
    if isinstance(inputs, Mapping):
        segments, inputs = inputs.get("segments"), inputs.get("tokens")
    shape = getattr(inputs, "shape", None)
    if shape is None or not np.issubdtype(inputs.dtype, np.integer) or shape != getattr(targets, "shape", None):
        raise DataError("rows are shown where their targets are tokens, one for each token of the inputs")
    trained = np.asarray(targets) >= 0
    if row.get("weights") is not None:
        trained &= np.broadcast_to(np.asarray(row["weights"]) > 0, shape)
    if len(shape) == 2 and shape[0] == 2:
        names = ("chosen", "rejected")
        parts = [_part(name, inputs[i], targets[i], trained[i], tokenizer) for i, name in enumerate(names)]
    elif len(shape) != 1:
        raise DataError("rows are shown where they hold one list of tokens, or two of a pair")
    elif segments is None:
        parts = [_part("text", inputs, targets, trained, tokenizer)]
    else:
        parts = []
        for segment in range(1, int(segments.max(initial=0)) + 1):
            here = segments == segment
            parts.append(_part(f"conversation {segment}", inputs[here], targets[here], trained[here], tokenizer))
    return ShownRow(number, shape[-1], tuple(parts))


def shown_rows(rows: Any, count: int, tokenizer: Tokenizer | None) -> Iterator[ShownRow]:
    """Yields the first rows of a source.

    Args:
        rows: Any rows with an index.
        count: How many at most.
        tokenizer: As for `shown_row`.

    Raises:
        DataError: As for `shown_row`.
    """
    for number in range(min(count, len(rows))):
        yield shown_row(rows[number], number, tokenizer)


def _part(
    name: str, inputs: np.ndarray, targets: np.ndarray, trained: np.ndarray, tokenizer: Tokenizer | None
) -> ShownPart:
    if trained.any():
        # What follows the last token with a loss fills the row up.
        end = int(np.flatnonzero(trained)[-1]) + 1
        inputs, targets, trained = inputs[:end], targets[:end], trained[:end]
    ids = np.concatenate([inputs[:1], targets])
    # A target that is left out by a negative number is still there as the next input.
    ids[1:-1] = inputs[1:]
    has_loss = np.concatenate([[False], trained])
    borders = [0, *(np.flatnonzero(np.diff(has_loss)) + 1).tolist(), len(ids)]
    spans = [_span(ids[a:b].tolist(), bool(has_loss[a]), tokenizer) for a, b in itertools.pairwise(borders)]
    return ShownPart(name, tuple(spans), len(ids), int(has_loss.sum()), len(inputs))


def _span(ids: list[int], trained: bool, tokenizer: Tokenizer | None) -> ShownSpan:
    text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
    return ShownSpan(text, tuple(ids), trained)
