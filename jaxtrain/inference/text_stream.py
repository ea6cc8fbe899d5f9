"""Text of tokens as they come: whole characters, up to a stop. No jax here."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from jaxtrain.errors import ConfigError

_REPLACEMENT = "\ufffd"
# A character of UTF-8 lacks at most its last three bytes; a tokenizer may show each missing one by itself.
_LONGEST_INCOMPLETE = 3
# Of bytes that are no text: how many tokens stay at either end, and from how many on those between are dropped.
_KEPT, _MANY = 12, 48


class Codec(Protocol):
    """What a stream needs of a `jaxtrain.data.Tokenizer`, whose package starts jax."""

    def encode(self, text: str) -> Any: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """The text of one row of generated tokens, given out as soon as it is certain.

    A character is given out when all of its bytes are there, and text that may be the beginning of a stop string when
    it turns out not to be. The tokens are decoded as a continuation: a space before the first word stays.

    Args:
        tokenizer: turns ids into text.
        stop: strings at which the text ends; they are not part of it.
        stop_tokens: ids at which it ends.
        hidden: ids that are left out, such as those of special tokens; the text is that of the others.

    Attributes:
        stopped: whether a stop string or a stop token was met; what follows it is not given out.
        text: everything that was given out.

    Raises:
        ConfigError: a stop is no text, or empty.

    Example:
        >>> from jaxtrain.data.tokenizer import ByteTokenizer
        >>> stream = TextStream(ByteTokenizer(), stop=["END"])
        >>> [stream.feed(byte) for byte in "éEN".encode()], stream.finish()
        (['', 'é', '', ''], 'EN')
    """

    def __init__(
        self,
        tokenizer: Codec,
        *,
        stop: Sequence[str] = (),
        stop_tokens: Collection[int] = (),
        hidden: Collection[int] = (),
    ):
        self._stop = checked_stops(stop)
        self._stop_tokens, self._hidden = frozenset(stop_tokens), frozenset(hidden)
        self._uncertain = _Uncertain(tokenizer)
        self._given_of_tokens = 0  # characters of their text that were certain
        self._held = ""  # certain text that may begin a stop string
        self.stopped = False
        self.text = ""

    def feed(self, token: int) -> str:
        """The text that this token makes certain.

        Args:
            token: the next id; after a stop it is ignored.
        """
        if self.stopped:
            return ""
        if token in self._stop_tokens:
            rest = self.finish()
            self.stopped = True
            return rest
        if token in self._hidden:
            return ""
        decoded = self._uncertain.feed(int(token))
        certain = len(decoded) - _incomplete(decoded)
        piece = decoded[self._given_of_tokens : certain]
        if certain == len(decoded):
            self._uncertain.clear()
            self._given_of_tokens = 0
        else:
            self._given_of_tokens = max(self._given_of_tokens, certain)
        return self._release(piece, is_end=False)

    def finish(self) -> str:
        """The rest of the text, when no further token comes."""
        if self.stopped:
            return ""
        piece = self._uncertain.text[self._given_of_tokens :]
        self._uncertain.clear()
        self._given_of_tokens = 0
        return self._release(piece, is_end=True)

    def _release(self, piece: str, *, is_end: bool) -> str:
        """Give out what is certain of the text that is held and this piece after it."""
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held, text = True, "", text[: min(found)]
        else:
            held = 0 if is_end else _longest_beginning(text, self._stop)
            self._held, text = text[len(text) - held :], text[: len(text) - held]
        self.text += text
        return text


class TokenTexts:
    """The text of single tokens, as a continuation: a space before a word stays.

    Args:
        tokenizer: turns ids into text.
    """

    def __init__(self, tokenizer: Codec):
        decode = _continued(tokenizer)

        @functools.lru_cache(maxsize=65_536)
        def text(token: int) -> str:
            return decode([token])

        self._text = text

    def __call__(self, token: int) -> str:
        """The text of a token."""
        return self._text(token)


class TokenPlaces:
    """Where tokens begin in the text of all of them, in characters; those that share a character begin where it does.

    A token after bytes that may be part of a character has its place when it is certain whether they are.

    Args:
        tokenizer: turns ids into text.
        hidden: ids that are left out of the text.
    """

    def __init__(self, tokenizer: Codec, *, hidden: Collection[int] = ()):
        self._uncertain, self._hidden = _Uncertain(tokenizer), frozenset(hidden)
        self._start = 0  # characters before the tokens whose text is not certain
        self._certain = 0  # characters of theirs that are
        # Of these and the hidden ones among them: the text before each, its length after it (None: hidden), and how
        # many characters of the text before are certain to stay.
        self._seen: list[tuple[str, int | None, int]] = []

    def feed(self, token: int) -> list[int]:
        """The places of the tokens that are not certain yet, this one the last; a later call may move them on.

        Args:
            token: the next id.
        """
        before, is_hidden = self._uncertain.text, token in self._hidden
        text = before if is_hidden else self._uncertain.feed(int(token))
        self._seen.append((before, None if is_hidden else len(text), self._certain))
        certain = text[: len(text) - _incomplete(text)]
        self._seen = self._compared(certain)
        places = self._places(self._seen)
        if certain == text:
            self._start += len(certain)
            self._uncertain.clear()
            self._seen, self._certain = [], 0
            return places
        # Those whose place no further text moves: else each token would be compared with all before it.
        settled = 0
        for text_before, _, own in self._seen:
            if own == len(certain) < len(text_before):
                break
            settled += 1
        self._seen, self._certain = self._seen[settled:], len(certain)
        return places

    def finish(self) -> list[int]:
        """The places of the tokens that are not certain yet, when no further one comes."""
        return self._places(self._compared(self._uncertain.text))

    def _compared(self, certain: str) -> list[tuple[str, int | None, int]]:
        """The tokens, with how much of the text before each this one begins with."""
        compared = []
        for before, length, own in self._seen:
            most = min(len(before), len(certain))
            own = next((at for at in range(own, most) if before[at] != certain[at]), most)
            compared.append((before, length, own))
        return compared

    def _places(self, seen: list[tuple[str, int | None, int]]) -> list[int]:
        # A token that adds no character is part of the last one.
        return [self._start + (own if length is None else min(own, max(length - 1, 0))) for _, length, own in seen]


class _Uncertain:
    """The text of the tokens that await the rest of a character.

    Of a long row of bytes that are no text only the ends are kept: each token would decode all before it again. The
    first ones stay, since a decoder may write every byte as U+FFFD because of a wrong one far before.

    Attributes:
        text: of all of them.
    """

    def __init__(self, tokenizer: Codec):
        self._decode = _continued(tokenizer)
        self.clear()

    def clear(self) -> None:
        """Forget them, when their text is certain."""
        self._tokens: list[int] = []
        self._dropped = self._at = 0  # replacement characters of dropped tokens, and where they stand
        self.text = ""

    def feed(self, token: int) -> str:
        """The text with one more."""
        self._tokens.append(token)
        decoded = self._decode(self._tokens)
        self.text = decoded[: self._at] + _REPLACEMENT * self._dropped + decoded[self._at :]
        if len(self._tokens) >= _MANY and self.text.endswith(_REPLACEMENT * _MANY):
            self._drop(decoded)
        return self.text

    def _drop(self, decoded: str) -> None:
        kept = self._tokens[:_KEPT] + self._tokens[-_KEPT:]
        first, shorter = self._decode(kept[:_KEPT]), self._decode(kept)
        at, fewer = len(first), len(decoded) - len(shorter)
        # Both ends are longer than an incomplete character: the first ones are surely wrong, and what may still become
        # a character is among the last ones.
        enough = _incomplete(first[:-1]) == _LONGEST_INCOMPLETE and len(shorter) - at > _LONGEST_INCOMPLETE
        # Nothing but replacement characters follows the first ones, with the others and without.
        if enough and fewer > 0 and not decoded[at - 1 :].strip(_REPLACEMENT) and decoded[:-fewer] == shorter:
            self._tokens, self._at, self._dropped = kept, at, self._dropped + fewer


def checked_stops(stop: Any) -> tuple[str, ...]:
    """The stop strings.

    Args:
        stop: a list of texts.

    Raises:
        ConfigError: a stop is no text, or empty.
    """
    if isinstance(stop, str) or not isinstance(stop, Sequence):
        raise ConfigError(f"stop is {stop!r:.60}; use a list of texts: ['END']")
    for one in stop:
        if not isinstance(one, str) or not one:
            raise ConfigError(f"stop has {one!r:.60}; use texts of at least one character: ['END']")
    return tuple(stop)


def _continued(tokenizer: Codec) -> Callable[[Sequence[int]], str]:
    """Ids -> their text as a continuation: a space before the first word stays."""
    # Before it, the first token of a text would lose its space in the tokenizers that write "▁word".
    anchor = [int(i) for i in tokenizer.encode("a")]
    start = len(tokenizer.decode(anchor)) if anchor else 0
    return lambda ids: tokenizer.decode([*anchor, *ids])[start:] if ids else ""


def _incomplete(decoded: str) -> int:
    """How many characters at the end may be those of a character whose bytes are not all there."""
    tail = decoded[-_LONGEST_INCOMPLETE:]
    return len(tail) - len(tail.rstrip(_REPLACEMENT))


def _longest_beginning(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string."""
    return max(
        (size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])),
        default=0,
    )
