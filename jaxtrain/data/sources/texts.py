"""Texts as rows of padded tokens in the frame of their tokenizer: labelled, tagged, in pairs, and for predictions.

Shapes: R rows, B rows of a batch, L tokens per row, T tokens per target of a decoder.
"""

import dataclasses
import hashlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.config.data import (
    DOCSTRING_PACKAGES,
    LabelledTextData,
    TaggedTextData,
    TextPairData,
    TokenizerConfig,
    added_tokens,
)
from jaxtrain.data.dataset import Data, example_data
from jaxtrain.data.files import few
from jaxtrain.data.formats.open import (
    Record,
    class_name,
    class_names,
    find_rows,
    list_of,
    named_classes,
    number_of,
    numbered,
    read_records,
    saved_classes,
    text_of,
)
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.python_texts import docstrings
from jaxtrain.data.rows import IGNORED, Row, Rows, padded, without_offset
from jaxtrain.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    NamedTokens,
    SpecialIds,
    Tokenizer,
    build_tokenizer,
    described,
    encode_all,
    needed,
    special_ids,
    tokenizer_sha256,
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
    """Finds the frame of a tokenizer: that of its own file, or start, text, end where the file says none."""
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
        columns = [self._columns[name] for name in self._segments.values()]
        return int(sum(column.sizes(self._numbers[numbers]).sum() for column in columns))

    def gather(self, indices: np.ndarray) -> Row:
        numbers, targets = self._numbers[indices % len(self)], self._targets
        inputs = {name: column.take(numbers) for name, column in self._columns.items()}
        for name, of in self._segments.items():
            column = self._columns[of]
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
    numbers = np.arange(len(texts))
    if fit:
        longest = int(columns["tokens"].sizes(numbers).max())
        length = min(sequence_length, -(-longest // _LENGTHS) * _LENGTHS)
        columns = {name: dataclasses.replace(column, length=length) for name, column in columns.items()}
    return RaggedRows(columns, {"segments": "tokens"}, np.zeros(len(numbers), np.int32), numbers)


_TextConfig = LabelledTextData | TaggedTextData | TextPairData


@dataclass(frozen=True)
class _Records:
    """The rows of a source, which of them are for training and for evaluation, and the classes that its file names."""

    label: str
    rows: list[Record]
    sides: Sequence[np.ndarray]
    classes: list[str] | None

    def column(self, place: int, name: str, read: Callable[..., Any]) -> list[Any]:
        """Returns what `read` (`text_of`, ...) makes of the values of a column."""
        return [read(row.values[place], where=row.where, column=name) for row in self.rows]


def open_labelled_text(
    config: LabelledTextData, *, sequence_length: int, task: str | None, reading: Mapping[str, Any] | None
) -> Data:
    """Opens texts, or pairs of texts, with a class or, under the task "regression", a number each.

    Returns:
        Rows of `inputs`: `tokens`, `segments` (1 for a token, 0 for what fills the row up) and, for pairs whose
        tokenizer tells them apart, `token_types`, int32 [L] each; `targets`: int32 [], or float32 [1] for numbers.
    """
    names = [("text", config.text), *([("second_text", config.second_text)] if config.second_text else [])]
    is_class = task != "regression"
    columns = [*names, ("label", config.label)]
    records = _read(config, columns, _labelled_docstrings, named=config.label if is_class else None)
    classes = None
    offset = {}
    if is_class:
        found = records.column(-1, config.label, class_name)
        known = saved_classes(reading, config.kind)
        classes = class_names(found, label=records.label, known=known, named=records.classes)
        targets, kind = numbered(found, classes), f"{len(classes)} classes ({few(classes)})"
    else:
        numbers = np.array(records.column(-1, config.label, number_of), np.float64)
        numbers, offset = without_offset(numbers[:, None], reading, label=records.label)
        targets = numbers.astype(np.float32)
        kind = "numbers"
    texts = list(zip(*(records.column(i, name, text_of) for i, (_, name) in enumerate(names)), strict=True))
    tokens = _tokens(config, [text for row in texts for text in row])
    entries, cuts = framed_texts(tokens, texts, sequence_length=sequence_length)
    description = f"{records.label}: {len(texts):,} {'pairs of ' if len(names) > 1 else ''}texts, {kind}"
    lines = (description, *_truncated(cuts, "texts", sequence_length))
    return _made(config, records, tokens, entries, targets, lines, classes, offset)


def open_tagged_text(config: TaggedTextData, *, sequence_length: int, reading: Mapping[str, Any] | None) -> Data:
    """Opens lists of words with a class each; the first token of a word has its class.

    Returns:
        Rows of `inputs`: `tokens` and `segments` int32 [L]; `targets` int32 [L], -100 where there is no class.
    """
    records = _read(config, [("words", config.words), ("tags", config.tags)], None, named=config.tags)
    words = [[str(word) for word in row] for row in records.column(0, config.words, list_of)]
    tags = records.column(1, config.tags, list_of)
    for record, said, given in zip(records.rows, words, tags, strict=True):
        given[:] = [class_name(tag, where=record.where, column=config.tags) for tag in given]
        if len(said) != len(given):
            raise DataError(f"{record.where} has {len(said)} words and {len(given)} classes; give one class per word")
    tokens = _tokens(config, [" ".join(row) for row in words])
    found = framed_words(tokens, words, sequence_length=sequence_length)
    known, every = saved_classes(reading, config.kind), [tag for row in tags for tag in row]
    classes = class_names(every, label=records.label, known=known, named=records.classes)
    targets = []
    for row, places, ids in zip(tags, found.places, found.ids, strict=True):
        targets.append([IGNORED] * len(ids))
        for number, place in zip(numbered(row, classes).tolist(), places, strict=True):
            if place is not None:
                targets[-1][place] = number
    columns = {"tokens": make_column(found.ids, length=sequence_length, fill=tokens.padding)}
    column = make_column(targets, length=sequence_length, fill=IGNORED)
    kind = f"{len(every):,} words, {len(classes)} classes ({few(classes)})"
    lines = (f"{records.label}: {len(words):,} rows of {kind}", *_truncated(found.cuts, "rows", sequence_length))
    return _made(config, records, tokens, columns, column, lines, classes)


def open_text_pairs(config: TextPairData, *, sequence_length: int) -> Data:
    """Opens pairs of a text to read (L) and a text to write (T).

    Returns:
        Rows of `inputs`: `tokens` and `segments` int32 [L], `decoder_tokens` (the targets one place later, after
        `config.decoder_start`) and `decoder_segments` int32 [T]; `targets` int32 [T], -100 after the end.
    """
    target_length = config.target_length or sequence_length
    records = _read(config, [("source", config.source), ("target", config.target)], _named_docstrings)
    sources, written = records.column(0, config.source, text_of), records.column(1, config.target, text_of)
    tokens = _tokens(config, [text for pair in zip(sources, written, strict=True) for text in pair])
    end = needed(tokens.special.end, "end", what="data.kind=text_pairs")
    columns, cuts = framed_texts(tokens, [(text,) for text in sources], sequence_length=sequence_length)
    ids = [one.tolist() for one in encode_all(tokens.tokenizer, written)]
    targets = [[*one[: target_length - 1], end] for one in ids]
    columns["decoder_tokens"] = make_column(
        [[config.decoder_start, *one[:-1]] for one in targets], length=target_length, fill=tokens.padding
    )
    lines = (
        f"{records.label}: {len(sources):,} pairs of texts",
        *_truncated(cuts, "sources", sequence_length),
        *_truncated([len(one) >= target_length for one in ids], "targets", target_length),
    )
    column = make_column(targets, length=target_length, fill=IGNORED)
    return _made(config, records, tokens, columns, column, lines, None)


def _made(
    config: _TextConfig,
    records: _Records,
    tokens: FramedTokens,
    columns: dict[str, Column],
    targets: Column | np.ndarray,
    description: tuple[str, ...],
    classes: list[str] | None,
    offset: Mapping[str, list[float]] = types.MappingProxyType({}),
) -> Data:
    length, decoder = columns["tokens"].length, columns.get("decoder_tokens")
    segments = {"segments": "tokens"} | ({} if decoder is None else {"decoder_segments": "decoder_tokens"})
    train, validation = (RaggedRows(columns, segments, targets, side) for side in records.sides)
    is_number = isinstance(targets, np.ndarray) and targets.dtype.kind == "f"
    return example_data(
        train,
        validation,
        identity={
            "kind": config.kind,
            "content_sha256": digest(columns, targets),
            "sequence_length": length,
            "tokenizer_sha256": tokenizer_sha256(tokens.tokenizer),
        },
        description=description,
        after=(described(tokens.tokenizer),),
        vocab_size=tokens.tokenizer.vocab_size,
        num_outputs=len(classes) if classes is not None else 1 if is_number else None,
        input_shape=(length,),
        unit="tokens",
        units_per_row=length + (0 if decoder is None else decoder.length),
        tokenizer=tokens.tokenizer,
        reading=None if decoder is not None else {"kind": config.kind, "classes": classes, **offset},
        decoder_length=None if decoder is None else decoder.length,
    )


def _read(
    config: _TextConfig,
    columns: Sequence[tuple[str, str]],
    builtin: Callable[[], list[Record]] | None,
    *,
    named: str | None = None,
) -> _Records:
    """Reads the rows for training, and those for evaluation from their own file or from among them."""
    classes = None
    if config.path is not None:
        label, rows = config.path, read_records(config.path, columns, what="data.path", named=named)
        classes = named_classes(find_rows(config.path, what="data.path")[0], named) if named else None
    elif builtin is not None and getattr(config, "builtin", None):
        label, rows = "built-in python_docstrings", builtin()
    else:
        raise DataError("data.path is null; set it to a .csv, .jsonl or .parquet file")
    if config.validation_path is not None:
        more = read_records(config.validation_path, columns, what="data.validation_path", named=named)
        sides = np.arange(len(rows)), len(rows) + np.arange(len(more))
        return _Records(label, [*rows, *more], sides, classes)
    sides = split_examples(len(rows), validation_fraction=config.validation_fraction, label=label)
    return _Records(label, rows, sides, classes)


def _tokens(config: _TextConfig, texts: Sequence[str]) -> FramedTokens:
    return framed_tokens(build_tokenizer(config.tokenizer, texts, special=added_tokens(config)), config.tokenizer)


def _truncated(cuts: Sequence[bool], noun: str, length: int) -> list[str]:
    """Returns a line about what was too long, where anything was."""
    count = sum(cuts)
    return [f"{count:,} of {len(cuts):,} {noun} are longer than {length:,} tokens and truncated"] if count else []


def _labelled_docstrings() -> list[Record]:
    """Returns (docstring, package) of the functions of seven packages of the standard library."""
    found: dict[str, Record] = {}
    for package in DOCSTRING_PACKAGES:
        for where, _, text in docstrings(package):
            found.setdefault(text, Record(where, (text, package)))
    return list(found.values())


def _named_docstrings() -> list[Record]:
    """Returns (first sentence of a docstring, name of the function as words) of the standard library."""
    found: dict[str, Record] = {}
    for where, name, text in docstrings(""):
        words = name.strip("_").replace("_", " ").lower()
        sentence = text.partition("\n\n")[0].replace("\n", " ").partition(". ")[0]
        if words.isascii() and not name.startswith("__"):
            found.setdefault(sentence, Record(where, (sentence, words)))
    return list(found.values())
