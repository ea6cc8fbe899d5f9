"""One answer as it grows: tokens of the engine become pieces of text with their log-probabilities. No jax here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxtrain.inference.engine.request import Emitted
from jaxtrain.inference.server.call import Call, Prompt
from jaxtrain.inference.text_stream import TextStream, TokenPlaces, TokenTexts

if TYPE_CHECKING:
    from jaxtrain.data import Tokenizer

# What OpenAI reports for a probability of 0: JSON has no infinity.
_LEAST = -9999.0


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability.

    Attributes:
        text: of the token alone; U+FFFD for a part of a character.
        log_probability: None for the first token of a prompt, before which nothing stands.
        top: the likeliest tokens at its place and itself, the likeliest first.
        offset: characters of prompt (if it is given back) and answer before it.
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

    text: str
    scored: tuple[Scored, ...] = ()
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return not self.text and not self.scored and self.finish_reason is None


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

    def __init__(self, call: Call, prompt: Prompt, tokenizer: "Tokenizer", texts: TokenTexts):
        self._call, self._prompt, self._tokenizer, self._texts = call, prompt, tokenizer, texts
        self._stream = TextStream(tokenizer, stop=call.stop, stop_tokens=call.stop_tokens, hidden=call.hidden)
        # Where a token begins does not depend on text that is held back for a stop.
        self._places = TokenPlaces(tokenizer, hidden=call.hidden)
        self._begin = len(prompt.text) if call.echo else 0
        self._waiting: list[Scored] = []
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def begin(self, scores: Sequence[Emitted | None] | None) -> Piece:
        """The prompt, where it is to be given back.

        Args:
            scores: of its tokens; None: they were not asked for.
        """
        if not self._call.echo:
            return Piece("")
        if scores is None or self._call.top is None:
            return Piece(self._prompt.text)
        places, scored, begin = TokenPlaces(self._tokenizer), [], -self._num_dropped_spaces()
        for index, (token, emitted) in enumerate(zip(self._prompt.tokens, scores, strict=True)):
            scored.append(Scored(self._texts(token), None, (), 0) if emitted is None else self._scored(emitted))
            if index >= self._prompt.num_added:  # those before it are in no text, and stand at its beginning
                _place(scored, places.feed(token), begin=begin)
        _place(scored, places.finish(), begin=begin)
        return Piece(self._prompt.text, tuple(scored))

    def _num_dropped_spaces(self) -> int:
        """Spaces before the first word that the tokenizer added: those that write "▁word" do."""
        texts = "".join(map(self._texts, self._prompt.tokens[self._prompt.num_added :]))
        given = self._prompt.text
        return max(0, (len(texts) - len(texts.lstrip(" "))) - (len(given) - len(given.lstrip(" "))))

    def feed(self, emitted: Emitted) -> Piece:
        """What a token adds; the piece has a finish_reason if a stop was met."""
        if self._call.new_tokens == 0:
            return Piece("")
        self.num_tokens += 1
        is_stop_token = emitted.token in self._call.stop_tokens
        given = self._stream.feed(emitted.token)
        # A chat says why it ended; harnesses count the tokens of a completion.
        if self._call.top is not None and not (is_stop_token and self._call.is_chat):
            self._waiting.append(self._scored(emitted))
            _place(self._waiting, self._places.feed(emitted.token), begin=self._begin)
        if not self._stream.stopped:
            return Piece(given, self._given_scores())
        self.finish_reason = "stop"
        _place(self._waiting, self._places.finish(), begin=self._begin)
        kept = self._waiting if is_stop_token else self._given_scores()
        return Piece(given, tuple(kept), "stop")

    def finish(self, reason: str) -> Piece:
        """The rest, when no further token comes."""
        rest = self._stream.finish()
        _place(self._waiting, self._places.finish(), begin=self._begin)
        if self._call.new_tokens == 0:
            reason = "length"
        elif self._stream.stopped:
            # The text that was held back turned out to hold a stop.
            self.finish_reason = "stop"
            return Piece(rest, self._given_scores(), "stop")
        self.finish_reason = reason
        return Piece(rest, tuple(self._waiting), reason)

    def _given_scores(self) -> tuple[Scored, ...]:
        """The waiting tokens whose text has begun to be given out."""
        end = self._begin + len(self._stream.text)
        count = next((i for i, one in enumerate(self._waiting) if one.offset >= end), len(self._waiting))
        given, self._waiting = self._waiting[:count], self._waiting[count:]
        return tuple(given)

    def _scored(self, emitted: Emitted) -> Scored:
        """A token that has no place yet."""
        top = {token: _finite(value) for token, value in emitted.top}
        # One number per token: readers compare the chosen one with the likeliest for equality.
        own = top.setdefault(emitted.token, _finite(emitted.log_probability))
        ranked = sorted(top.items(), key=lambda item: -item[1])
        return Scored(self._texts(emitted.token), own, tuple((self._texts(token), value) for token, value in ranked), 0)


def _place(scored: list[Scored], places: Sequence[int], *, begin: int = 0) -> None:
    """Give the last of these tokens their places, from `begin` on; those that were given out before have theirs."""
    count = min(len(scored), len(places))
    for index, place in zip(range(len(scored) - count, len(scored)), places[len(places) - count :], strict=True):
        scored[index] = replace(scored[index], offset=max(0, begin + place))


def _finite(value: float) -> float:
    return max(value, _LEAST) if math.isfinite(value) else _LEAST
