"""Text of tokens as they come: whole characters, up to a stop."""

import functools
from collections.abc import Callable, Collection, Sequence

from jaxtrain.data import Tokenizer

_REPLACEMENT = "\ufffd"
# A character of UTF-8 lacks at most its last three bytes; a tokenizer may show each missing one by itself.
_LONGEST_INCOMPLETE = 3
# So many tokens without the end of a character are no text: they are given out as they are.
_MOST_UNCERTAIN = 64


class TextStream:
    """The text of one row of generated tokens, given out as soon as it is certain.

    A character is given out when all of its bytes are there, and text that may be the beginning of a stop string when
    it turns out not to be.

    Args:
        tokenizer: turns ids into text.
        stop: strings at which the text ends, none empty; they are not part of it.
        stop_tokens: ids at which it ends.
        hidden: ids that are left out, such as those of special tokens; the text is that of the others.
        begins: whether nothing stands before it, so that a tokenizer that writes a space before each word leaves out
            the first one; otherwise the text is a continuation, which keeps it.

    Attributes:
        stopped: whether a stop string or a stop token was met; what follows it is not given out.
        length: characters that are certain, also those that are held back for a stop.

    Example:
        >>> from jaxtrain.data.tokenizer import ByteTokenizer
        >>> stream = TextStream(ByteTokenizer(), stop=["END"])
        >>> [stream.feed(byte) for byte in "éEN".encode()], stream.finish()
        (['', 'é', '', ''], 'EN')
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        stop_tokens: Collection[int] = (),
        hidden: Collection[int] = (),
        begins: bool = False,
    ):
        self._stop, self._stop_tokens = tuple(stop), frozenset(stop_tokens)
        self._hidden = frozenset(hidden) - self._stop_tokens
        self._decode = tokenizer.decode if begins else _continued(tokenizer)
        self._continue = _continued(tokenizer)
        self._tokens: list[int] = []  # those whose text is not certain
        self._given = 0  # characters of their text that were certain
        self._held = ""  # certain text that may begin a stop string
        self.stopped, self.length = False, 0

    def feed(self, token: int) -> str:
        """The text that this token makes certain.

        Args:
            token: the next id; after a stop it is ignored.
        """
        if self.stopped or token in self._hidden:
            return ""
        if token in self._stop_tokens:
            rest = self.finish()
            self.stopped = True
            return rest
        self._tokens.append(int(token))
        decoded = self._decode(self._tokens)
        tail = decoded[-_LONGEST_INCOMPLETE:]
        certain = len(decoded) - (len(tail) - len(tail.rstrip(_REPLACEMENT)))
        if certain == len(decoded) or len(self._tokens) > _MOST_UNCERTAIN:
            return self._release(self._settled(decoded), is_end=False)
        piece = decoded[self._given : certain]
        self._given = max(self._given, certain)
        return self._release(piece, is_end=False)

    def finish(self) -> str:
        """The rest of the text, when no further token comes."""
        if self.stopped:
            return ""
        return self._release(self._settled(self._decode(self._tokens)) if self._tokens else "", is_end=True)

    def _settled(self, decoded: str) -> str:
        """What is new of the text of the tokens, which are forgotten."""
        piece, self._tokens, self._given = decoded[self._given :], [], 0
        if piece:
            self._decode = self._continue
        return piece

    def _release(self, piece: str, *, is_end: bool) -> str:
        """Give out what is certain of the text that is held and this piece after it."""
        self.length += len(piece)
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = 0 if is_end else _longest_beginning(text, self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


class TokenTexts:
    """The text of single tokens, as a continuation: a space before a word stays.

    Args:
        tokenizer: turns ids into text.
    """

    def __init__(self, tokenizer: Tokenizer):
        decode = _continued(tokenizer)
        self._text = functools.lru_cache(maxsize=65_536)(lambda token: decode([token]))

    def __call__(self, token: int) -> str:
        """The text of a token."""
        return self._text(token)


def _continued(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Ids -> their text as a continuation: a space before the first word stays."""
    # Before it, the first token of a text would lose its space in the tokenizers that write "▁word".
    anchor = [int(i) for i in tokenizer.encode("a")]
    start = len(tokenizer.decode(anchor)) if anchor else 0
    return lambda ids: tokenizer.decode([*anchor, *ids])[start:]


def _longest_beginning(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string."""
    return max(
        (size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])),
        default=0,
    )
