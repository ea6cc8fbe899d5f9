"""What special tokens stand around the texts of a row."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.data.special import NamedTokens, SpecialIds, needed
from jaxtrain.data.tokenizer import BpeTokenizer


@dataclass(frozen=True)
class Frame:
    """The order of special tokens and texts in a row.

    Attributes:
        entries: (id of a special token, or "first" or "second" for a text; token type), in their order.
    """

    entries: tuple[tuple[int | str, int], ...]

    @property
    def num_special(self) -> int:
        """Number of special tokens."""
        return sum(isinstance(entry, int) for entry, _ in self.entries)

    @property
    def has_types(self) -> bool:
        """Whether a token has another type than 0."""
        return any(kind for _, kind in self.entries)


def make_frame(tokenizer: NamedTokens, special: SpecialIds, *, pair: bool) -> Frame:
    """Finds the frame of a tokenizer: that of its own file, or start, text, end where the file says none.

    Args:
        tokenizer: Made the ids of the texts.
        special: Its special tokens.
        pair: Whether a row has two texts.

    Raises:
        DataError: A pair has no token between its texts.
    """
    if isinstance(tokenizer, BpeTokenizer):
        entries = tokenizer.frame(pair=pair)
        if any(isinstance(entry, int) for entry, _ in entries):
            return Frame(tuple(entries))
    start = [] if special.start is None else [(special.start, 0)]
    # A generative tokenizer has an end of text, but no row of its models begins or ends with it.
    end = None if special.start is None and special.padding is None else special.end
    if pair:
        end = needed(special.end, "end", what="a pair of texts")
        return Frame((*start, ("first", 0), (end, 0), ("second", 1), (end, 1)))
    return Frame((*start, ("first", 0), *([] if end is None else [(end, 0)])))


def fill_frame(frame: Frame, texts: Sequence[list[int]], length: int) -> tuple[list[int], list[int], bool]:
    """Puts texts into a frame; where they are too long, the longer one loses tokens from its end.

    Args:
        frame: What stands around them.
        texts: The ids of one text, or of two.
        length: The most tokens that a row may have.

    Returns:
        The ids, their token types, and whether anything was cut off.
    """
    room = length - frame.num_special
    kept = _kept([len(text) for text in texts], max(room, 0))
    parts = {"first": texts[0][: kept[0]], "second": texts[1][: kept[1]] if len(texts) > 1 else []}
    ids: list[int] = []
    types: list[int] = []
    for entry, kind in frame.entries:
        added = [entry] if isinstance(entry, int) else parts[entry]
        ids += added
        types += [kind] * len(added)
    return ids, types, sum(kept) < sum(map(len, texts))


def _kept(lengths: list[int], room: int) -> list[int]:
    """Returns how many tokens of each text fit: one text has the room, of two the longer one gives way.

    Where both are cut and the room is odd, the longer text, or the second of two as long, has the token more, as
    truncation of the tokenizers library (longest_first) has it.
    """
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    if lengths[0] > lengths[1]:
        second = min(lengths[1], room // 2)
        return [room - second, second]
    first = min(lengths[0], room // 2)
    return [first, room - first]
