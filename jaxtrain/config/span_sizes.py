"""How many tokens, spans and targets a row of span corruption has. No jax here: the planner asks too."""

from dataclasses import dataclass

from jaxtrain.config.data import SpanCorruption
from jaxtrain.errors import DataError


@dataclass(frozen=True)
class SpanSizes:
    """Sizes of a row whose inputs are full.

    Attributes:
        num_tokens: Tokens of the stream.
        num_noise: Those in spans.
        num_spans: Spans.
        inputs_length: What is kept, a sentinel per span, and the end.
        targets_length: What is hidden, a sentinel per span, and the end.
    """

    num_tokens: int
    num_noise: int
    num_spans: int
    inputs_length: int
    targets_length: int


def span_sizes(corruption: SpanCorruption, sequence_length: int) -> SpanSizes:
    """Finds the largest number of tokens whose corrupted inputs fit into a row.

    Source: Raffel et al. 2020, section 3.1.4; inputs of 512 tokens are made of 568, and have targets of 114.

    Args:
        corruption: Density and mean length of the spans.
        sequence_length: Tokens of the inputs.

    Raises:
        DataError: The rows are too short for a span, or no number of tokens fills them exactly.
    """
    found, tokens = None, 2
    while (sizes := _sizes(corruption, tokens)).inputs_length <= sequence_length:
        found, tokens = sizes, tokens + 1
    if found is None or found.inputs_length != sequence_length:
        near = "at least 3" if found is None else str(found.inputs_length)
        raise DataError(
            f"data.sequence_length={sequence_length} cannot be filled with spans of data.corruption; set it to {near}"
        )
    return found


def _sizes(corruption: SpanCorruption, tokens: int) -> SpanSizes:
    noise = min(max(round(tokens * corruption.noise_density), 1), tokens - 1)
    # Every span is followed, and preceded, by at least one token that is kept.
    spans = min(max(round(noise / corruption.mean_span_length), 1), noise, tokens - noise)
    return SpanSizes(tokens, noise, spans, tokens - noise + spans + 1, noise + spans + 1)
