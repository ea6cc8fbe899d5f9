"""Answers as OpenAI's clients read them: tokens of the engine become pieces of text, and these objects and chunks."""

import base64
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxtrain.data import Tokenizer
from jaxtrain.inference.engine.request import Emitted
from jaxtrain.inference.server.bodies import Call
from jaxtrain.inference.text_stream import TextStream, TokenTexts

# What OpenAI reports for a probability of 0: JSON has no infinity.
_LEAST = -9999.0


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability.

    Attributes:
        text: of the token alone; U+FFFD for a part of a character.
        log_probability: natural logarithm, before temperature and penalties.
        top: the likeliest tokens at its place and itself, the likeliest first.
        offset: characters of the answer that were certain before it.
    """

    text: str
    log_probability: float
    top: tuple[tuple[str, float], ...]
    offset: int


@dataclass(frozen=True)
class Piece:
    """What an answer has more than before: whole characters, and tokens where log-probabilities were asked for."""

    text: str = ""
    scored: tuple[Scored, ...] = ()
    finish_reason: str | None = None


class Choice:
    """One answer as it grows: the tokens that the engine gave become pieces, until it has a reason to end."""

    def __init__(self, call: Call, tokenizer: Tokenizer, texts: TokenTexts):
        self._call, self._texts = call, texts
        self._ends = call.requests[0].stop_tokens
        self._stream = TextStream(tokenizer, stop=call.stop, stop_tokens=self._ends, hidden=call.hidden)
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def feed(self, emitted: Emitted) -> Piece:
        """What a token adds; the piece has a finish_reason if a stop was met."""
        self.num_tokens += 1
        offset = self._stream.length
        text = self._stream.feed(emitted.token)
        if self._stream.stopped:
            self.finish_reason = "stop"
        # A chat says why it ended; harnesses count the tokens of a completion.
        is_end = self._call.is_chat and emitted.token in self._ends
        is_scored = self._call.top is not None and not is_end
        scored = (self._scored(emitted, offset),) if is_scored else ()
        return Piece(text, scored, self.finish_reason)

    def finish(self, reason: str) -> Piece:
        """The rest, when no further token comes."""
        rest = self._stream.finish()
        self.finish_reason = "stop" if self._stream.stopped else reason
        return Piece(rest, (), self.finish_reason)

    def _scored(self, emitted: Emitted, offset: int) -> Scored:
        top = {one: _finite(value) for one, value in emitted.top}
        # One number per token: readers compare the chosen one with the likeliest for equality.
        own = top.setdefault(emitted.token, _finite(emitted.log_probability))
        ranked = sorted(top.items(), key=lambda item: -item[1])
        return Scored(
            self._texts(emitted.token), own, tuple((self._texts(one), value) for one, value in ranked), offset
        )


def _finite(value: float) -> float:
    return max(value, _LEAST) if math.isfinite(value) else _LEAST


@dataclass(frozen=True)
class Answer:
    """The objects of one answer of a model, with an id and a time (seconds since 1970) of its own."""

    call: Call
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        """The object of an answer that is not streamed, of the pieces of each choice in order."""
        choices = []
        for index, parts in enumerate(pieces):
            text, scored = "".join(part.text for part in parts), [one for part in parts for one in part.scored]
            said: dict[str, Any] = {"text": text}
            if self.call.is_chat:
                said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            scores = None if self.call.top is None else self._scores(scored)
            choices.append({"index": index, **said, "logprobs": scores, "finish_reason": parts[-1].finish_reason})
        return {**self._head(""), "choices": choices, "usage": usage}

    def first_chunk(self, index: int) -> dict[str, Any]:
        """What begins each choice of a streamed chat."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": "", "refusal": None}}, Piece())

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """A piece of a choice."""
        said: dict[str, Any] = {"text": piece.text}
        if self.call.is_chat:
            said = {"delta": {"content": piece.text} if piece.text or piece.scored else {}}
        return self._chunk(index, said, piece)

    def last_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The numbers of tokens at the end of a stream."""
        return {**self._head(".chunk"), "choices": [], "usage": usage}

    def _chunk(self, index: int, said: dict[str, Any], piece: Piece) -> dict[str, Any]:
        scores = self._scores(piece.scored) if piece.scored else None
        choice = {"index": index, **said, "logprobs": scores, "finish_reason": piece.finish_reason}
        found = {**self._head(".chunk"), "choices": [choice]}
        return found | ({"usage": None} if self.call.include_usage else {})

    def _head(self, form: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", f"chat.completion{form}") if self.call.is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _scores(self, scored: Sequence[Scored]) -> dict[str, Any]:
        top = self.call.top or 0
        if self.call.is_chat:
            rows = [
                _chat_token(one.text, one.log_probability)
                | {"top_logprobs": [_chat_token(text, value) for text, value in one.top[:top]]}
                for one in scored
            ]
            return {"content": rows, "refusal": None}
        # Of tokens with one text (parts of characters) the likeliest counts.
        tops = [dict(reversed(one.top)) for one in scored]
        return {
            "tokens": [one.text for one in scored],
            "token_logprobs": [one.log_probability for one in scored],
            "top_logprobs": None if top == 0 else tops,
            "text_offset": [one.offset for one in scored],
        }


def _chat_token(text: str, log_probability: float) -> dict[str, Any]:
    # The bytes of a part of a character are not known from its text.
    raw = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "bytes": raw, "logprob": log_probability}


def embedding_answer(
    vectors_ND: np.ndarray, texts: Sequence[Sequence[int]], *, form: str, model: str
) -> dict[str, Any]:
    """The object of an answer of /v1/embeddings; `form` is float or base64."""

    def numbers(vector_D: np.ndarray) -> list[float] | str:
        if form == "base64":
            return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
        return vector_D.tolist()

    data = [{"object": "embedding", "index": at, "embedding": numbers(row_D)} for at, row_D in enumerate(vectors_ND)]
    count = sum(map(len, texts))
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": count, "total_tokens": count}}
