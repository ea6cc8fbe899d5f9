"""Text of tokens as they come: whole characters, up to a stop. No jax here."""

import functools
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any, Protocol

from jaxtrain.errors import ConfigError

_REPLACEMENT = "\ufffd"
# A character of UTF-8 lacks at most its last three bytes; a tokenizer may show each missing one by itself.
_LONGEST_INCOMPLETE = 3


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
        self._decode = _continued(tokenizer)
        self._tokens: list[int] = []  # those whose text is not certain
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
        self._tokens.append(int(token))
        decoded = self._decoded()
        certain = len(decoded) - _incomplete(decoded)
        piece = decoded[self._given_of_tokens : certain]
        if certain == len(decoded):
            self._tokens, self._given_of_tokens = [], 0
        else:
            self._given_of_tokens = max(self._given_of_tokens, certain)
        return self._release(piece, is_end=False)

    def finish(self) -> str:
        """The rest of the text, when no further token comes."""
        if self.stopped:
            return ""
        piece = self._decoded()[self._given_of_tokens :]
        self._tokens, self._given_of_tokens = [], 0
        return self._release(piece, is_end=True)

    def _decoded(self) -> str:
        return self._decode(self._tokens)

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
        self._decode, self._hidden = _continued(tokenizer), frozenset(hidden)
        self._start = 0  # characters before the tokens whose text is not certain
        self._tokens: list[int] = []
        # Of these and the hidden ones among them: the text before each, and its length after it (None: hidden).
        self._seen: list[tuple[str, int | None]] = []
        self._text = ""

    def feed(self, token: int) -> list[int]:
        """The places of the tokens that are not certain yet, this one the last; a later call may move them on.

        Args:
            token: the next id.
        """
        before, is_hidden = self._text, token in self._hidden
        if not is_hidden:
            self._tokens.append(int(token))
            self._text = self._decode(self._tokens)
        self._seen.append((before, None if is_hidden else len(self._text)))
        certain = self._text[: len(self._text) - _incomplete(self._text)]
        places = self._places(certain)
        if certain == self._text:
            self._start += len(certain)
            self._tokens, self._seen, self._text = [], [], ""
        return places

    def finish(self) -> list[int]:
        """The places of the tokens that are not certain yet, when no further one comes."""
        return self._places(self._text)

    def _places(self, certain: str) -> list[int]:
        places = []
        for before, length in self._seen:
            own = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, certain, strict=False)))
            # A token that adds no character is part of the last one.
            places.append(self._start + (own if length is None else min(own, max(length - 1, 0))))
        return places


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
