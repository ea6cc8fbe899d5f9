"""Texts and lists of words as rows of tokens in the frame of their tokenizer, for training and for predictions.

Shapes: L tokens per row.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.config.data import TokenizerConfig
from jaxtrain.data.special import NamedTokens, SpecialIds, special_ids
from jaxtrain.data.text.frame import Frame, fill_frame, make_frame
from jaxtrain.data.text.ragged import Column, RaggedRows, make_column, sizes
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, encode_all
from jaxtrain.errors import DataError

_LENGTHS = 32  # few different lengths, since each is compiled for


@dataclass(frozen=True)
class FramedTokens:
    """A tokenizer, its special tokens, and what fills rows up."""

    tokenizer: Tokenizer
    named: NamedTokens
    special: SpecialIds
    padding: int


def framed_tokens(tokenizer: Tokenizer, config: TokenizerConfig | None) -> FramedTokens:
    """Finds the special tokens of a tokenizer.

    Args:
        tokenizer: Makes the ids.
        config: May name them; None: nothing does.

    Raises:
        DataError: The config names a token that the tokenizer does not have.
    """
    assert isinstance(tokenizer, ByteTokenizer | BpeTokenizer)
    special = special_ids(tokenizer, config)
    return FramedTokens(tokenizer, tokenizer, special, 0 if special.padding is None else special.padding)


def check_room(frame: Frame, sequence_length: int) -> None:
    """Raises a DataError where the special tokens alone fill a row."""
    if sequence_length <= frame.num_special:
        raise DataError(
            f"data.sequence_length={sequence_length} has no room beside {frame.num_special} special tokens; raise it"
        )


def framed_texts(
    tokens: FramedTokens, texts: Sequence[Sequence[str]], *, sequence_length: int
) -> tuple[dict[str, Column], list[bool]]:
    """Encodes texts, or pairs of texts.

    Args:
        tokens: The tokenizer.
        texts: One or two texts per row, of each row as many.
        sequence_length: L; longer rows are truncated.

    Returns:
        The entries `tokens` and, for pairs whose tokenizer tells the texts apart, `token_types`; and whether each row
        was truncated.

    Raises:
        DataError: The rows have no room for any text, or a pair has no token between its texts.
    """
    width = len(texts[0])
    frame = make_frame(tokens.named, tokens.special, pair=width > 1)
    check_room(frame, sequence_length)
    encoded = encode_all(tokens.tokenizer, [text for row in texts for text in row])
    rows = [[ids.tolist() for ids in encoded[i : i + width]] for i in range(0, len(encoded), width)]
    filled = [fill_frame(frame, row, sequence_length) for row in rows]
    columns = {"tokens": make_column([ids for ids, _, _ in filled], length=sequence_length, fill=tokens.padding)}
    if frame.has_types:
        columns["token_types"] = make_column([types for _, types, _ in filled], length=sequence_length, fill=0)
    return columns, [cut for _, _, cut in filled]


@dataclass(frozen=True)
class FramedWords:
    """Lists of words as tokens.

    Attributes:
        ids: The tokens of each row, at most L.
        places: Per row and word, the place of its first token in the row; None: the word has no token there.
        cuts: Whether each row was truncated.
    """

    ids: list[list[int]]
    places: list[list[int | None]]
    cuts: list[bool]


def framed_words(tokens: FramedTokens, words: Sequence[Sequence[str]], *, sequence_length: int) -> FramedWords:
    """Encodes lists of words.

    Args:
        tokens: The tokenizer.
        words: Of each row.
        sequence_length: L; longer rows are truncated.

    Raises:
        DataError: The rows have no room for any word.
    """
    frame = make_frame(tokens.named, tokens.special, pair=False)
    check_room(frame, sequence_length)
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
    word, with_space, both = (_spelled(tokenizer, text) for text in ("a", " a", "a a"))
    return "" if both == word + word != word + with_space else " "


def _spelled(tokenizer: BpeTokenizer, text: str) -> str:
    """Returns the names of a text's tokens in one, so that it does not matter which were merged."""
    return "".join(tokenizer.token_name(i) or "" for i in tokenizer.encode(text).tolist())


def text_rows(
    tokens: FramedTokens, texts: Sequence[Sequence[str]], *, sequence_length: int, fit: bool = False
) -> RaggedRows:
    """Rows of texts without targets, as `open_labelled_text` makes their inputs.

    Args:
        tokens, texts, sequence_length: See `framed_texts`.
        fit: Whether all rows are as long as the longest needs, up to a multiple of 32.
    """
    columns, _ = framed_texts(tokens, texts, sequence_length=sequence_length)
    return _without_targets(columns, len(texts), fit=fit)


def _without_targets(columns: dict[str, Column], num_rows: int, *, fit: bool) -> RaggedRows:
    numbers, nothing = np.arange(num_rows), np.zeros(num_rows, np.int32)
    if fit:
        longest = int(sizes(columns["tokens"], numbers).max())
        length = min(columns["tokens"].length, -(-longest // _LENGTHS) * _LENGTHS)
        columns = {name: dataclasses.replace(column, length=length) for name, column in columns.items()}
    return RaggedRows(columns, {"segments": "tokens"}, nothing, numbers)
