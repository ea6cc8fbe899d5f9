"""Drafts by prompt lookup: what followed the last tokens where the text had them before. No jax here.

Source: Saxena 2023 (prompt lookup decoding): answers about a text repeat parts of it.
"""

from collections.abc import Iterable

# Tokens that must stand twice, the longest first: of one alone most drafts are wrong, and each costs a verification.
_SIZES = (3, 2)


class Drafts:
    """A text with an index of the places of its pairs and triples, kept up as it grows.

    Args:
        tokens: of the text so far.
    """

    def __init__(self, tokens: Iterable[int]):
        self._text: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        self._earlier: dict[int, int | None] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._text.append(token)
            for size in _SIZES:
                if len(self._text) >= size:
                    gram = tuple(self._text[-size:])
                    self._earlier[size] = self._last.get(gram)
                    self._last[gram] = len(self._text)

    def propose(self, count: int) -> list[int]:
        """Guess the next tokens.

        Args:
            count: of tokens.

        Returns:
            `count` tokens, or none where the end of the text stands nowhere before. Where it follows itself the text
            is taken to go on in that period.
        """
        for size in _SIZES:
            begin = self._earlier.get(size)
            if begin is not None:
                period = len(self._text) - begin
                return [self._text[begin + index % period] for index in range(count)]
        return []


def accepted(draft: list[int], chosen: list[int]) -> int:
    """Count how many tokens of a draft the model chose too, up to the first that it did not.

    Args:
        draft: tokens that were fed after the last token of the text.
        chosen: what the model chose after that token and after each of the draft.
    """
    for index, token in enumerate(draft):
        if chosen[index] != token:
            return index
    return len(draft)
