"""Documents of text, and the streams of token ids that they become: compact arrays, split for evaluation."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.data import DocumentsData, JsonlData, TextData, added_tokens
from jaxtrain.data.files import decode_utf8
from jaxtrain.data.formats.open import find_rows, pass_over_files, text_of
from jaxtrain.data.permutation import Span, num_held_out
from jaxtrain.data.python_texts import read_builtin
from jaxtrain.data.tokenizer import (
    BpeTokenizer,
    Tokenizer,
    build_tokenizer,
    chunks,
    encode_all,
    named_end,
    tokenizer_sha256,
)
from jaxtrain.errors import DataError

# Characters that are encoded at a time: enough to use every core, and few enough for their ids as Python objects.
_CHUNK_CHARACTERS = 4 * 2**20

# The sources whose texts become tokens.
TextSource = TextData | JsonlData | DocumentsData


@dataclass(frozen=True)
class Documents:
    """Texts that can be read more than once; `files` are (name, size in bytes), the same wherever the data is."""

    label: str
    files: tuple[tuple[str, int], ...]
    read: Callable[[], Iterator[str]]


def documents_of(config: TextSource) -> Documents:
    """Finds the documents of a source without reading them; calling their `read` reads them."""
    field = "text"
    form = "text"
    if not isinstance(config, TextData):
        field = config.field
        form = "lines" if isinstance(config, JsonlData) else None
    elif config.path is None:
        return Documents(*read_builtin(config.builtin or "python_prose"))
    files = find_rows(str(config.path), what="data.path", form=form)

    def read() -> Iterator[str]:
        for where, row in pass_over_files(files, [("field", field)]):
            value = row[field]
            # Members of tar files with other endings than .txt are bytes.
            value = decode_utf8(value, path=Path(where)) if isinstance(value, bytes) else value
            yield text_of(value, where=where, column=field)

    return Documents(str(config.path), tuple((file.name, file.path.stat().st_size) for file in files), read)


@dataclass(frozen=True)
class TokenSource:
    """A stream of token ids: consecutive integer arrays, which may be memory-mapped, and what is known about it.

    `vocab_size` is one more than the largest id allowed; `tokenizer` and `num_documents` may not be known.
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
    """Yields the ids (uint16 or uint32) of documents, a list for each chunk of them.

    Each is followed by the tokenizer's end of text, or by a newline where it has none.
    """
    mark = tokenizer.encode("\n") if tokenizer.end_of_text is None else np.array([tokenizer.end_of_text])
    dtype = token_dtype(tokenizer.vocab_size)
    for chunk in chunks(texts, len, most=_CHUNK_CHARACTERS):
        yield [np.concatenate([ids, mark]).astype(dtype) for ids in encode_all(tokenizer, chunk)]


def divided(config: TextSource, texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[str]:
    """Yields documents; files of plain text are divided where they write the tokenizer's end of text.

    As GPT-2's and TinyStories' files do. Only a name with bars (`<|endoftext|>`) is looked for: `</s>` is also HTML.
    """
    name = None
    if isinstance(tokenizer, BpeTokenizer) and tokenizer.end_of_text is not None:
        name = tokenizer.token_name(tokenizer.end_of_text)
    if not isinstance(config, TextData) or config.path is None or name is None or not name.startswith("<|"):
        yield from texts
        return
    for text in texts:
        parts = text.split(name)
        # What follows the last one is mostly a line end.
        yield from (part for part in parts if part.strip() or len(parts) == 1)


def encoded_source(config: TextSource, documents: Documents, *, tokenizer: Tokenizer | None = None) -> TokenSource:
    """Encodes documents into memory, with the tokenizer of the config or another."""
    if tokenizer is None:
        tokenizer = build_tokenizer(config.tokenizer, documents.read(), special=added_tokens(config))
    encoded: list[np.ndarray] = []
    num_documents = 0
    digest = hashlib.sha256()
    for chunk in encode_stream(divided(config, documents.read(), tokenizer), tokenizer):
        num_documents += len(chunk)
        # One array per chunk and not per document: each of a million short documents would take 100 bytes more.
        encoded.append(np.concatenate(chunk))
        digest.update(encoded[-1].tobytes())
    return TokenSource(
        segments=(np.concatenate(encoded),),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        label=documents.label,
        num_documents=num_documents,
        identity={
            "kind": config.kind,
            "files": [list(file) for file in documents.files],
            "tokens_sha256": digest.hexdigest(),
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            **named_end(tokenizer),
        },
    )


def split_tokens(source: TokenSource, *, sequence_length: int, validation_fraction: float) -> tuple[Span, Span | None]:
    """Splits a stream into training tokens and, from its end, validation tokens: None, or those of at least a row."""
    total, row = source.num_tokens, sequence_length + 1
    held_out = num_held_out(total, validation_fraction, least=row)
    if total - held_out < row:
        parts = "one training and one validation row" if held_out else "one row"
        fix = f"set data.sequence_length to at most {total // (2 if held_out else 1) - 1}" if total >= 4 else "add text"
        raise DataError(
            f"{source.label} has {total} tokens, too few for {parts} of sequence_length {sequence_length}; {fix}"
        )
    train = Span(0, total - held_out)
    return train, Span(total - held_out, total) if held_out else None
