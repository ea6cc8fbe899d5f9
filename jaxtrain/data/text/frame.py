"""Texts and lists of words as rows of tokens in the frame of their tokenizer, for training and for predictions.

Shapes: R rows, B rows of a batch, L tokens per row.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.config.data import TokenizerConfig
from jaxtrain.data.rows import Row, Rows, padded
from jaxtrain.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    NamedTokens,
    SpecialIds,
    Tokenizer,
    encode_all,
    needed,
    special_ids,
)
from jaxtrain.errors import DataError

_LENGTHS = 32  # few different lengths, since each is compiled for


@dataclass(frozen=True)
class Frame:
    """The order in a row of entries: id of a special token, or "first" or "second" for a text; token type."""

    entries: tuple[tuple[int | str, int], ...]

    @property
    def num_special(self) -> int:
        """Number of special tokens."""
        return sum(isinstance(entry, int) for entry, _ in self.entries)


def make_frame(tokenizer: NamedTokens, special: SpecialIds, *, pair: bool, sequence_length: int | None = None) -> Frame:
    """Finds the frame of a tokenizer: that of its own file, or start, text, end where the file says none.

    Raises:
        DataError: A pair has no token between its texts, or rows of `sequence_length` have no room for a text.
    """
    frame = _frame(tokenizer, special, pair=pair)
    if sequence_length is not None and sequence_length <= frame.num_special:
        raise DataError(
            f"data.sequence_length={sequence_length} has no room beside {frame.num_special} special tokens; raise it"
        )
    return frame


def _frame(tokenizer: NamedTokens, special: SpecialIds, *, pair: bool) -> Frame:
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
    """Puts the ids of one text or two into a frame; where they are too long, the longer one loses tokens at its end.

    Returns:
        The ids, at most `length`, their token types, and whether anything was cut off.
    """
    kept = _kept([len(text) for text in texts], max(length - frame.num_special, 0))
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


@dataclass(frozen=True)
class Column:
    """Lists of integers, one per row: int32 one after another, int64 [R + 1] where each begins, their full length."""

    values: np.ndarray
    starts: np.ndarray
    length: int
    fill: int

    def sizes(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the lengths of the lists of rows: int64 [B]."""
        return self.starts[numbers + 1] - self.starts[numbers]

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the lists of rows, filled up: int32 [B, L]."""
        starts_B, sizes_B = self.starts[numbers], self.sizes(numbers)
        return padded(self.values, starts_B, sizes_B, length=self.length, fill=self.fill)


def make_column(lists: Sequence[Sequence[int]], *, length: int, fill: int) -> Column:
    """Stores lists of at most `length` integers one after another."""
    sizes = np.fromiter((len(one) for one in lists), np.int64, len(lists))
    values = np.fromiter((value for one in lists for value in one), np.int32, int(sizes.sum()))
    return Column(values, np.concatenate([[0], np.cumsum(sizes)]), length, fill)


class RaggedRows(Rows):
    """Rows (int64 `numbers`) of several lists; targets are lists too, or an array [R, ...].

    `segments` are entries of `inputs` that are 1 for what is real of another entry, and 0 for what fills up.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        segments: Mapping[str, str],
        targets: Column | np.ndarray,
        numbers: np.ndarray,
    ):
        super().__init__(len(numbers))
        self._columns, self._segments, self._targets, self._numbers = columns, segments, targets, numbers

    def num_tokens(self, numbers: np.ndarray) -> int:
        described = [self._columns[name] for name in self._segments.values()]
        return int(sum(column.sizes(self._numbers[numbers]).sum() for column in described))

    def gather(self, indices: np.ndarray) -> Row:
        numbers, targets = self._numbers[indices % len(self)], self._targets
        inputs = {name: column.take(numbers) for name, column in self._columns.items()}
        for name, described in self._segments.items():
            column = self._columns[described]
            inputs[name] = (np.arange(column.length) < column.sizes(numbers)[:, None]).astype(np.int32)
        return {"inputs": inputs, "targets": targets.take(numbers) if isinstance(targets, Column) else targets[numbers]}


