"""Rendered chats as token ids, each with the character where it begins. Special tokens that templates write are read.

Elsewhere text that spells a special token is data (`BpeTokenizer`); a template has no other way to write one.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer


@dataclass(frozen=True)
class Encoded:
    """A text as tokens.

    Attributes:
        ids: int32 [num_tokens].
        starts: int64 [num_tokens], the character at which each token begins.
    """

    ids: np.ndarray
    starts: np.ndarray


class ChatEncoder(Protocol):
    """Encodes rendered chats.

    Attributes:
        special: Texts of the special tokens.
    """

    special: tuple[str, ...]

    def encode(self, texts: Sequence[str]) -> Iterator[Encoded]:
        """Yields the tokens of each text; none is added at its beginning or end."""
        ...


def chat_encoder(tokenizer: ByteTokenizer | BpeTokenizer) -> ChatEncoder:
    """Returns what encodes the rendered chats of a tokenizer."""
    return _ByteEncoder(tokenizer) if isinstance(tokenizer, ByteTokenizer) else _LibraryEncoder(tokenizer)


class _ByteEncoder:
    """Bytes, with the special tokens between them."""

    def __init__(self, tokenizer: ByteTokenizer):
        self.special = tokenizer.special
        self._tokenizer = tokenizer
        # The longest name first, where one begins another.
        names = sorted(self.special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def encode(self, texts: Sequence[str]) -> Iterator[Encoded]:
        for text in texts:
            ids: list[np.ndarray] = []
            starts: list[np.ndarray] = []
            at = 0
            for part in self._split.split(text) if self._split else [text]:
                special = self._tokenizer.token_id(part)
                if special is not None:
                    ids.append(np.array([special], np.int32))
                    starts.append(np.array([at]))
                elif part:
                    found = self._tokenizer.encode(part)
                    ids.append(found)
                    # The first byte of a character is no 10xxxxxx.
                    starts.append(at + np.cumsum((found & 0xC0) != 0x80) - 1)
                at += len(part)
            empty = np.zeros(0, np.int64)
            yield Encoded(np.concatenate([empty, *ids]).astype(np.int32), np.concatenate([empty, *starts]))


class _LibraryEncoder:
    """A tokenizer of the `tokenizers` library that reads special tokens."""

    def __init__(self, tokenizer: BpeTokenizer):
        from tokenizers import Tokenizer

        # A copy: that of the run goes on reading such text as data.
        self._model: Any = Tokenizer.from_str(tokenizer.to_json())
        self._model.encode_special_tokens = False
        # Nothing is added to a template's text, and a post-processor may leave spaces out of where a token begins.
        self._model.post_processor = None
        added = self._model.get_added_tokens_decoder().values()
        self.special: tuple[str, ...] = tuple(token.content for token in added if token.special)

    def encode(self, texts: Sequence[str]) -> Iterator[Encoded]:
        for found in self._model.encode_batch(list(texts), add_special_tokens=False):
            starts = np.fromiter((start for start, _ in found.offsets), np.int64, len(found.ids))
            yield Encoded(np.array(found.ids, np.int32), starts)
