"""Streams of tokens as parts of a data set: what their rows are made of, and which tokens are kept for evaluation."""

from dataclasses import dataclass

from jaxtrain.config.data import Corruption, DocumentsData, JsonlData, MixtureData, TextData, TokenData
from jaxtrain.data.text.corrupt import Noise, noise_of, stream_length
from jaxtrain.data.tokenizer import ByteTokenizer, Tokenizer
from jaxtrain.data.tokens import Span, TokenSource, split_tokens
from jaxtrain.errors import DataError


def row_length(configured: int | None, default: int | None) -> int:
    """Returns the tokens per row: the configured number, or else that of the model.

    Raises:
        DataError: Neither is given.
    """
    length = configured or default
    if length is None:
        raise DataError("data.sequence_length is null and the model has no max_sequence_length; set it, such as 256")
    return length


@dataclass(frozen=True)
class RowForm:
    """What rows are made of a stream of tokens.

    Attributes:
        source: The stream, or the first of several.
        length: L, tokens of the inputs.
        corruption, noise: What is hidden; None: rows predict the next token.
        seed: Decides what is hidden in training.
    """

    source: TokenSource
    length: int
    corruption: Corruption | None
    noise: Noise | None
    seed: int

    @property
    def stream_length(self) -> int:
        """Tokens of the stream that a row takes."""
        return self.length if self.noise is None else stream_length(self.noise, self.length)


def row_form(
    config: TextData | JsonlData | DocumentsData | TokenData | MixtureData,
    source: TokenSource,
    default: int | None,
    seed: int,
) -> RowForm:
    """Finds what rows are made of a stream.

    Args:
        config: The data.
        source: The stream, or the first of several.
        default: Tokens per row where the config does not say it.
        seed: Decides what is hidden in training.

    Raises:
        DataError: There is no length, or a special token is missing.
    """
    length = row_length(config.sequence_length, default)
    tokenizer = None if isinstance(config, TokenData) else config.tokenizer
    noise = noise_of(config, source, tokenizer, sequence_length=length)
    return RowForm(source, length, config.corruption, noise, seed)


@dataclass(frozen=True)
class Part:
    """A token source and its two spans.

    Attributes:
        source: The stream.
        train: Its training tokens.
        validation: The tokens kept for evaluation; None: none are.
    """

    source: TokenSource
    train: Span
    validation: Span | None


def split(source: TokenSource, rows: RowForm, validation_fraction: float) -> Part:
    """Splits a stream into training tokens and tokens for evaluation.

    Args:
        source: The stream.
        rows: What rows are made of it.
        validation_fraction: Fraction of the tokens for evaluation.

    Raises:
        DataError: There are too few tokens for a row in each part.
    """
    train, validation = split_tokens(
        source, sequence_length=rows.stream_length, validation_fraction=validation_fraction
    )
    return Part(source, train, validation)


def spans(part: Part) -> list[list[int]]:
    """Returns the first token and the end of each span, as JSON values."""
    return [[span.start, span.stop] for span in (part.train, part.validation) if span is not None]


def describe(part: Part, *, share: float | None) -> str:
    """Returns a line about a part.

    Args:
        part: Which one.
        share: Its share of the training rows; None: it is the only part.
    """
    documents = "" if part.source.num_documents is None else f"{part.source.num_documents:,} documents, "
    weight = "" if share is None else f" ({share:.0%} of the rows)"
    validation = 0 if part.validation is None else part.validation.stop - part.validation.start
    return (
        f"{part.source.label}{weight}: {documents}{part.source.num_tokens:,} tokens, "
        f"{validation:,} of them for validation"
    )


def tokenizer_lines(tokenizer: Tokenizer | None, vocab_size: int) -> list[str]:
    """Returns a line about a tokenizer."""
    kind = "none" if tokenizer is None else "bytes" if isinstance(tokenizer, ByteTokenizer) else "byte-level BPE"
    return [f"tokenizer: {kind}, {vocab_size:,} ids"]