def digest(columns: Mapping[str, Column], targets: Column | np.ndarray) -> str:
    """Returns a hash of all values."""
    found = hashlib.sha256()
    for column in [*columns.values(), *([targets] if isinstance(targets, Column) else [])]:
        found.update(column.values.tobytes() + column.starts.tobytes())
    if not isinstance(targets, Column):
        found.update(np.ascontiguousarray(targets).tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class FramedTokens:
    """A tokenizer, its special tokens, and what fills rows up."""

    tokenizer: ByteTokenizer | BpeTokenizer
    special: SpecialIds
    padding: int


def framed_tokens(tokenizer: Tokenizer, config: TokenizerConfig | None) -> FramedTokens:
    """Finds the special tokens of a tokenizer, which a config may name."""
    assert isinstance(tokenizer, ByteTokenizer | BpeTokenizer)
    special = special_ids(tokenizer, config)
    return FramedTokens(tokenizer, special, 0 if special.padding is None else special.padding)


def framed_texts(
    tokens: FramedTokens, texts: Sequence[Sequence[str]], *, sequence_length: int
) -> tuple[dict[str, Column], list[bool]]:
    """Encodes texts, or pairs of texts, cut to L.

    Returns:
        The entries `tokens` and, for pairs whose tokenizer tells the texts apart, `token_types`; which rows were cut.

    Raises:
        DataError: The rows have no room for any text, or a pair has no token between its texts.
    """
    width = len(texts[0])
    frame = make_frame(tokens.tokenizer, tokens.special, pair=width > 1, sequence_length=sequence_length)
    encoded = [ids.tolist() for ids in encode_all(tokens.tokenizer, [text for row in texts for text in row])]
    filled = [fill_frame(frame, encoded[i : i + width], sequence_length) for i in range(0, len(encoded), width)]
    columns = {"tokens": make_column([ids for ids, _, _ in filled], length=sequence_length, fill=tokens.padding)}
    if any(kind for _, kind in frame.entries):
        columns["token_types"] = make_column([types for _, types, _ in filled], length=sequence_length, fill=0)
    return columns, [cut for _, _, cut in filled]


@dataclass(frozen=True)
class FramedWords:
    """Lists of words as tokens of each row, at most L, and whether it was cut.

    `places` are, per row and word, the place of its first token in the row; None: the word has none there.
    """

    ids: list[list[int]]
    places: list[list[int | None]]
    cuts: list[bool]


def framed_words(tokens: FramedTokens, words: Sequence[Sequence[str]], *, sequence_length: int) -> FramedWords:
    """Encodes lists of words, cut to L; a DataError where the rows have no room for any word."""
    frame = make_frame(tokens.tokenizer, tokens.special, pair=False, sequence_length=sequence_length)
    before = [entry for entry, _ in frame.entries].index("first")
    # A space belongs to the word after it, as tokenizers of running text have it.
    space = _space_between(tokens.tokenizer)
    pieces = [word if i == 0 else f"{space}{word}" for row in words for i, word in enumerate(row)]
    encoded = iter(encode_all(tokens.tokenizer, pieces))
    found = FramedWords([], [], [])
    for row in words:
        lists = [next(encoded).tolist() for _ in row]
        filled, _, cut = fill_frame(frame, [[i for one in lists for i in one]], sequence_length)
        starts = np.cumsum([0, *map(len, lists)]).tolist()
        kept = len(filled) - frame.num_special
        found.ids.append(filled)
        found.places.append(
            [before + at if one and at < kept else None for at, one in zip(starts, lists, strict=False)]
        )
        found.cuts.append(cut)
    return found


def _space_between(tokenizer: Tokenizer) -> str:
    """Returns what stands before a word that is encoded by itself: nothing where the tokenizer adds the space.

    Normalizers as Llama's prepend one to every text, so that another would be a token of its own.
    """
    if not isinstance(tokenizer, BpeTokenizer):
        return " "
    # The names of a text's tokens in one, so that it does not matter which were merged.
    word, with_space, both = (
        "".join(tokenizer.token_name(i) or "" for i in tokenizer.encode(text).tolist()) for text in ("a", " a", "a a")
    )
    return "" if both == word + word != word + with_space else " "


def text_rows(
    tokens: FramedTokens, texts: Sequence[Sequence[str]], *, sequence_length: int, fit: bool = False
) -> RaggedRows:
    """Rows of texts without targets; `fit`: as long as the longest needs, up to a multiple of 32."""
    columns, _ = framed_texts(tokens, texts, sequence_length=sequence_length)
    return _without_targets(columns, fit=fit)


def _without_targets(columns: dict[str, Column], *, fit: bool) -> RaggedRows:
    numbers = np.arange(len(columns["tokens"].starts) - 1)
    if fit:
        longest = int(columns["tokens"].sizes(numbers).max())
        length = min(columns["tokens"].length, -(-longest // _LENGTHS) * _LENGTHS)
        columns = {name: dataclasses.replace(column, length=length) for name, column in columns.items()}
    return RaggedRows(columns, {"segments": "tokens"}, np.zeros(len(numbers), np.int32), numbers)
