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
from jaxtrain.inference.server.bodies import Call, Prompt
from jaxtrain.inference.text_stream import TextStream, TokenTexts

# What OpenAI reports for a probability of 0: JSON has no infinity.
_LEAST = -9999.0


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability.

    Attributes:
        text: of the token alone; U+FFFD for a part of a character.
        log_probability: None for the first token of a prompt, before which nothing stands.
        top: the likeliest tokens at its place and itself, the likeliest first.
        offset: characters of prompt (if it is given back) and answer that were certain before it.
    """

    text: str
    log_probability: float | None
    top: tuple[tuple[str, float], ...]
    offset: int


@dataclass(frozen=True)
class Piece:
    """What an answer has more than before.

    Attributes:
        text: whole characters.
        scored: tokens, where log-probabilities were asked for.
        finish_reason: "stop" or "length" of the last piece; None: more may come.
    """

    text: str = ""
    scored: tuple[Scored, ...] = ()
    finish_reason: str | None = None


class Choice:
    """One answer as it grows.

    Args:
        call: what is asked for.
        prompt: what is answered.
        tokenizer: turns ids into text.
        texts: of its tokens.

    Attributes:
        num_tokens: that the engine gave.
        finish_reason: why it ended; None: it has not.
    """

    def __init__(self, call: Call, prompt: Prompt, tokenizer: Tokenizer, texts: TokenTexts):
        self._call, self._prompt, self._tokenizer, self._texts = call, prompt, tokenizer, texts
        self._stream = TextStream(tokenizer, stop=call.stop, stop_tokens=call.stop_tokens, hidden=call.hidden)
        self._begin = len(prompt.text) if call.echo else 0
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def begin(self, scores: Sequence[Emitted | None] | None) -> Piece:
        """The prompt, where it is to be given back.

        Args:
            scores: of its tokens; None: they were not asked for.
        """
        if not self._call.echo:
            return Piece()
        if scores is None or self._call.top is None:
            return Piece(self._prompt.text)
        stream, places = TextStream(self._tokenizer), []
        for index, token in enumerate(self._prompt.tokens):
            places.append(stream.length)
            if index >= self._prompt.num_added:  # those before it are in no text, and stand at its beginning
                stream.feed(token)
        stream.finish()
        # Tokenizers that write "▁word" add a space before the first word.
        surplus = stream.length - len(self._prompt.text)
        rows = zip(self._prompt.tokens, scores, places, strict=True)
        scored = (self._scored(token, emitted, max(0, place - surplus)) for token, emitted, place in rows)
        return Piece(self._prompt.text, tuple(scored))

    def feed(self, emitted: Emitted) -> Piece:
        """What a token adds; the piece has a finish_reason if a stop was met."""
        if self._call.new_tokens == 0:
            return Piece()
        self.num_tokens += 1
        offset = self._begin + self._stream.length
        text = self._stream.feed(emitted.token)
        if self._stream.stopped:
            self.finish_reason = "stop"
        # A chat says why it ended; harnesses count the tokens of a completion.
        is_end = self._call.is_chat and emitted.token in self._call.stop_tokens
        is_scored = self._call.top is not None and not is_end
        scored = (self._scored(emitted.token, emitted, offset),) if is_scored else ()
        return Piece(text, scored, self.finish_reason)

    def finish(self, reason: str) -> Piece:
        """The rest, when no further token comes."""
        rest = self._stream.finish()
        self.finish_reason = "length" if self._call.new_tokens == 0 else "stop" if self._stream.stopped else reason
        return Piece(rest, (), self.finish_reason)

    def _scored(self, token: int, emitted: Emitted | None, offset: int) -> Scored:
        if emitted is None:
            return Scored(self._texts(token), None, (), offset)
        top = {one: _finite(value) for one, value in emitted.top}
        # One number per token: readers compare the chosen one with the likeliest for equality.
        own = top.setdefault(token, _finite(emitted.log_probability))
        ranked = sorted(top.items(), key=lambda item: -item[1])
        return Scored(self._texts(token), own, tuple((self._texts(one), value) for one, value in ranked), offset)


def _finite(value: float) -> float:
    return max(value, _LEAST) if math.isfinite(value) else _LEAST


@dataclass(frozen=True)
class Answer:
    """The objects of one answer, with an id of its own.

    Attributes:
        call: what was asked for.
        model: name of the model.
        id: of the answer.
        created: seconds since 1970.
    """

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
        tops = [None if one.log_probability is None else dict(reversed(one.top)) for one in scored]
        return {
            "tokens": [one.text for one in scored],
            "token_logprobs": [one.log_probability for one in scored],
            "top_logprobs": None if top == 0 else tops,
            "text_offset": [one.offset for one in scored],
        }


def _chat_token(text: str, log_probability: float | None) -> dict[str, Any]:
    # The bytes of a part of a character are not known from its text.
    raw = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "bytes": raw, "logprob": log_probability}


def usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """How many tokens were read and written.

    Args:
        prompt_tokens: of every prompt once, however many answers it gets.
        completion_tokens: of all answers; the token that ends one counts.
        cached_tokens: of the prompts, that had been read before.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def embedding_answer(
    vectors_ND: np.ndarray, texts: Sequence[Sequence[int]], *, form: str, model: str
) -> dict[str, Any]:
    """The object of an answer of /v1/embeddings.

    Args:
        vectors_ND: float32 [texts, D].
        texts: ids of each.
        form: float or base64.
        model: name of the model.
    """

    def numbers(vector_D: np.ndarray) -> list[float] | str:
        if form == "base64":
            return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
        return vector_D.tolist()

    data = [{"object": "embedding", "index": at, "embedding": numbers(row_D)} for at, row_D in enumerate(vectors_ND)]
    count = sum(map(len, texts))
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": count, "total_tokens": count}}
