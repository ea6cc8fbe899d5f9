"""Token streams: text encoded into compact arrays, checked, and split into training and validation."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxtrain.config.data import JsonlData, TextData
from jaxtrain.data.documents import Documents, open_documents
from jaxtrain.data.tokenizer import Tokenizer, build_tokenizer, encode_all, tokenizer_sha256
from jaxtrain.errors import DataError

# Text encoded at a time: enough to use every core, little enough to keep the ids of it in Python objects.
_CHUNK_CHARACTERS = 4 * 2**20


@dataclass(frozen=True)
class TokenSource:
    """A stream of token ids and what is known of it.

    Attributes:
        segments: The stream, as consecutive integer arrays (possibly memory-mapped), [num_tokens_of_segment] each.
        vocab_size: One more than the largest id allowed.
        tokenizer: What made the ids, where that is known.
        label: Names the source in messages.
        num_documents: Documents in the stream, where that is known.
        identity: What identifies the stream, for the fingerprint.
    """

    segments: tuple[np.ndarray, ...]
    vocab_size: int
    tokenizer: Tokenizer | None
    label: str
    num_documents: int | None = None
    identity: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest type that holds every id: little-endian uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def encode_stream(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[np.ndarray]]:
    """Encodes documents a chunk at a time; each ends with the end-of-text id, or a newline where there is none.

    Yields:
        The ids of the documents of a chunk, [num_tokens] each.
    """
    mark = tokenizer.encode("\n") if tokenizer.end_of_text is None else np.array([tokenizer.end_of_text])
    dtype = token_dtype(tokenizer.vocab_size)
    for chunk in _chunks(texts):
        yield [np.concatenate([ids, mark]).astype(dtype) for ids in encode_all(tokenizer, chunk)]


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def text_source(config: TextData | JsonlData, *, tokenizer: Tokenizer | None = None) -> TokenSource:
    """Encodes a text source into memory.

    Args:
        config: Which text.
        tokenizer: Replaces the tokenizer of `config`.

    Raises:
        DataError: The text cannot be read, or there is none.
    """
    documents = open_documents(config)
    if tokenizer is None:
        tokenizer = build_tokenizer(config.tokenizer, documents.read())
    encoded: list[np.ndarray] = []
    num_documents = 0
    digest = hashlib.sha256()
    for chunk in encode_stream(documents.read(), tokenizer):
        num_documents += len(chunk)
        # One array a chunk, not one a document: a million short documents would cost 100 bytes each.
        encoded.append(np.concatenate(chunk))
        digest.update(encoded[-1].tobytes())
    if not encoded:
        raise DataError(f"{documents.label} holds no document; give a file with text")
    tokens = np.concatenate(encoded)
    return TokenSource(
        segments=(tokens,),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        label=documents.label,
        num_documents=num_documents,
        identity=_identity(config, documents, digest.hexdigest(), tokenizer),
    )


def _identity(config: TextData | JsonlData, documents: Documents, content: str, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "kind": config.kind,
        "files": [list(file) for file in documents.files],
        "tokens_sha256": content,
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
    }


@dataclass(frozen=True)
class Span:
    """Tokens start to stop of a stream."""

    start: int
    stop: int

    def num_rows(self, sequence_length: int) -> int:
        """Returns how many rows fit; a row needs one token more than its length, for the last target."""
        return max(0, (self.stop - self.start - 1) // sequence_length)


def split_tokens(source: TokenSource, *, sequence_length: int, validation_fraction: float) -> tuple[Span, Span | None]:
    """Keeps a share of the tokens, at the end, for evaluation: at least one row unless the share is 0.

    Raises:
        DataError: There are too few tokens for a row in each part.
    """
    total = source.num_tokens
    row = sequence_length + 1
    held_out = max(round(total * validation_fraction), row) if validation_fraction else 0
    if total - held_out < row:
        fix = f"set data.sequence_length to at most {total // (2 if held_out else 1) - 1}" if total >= 4 else "add text"
        parts = "one training and one validation row" if held_out else "one row"
        raise DataError(
            f"{source.label} has {total} tokens, too few for {parts} of sequence_length {sequence_length}; {fix}"
        )
    train = Span(0, total - held_out)
    return train, Span(total - held_out, total) if held_out else None


def check_tokens(inputs: np.ndarray, vocab_size: int, source: str) -> None:
    """Checks on the host that every id is in the vocabulary: JAX clamps one that is not, silently.

    Args:
        inputs: Ids, of any shape.
        vocab_size: Ids must be from 0 to vocab_size - 1.
        source: Names where they come from, for the message.

    Raises:
        DataError: An id is out of range; names the source, the first position and the id.
    """
    inputs = np.asarray(inputs)
    if inputs.size == 0 or (inputs.min() >= 0 and inputs.max() < vocab_size):
        return
    first = np.argwhere((inputs < 0) | (inputs >= vocab_size))[0]
    position = ", ".join(map(str, first.tolist()))
    raise DataError(
        f"{source}: token {inputs[tuple(first)]} at position {position} is outside the vocabulary of {vocab_size}; "
        "use the tokenizer the data was made with, or a model with a larger vocab_size"
    )
