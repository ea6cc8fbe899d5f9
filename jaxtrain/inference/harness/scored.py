"""Texts of an evaluation as tokens: what is scored, and after which context. No jax here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtrain.errors import DataError

# Widths of the arrays of scored tokens, so that few shapes are compiled: a word, a sentence, then powers of two.
_WIDTHS = (8, 64, 512)
_SHORTEST_ROW = 32
# Tokens of a batch on one device, and the most rows of one.
_TOKENS = 8192
_MOST_ROWS = 64


@dataclass(frozen=True)
class Scored:
    """A row of which the last tokens are scored.

    Attributes:
        inputs: what the model reads, at least as many ids as are scored.
        targets: the scored tokens; the last input predicts the last of them.
    """

    inputs: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class ScoredBatch:
    """Rows that are computed together.

    Attributes:
        rows: indices of the requests.
        length: tokens that the inputs are padded to.
        width: scored tokens that the targets are padded to.
        size: rows that the batch is padded to.
    """

    rows: tuple[int, ...]
    length: int
    width: int
    size: int


def scored_pair(context: Sequence[int], continuation: Sequence[int], *, max_length: int) -> Scored:
    """Makes the row of a continuation; what the model has no positions for is cut from the left of the context.

    Args:
        context: Ids, at least one.
        continuation: Ids, at least one.
        max_length: Positions of the model.

    Raises:
        DataError: The continuation alone exceeds the positions.
    """
    if len(continuation) > max_length:
        raise DataError(
            f"a continuation of {len(continuation)} tokens exceeds the model's {max_length} positions; shorten it, or "
            "let the task score it as a whole text (output_type: loglikelihood_rolling)"
        )
    # The last token is predicted, and never read.
    ids = [*context, *continuation][-(max_length + 1) :]
    return Scored(tuple(ids[:-1]), tuple(continuation))


def scored_windows(ids: Sequence[int], *, prefix: int, max_length: int) -> list[Scored]:
    """Makes the rows of a whole text: each predicts as many tokens as the model has positions, the last one the rest.

    Every token is predicted once. The last row has as much context as there are positions, as the harness has it.

    Args:
        ids: Of the text; none give no row.
        prefix: Id after which the first token is predicted.
        max_length: Positions of the model.
    """
    row = (prefix, *ids)
    ends = [min(start + max_length, len(ids)) for start in range(0, len(ids), max_length)]
    starts = range(0, len(ids), max_length)
    return [
        Scored(row[max(0, end - max_length) : end], tuple(ids[start:end]))
        for start, end in zip(starts, ends, strict=True)
    ]


def batches_of(
    rows: Sequence[Scored], *, max_length: int, short_length: int | None, shards: int, largest: int | None
) -> Iterator[ScoredBatch]:
    """Puts rows of similar lengths together, the longest first, in few different shapes.

    Args:
        rows: What is scored.
        max_length: Positions of the model.
        short_length: As `Decoder.short_length`: shorter rows are in no batch that is longer.
        shards: Into which the rows of a batch must divide.
        largest: Rows of a batch, at most; None: as many as hold 8,192 tokens for each shard.

    Yields:
        Every row in one of the batches.
    """
    is_long = [short_length is not None and len(row.inputs) > short_length for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].inputs), rows[i].inputs, rows[i].targets))
    at = 0
    while at < len(order):
        first = order[at]
        room = max_length if short_length is None or is_long[first] else short_length
        length = min(power_of_two(len(rows[first].inputs), _SHORTEST_ROW), room)
        most = (
            shards * max(1, min(_MOST_ROWS, _TOKENS // length)) if largest is None else -(-largest // shards) * shards
        )
        taken = [i for i in order[at : at + most] if is_long[i] == is_long[first]]
        at += len(taken)
        width = _width(max(len(rows[i].targets) for i in taken))
        yield ScoredBatch(tuple(taken), length, width, min(most, shards * power_of_two(-(-len(taken) // shards), 1)))


def _width(count: int) -> int:
    return next((width for width in _WIDTHS if count <= width), power_of_two(count, _WIDTHS[-1]))


def power_of_two(count: int, least: int) -> int:
    """The smallest of `least`, twice as much, and so on that is at least `count`."""
    while least < count:
        least *= 2
    return least
