"""Labelled texts, tagged words and pairs of texts as rows of padded tokens.

Shapes: L tokens per row, T tokens per target of a decoder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.config.data import LabelledTextData, TaggedTextData, TextPairData, added_tokens
from jaxtrain.data.examples import split_examples
from jaxtrain.data.special import needed
from jaxtrain.data.text.corrupt import IGNORED
from jaxtrain.data.text.docstrings import labelled_docstrings, named_docstrings
from jaxtrain.data.text.frame import fill_frame, make_frame
from jaxtrain.data.text.framed import FramedTokens, check_room, framed_texts, framed_tokens, framed_words
from jaxtrain.data.text.labels import (
    check_labelled,
    class_name,
    class_names,
    number_of,
    numbered,
    saved_classes,
    unlabelled,
)
from jaxtrain.data.text.numbers import check_steps
from jaxtrain.data.text.ragged import Column, RaggedRows, digest, make_column
from jaxtrain.data.text.records import Record, declared_classes, list_of, read_records, text_of
from jaxtrain.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer, encode_all, tokenizer_sha256
from jaxtrain.errors import DataError


@dataclass(frozen=True)
class TextRows:
    """Rows of texts, and what `Data` says of them.

    Attributes:
        train: The training rows.
        validation: The rows kept for evaluation; None: there are none.
        tokenizer: Made the ids.
        num_outputs: Classes, or 1 for numbers; None for pairs of texts.
        decoder_length: T; None: there is no decoder.
        identity: Values that identify the rows, for the fingerprint.
        description: Lines that describe the rows to the user.
        reading: See `Data.reading`.
    """

    train: RaggedRows
    validation: RaggedRows | None
    tokenizer: Tokenizer
    num_outputs: int | None
    decoder_length: int | None
    identity: dict[str, Any]
    description: tuple[str, ...]
    reading: dict[str, Any] | None


@dataclass(frozen=True)
class _Records:
    """The rows of a source: those for training first."""

    label: str
    rows: list[Record]
    train: np.ndarray
    validation: np.ndarray
    # What the file names its classes, in the order of their numbers.
    classes: list[str] | None = None


def open_labelled_text(
    config: LabelledTextData, *, sequence_length: int, task: str | None, reading: Mapping[str, Any] | None
) -> TextRows:
    """Opens texts, or pairs of texts, with a class or a number each.

    Args:
        config: Which texts.
        sequence_length: L.
        task: The task of the run: under "regression" labels are numbers, otherwise classes.
        reading: `Data.reading` of what a model was trained on, whose classes are used; None: those of the data.

    Returns:
        Rows of `inputs`: `tokens`, `segments` (1 for a token, 0 for what fills the row up) and, for pairs whose
        tokenizer tells them apart, `token_types`, int32 [L] each; `targets`: int32 [], or float32 [1] for numbers.

    Raises:
        DataError: A file cannot be read, a value is missing or wrong, or a special token is missing.
    """
    names = [("text", config.text), *([("second_text", config.second_text)] if config.second_text else [])]
    own = labelled_docstrings if config.builtin else None
    is_class = task != "regression"
    records = _read(config, [*names, ("label", config.label)], own, named=config.label if is_class else None)
    classes = None
    if is_class:
        records, classes = _with_classes(records, config.label, saved_classes(reading, config.kind))
    texts = [[_text(record, i, name) for i, (_, name) in enumerate(names)] for record in records.rows]
    tokens = _tokens(config, [text for row in texts for text in row])
    columns, cuts = framed_texts(tokens, texts, sequence_length=sequence_length)
    values = [(record.where, record.values[-1]) for record in records.rows]
    if classes is None:
        numbers = [number_of(value, where=where, column=config.label) for where, value in values]
        if reading is None:
            check_steps(np.array(numbers)[:, None], records.label)
        targets, kind = np.array(numbers, np.float32)[:, None], "one number each"
    else:
        targets, kind = numbered([value for _, value in values], classes), f"{len(classes)} classes ({_few(classes)})"
    description = f"{records.label}: {len(texts):,} {'pairs of texts' if len(names) > 1 else 'texts'}, {kind}"
    truncated = _truncated(cuts, "texts", sequence_length)
    return _made(
        config, records, tokens, columns, {"segments": "tokens"}, targets, (description, *truncated), classes=classes
    )


def open_tagged_text(config: TaggedTextData, *, sequence_length: int, reading: Mapping[str, Any] | None) -> TextRows:
    """Opens lists of words with a class per word; the first token of a word has its class, the others are ignored.

    Args:
        config: Which words.
        sequence_length: L.
        reading: As for `open_labelled_text`.

    Returns:
        Rows of `inputs`: `tokens` and `segments` int32 [L]; `targets` int32 [L], -100 where there is no class.

    Raises:
        DataError: As for `open_labelled_text`, or a row has not as many classes as words.
    """
    records = _read(config, [("words", config.words), ("tags", config.tags)], None, named=config.tags)
    words: list[list[str]] = []
    tags: list[list[str]] = []
    for record in records.rows:
        words.append([str(word) for word in list_of(record.values[0], where=record.where, column=config.words)])
        listed = list_of(record.values[1], where=record.where, column=config.tags)
        tags.append([class_name(tag, where=record.where, column=config.tags) for tag in listed])
        if len(words[-1]) != len(tags[-1]):
            raise DataError(
                f"{record.where} has {len(words[-1])} words in column '{config.words}' and {len(tags[-1])} classes in "
                f"column '{config.tags}'; give one class per word"
            )
    tokens = _tokens(config, [" ".join(row) for row in words])
    found = framed_words(tokens, words, sequence_length=sequence_length)
    known = saved_classes(reading, config.kind)
    every = [tag for row in tags for tag in row]
    owner = [row for row, of_row in enumerate(tags) for _ in of_row]
    without = unlabelled(every, known or records.classes)
    check_labelled(every, without, lambda i: records.rows[owner[i]].where, column=config.tags)
    classes = class_names(every, label=records.label, known=known, named=records.classes)
    numbers = {name: number for number, name in enumerate(classes)}
    targets = []
    for row, places, ids in zip(tags, found.places, found.ids, strict=True):
        targets.append([IGNORED] * len(ids))
        for tag, place in zip(row, places, strict=True):
            if place is not None:
                targets[-1][place] = numbers[tag]
    columns = {"tokens": make_column(found.ids, length=sequence_length, fill=tokens.padding)}
    num_words = sum(map(len, words))
    description = (
        f"{records.label}: {len(words):,} rows of {num_words:,} words, {len(classes)} classes ({_few(classes)})"
    )
    return _made(
        config,
        records,
        tokens,
        columns,
        {"segments": "tokens"},
        make_column(targets, length=sequence_length, fill=IGNORED),
        (description, *_truncated(found.cuts, "rows", sequence_length)),
        classes=classes,
    )


def open_text_pairs(config: TextPairData, *, sequence_length: int) -> TextRows:
    """Opens pairs of a text to read and a text to write.

    Args:
        config: Which pairs.
        sequence_length: L of the texts to read.

    Returns:
        Rows of `inputs`: `tokens` and `segments` int32 [L], `decoder_tokens` (the targets one place later, after
        `config.decoder_start`) and `decoder_segments` int32 [T]; `targets` int32 [T], -100 after the end.

    Raises:
        DataError: As for `open_labelled_text`.
    """
    target_length = config.target_length or sequence_length
    own = named_docstrings if config.builtin else None
    records = _read(config, [("source", config.source), ("target", config.target)], own)
    pairs = [
        [_text(record, i, name) for i, name in enumerate((config.source, config.target))] for record in records.rows
    ]
    tokens = _tokens(config, [text for pair in pairs for text in pair])
    end = needed(tokens.special.end, "end", what="data.kind=text_pairs")
    frame = make_frame(tokens.named, tokens.special, pair=False)
    check_room(frame, sequence_length)
    encoded = [ids.tolist() for ids in encode_all(tokens.tokenizer, [text for pair in pairs for text in pair])]
    sources = [fill_frame(frame, [ids], sequence_length) for ids in encoded[::2]]
    written = [[*ids[: target_length - 1], end] for ids in encoded[1::2]]
    columns = {
        "tokens": make_column([ids for ids, _, _ in sources], length=sequence_length, fill=tokens.padding),
        "decoder_tokens": make_column(
            [[config.decoder_start, *ids[:-1]] for ids in written], length=target_length, fill=tokens.padding
        ),
    }
    cuts = [len(ids) >= target_length for ids in encoded[1::2]]
    return _made(
        config,
        records,
        tokens,
        columns,
        {"segments": "tokens", "decoder_segments": "decoder_tokens"},
        make_column(written, length=target_length, fill=IGNORED),
        (
            f"{records.label}: {len(pairs):,} pairs of texts",
            *_truncated([cut for _, _, cut in sources], "sources", sequence_length),
            *_truncated(cuts, "targets", target_length),
        ),
        decoder_length=target_length,
    )


def _made(
    config: LabelledTextData | TaggedTextData | TextPairData,
    records: _Records,
    tokens: FramedTokens,
    columns: Mapping[str, Column],
    segments: Mapping[str, str],
    targets: Column | np.ndarray,
    description: Sequence[str],
    *,
    classes: list[str] | None = None,
    decoder_length: int | None = None,
) -> TextRows:
    identity = {
        "kind": config.kind,
        "content_sha256": digest(columns, targets),
        "sequence_length": columns["tokens"].length,
        "tokenizer_sha256": tokenizer_sha256(tokens.tokenizer),
        "num_rows": len(records.train),
        "num_validation_rows": len(records.validation),
    }
    is_number = isinstance(targets, np.ndarray) and targets.dtype.kind == "f"
    counts = f"{len(records.train):,} training rows and {len(records.validation):,} validation rows"
    kind = "bytes" if isinstance(tokens.tokenizer, ByteTokenizer) else "tokenizer of the tokenizers library"
    return TextRows(
        train=RaggedRows(columns, segments, targets, records.train, label=records.label),
        validation=RaggedRows(columns, segments, targets, records.validation) if len(records.validation) else None,
        tokenizer=tokens.tokenizer,
        num_outputs=len(classes) if classes is not None else 1 if is_number else None,
        decoder_length=decoder_length,
        identity=identity,
        description=(*description, counts, f"tokenizer: {kind}, {tokens.tokenizer.vocab_size:,} ids"),
        reading=None if decoder_length is not None else {"kind": config.kind, "classes": classes},
    )


def _with_classes(records: _Records, column: str, known: Sequence[str] | None) -> tuple[_Records, list[str]]:
    """Returns rows whose last value is the name of their class, and the classes.

    Rows without a class are passed over where they are evaluated, and refused where they are to be trained on.
    """
    rows = records.rows
    found = [class_name(row.values[-1], where=row.where, column=column) for row in rows]
    without = unlabelled(found, known or records.classes)
    if known is None:
        places = records.train
        check_labelled([found[i] for i in places], without[places], lambda i: rows[places[i]].where, column=column)
    classes = class_names(
        [name for name, is_left in zip(found, without, strict=True) if not is_left],
        label=records.label,
        known=known,
        named=records.classes,
    )
    moved = np.cumsum(~without) - 1
    train, validation = (moved[side[~without[side]]] for side in (records.train, records.validation))
    left = [
        Record(row.where, (*row.values[:-1], name))
        for row, name, is_left in zip(rows, found, without, strict=True)
        if not is_left
    ]
    return _Records(records.label, left, train, validation, records.classes), classes


def _read(
    config: LabelledTextData | TaggedTextData | TextPairData,
    columns: Sequence[tuple[str, str]],
    own: Any,
    *,
    named: str | None = None,
) -> _Records:
    """Reads the rows for training, and those for evaluation from their own file or from among them.

    Args:
        config: Which rows.
        columns: Those to read.
        own: Makes the built-in rows.
        named: Column of classes, whose numbers become the names that the file gives them.
    """
    classes = None
    if config.path is None:
        if own is None:
            known = " or data.builtin=python_docstrings" if not isinstance(config, TaggedTextData) else ""
            raise DataError(f"data.path is null; set data.path to a .csv, .jsonl or .parquet file{known}")
        label, rows = "built-in python_docstrings", own()
    else:
        label, rows = config.path, read_records(config.path, columns, what="data.path", named=named)
        classes = declared_classes(config.path, named, what="data.path") if named else None
    if config.validation_path is not None:
        more = read_records(config.validation_path, columns, what="data.validation_path", named=named)
        sides = np.arange(len(rows)), len(rows) + np.arange(len(more))
        return _Records(label, [*rows, *more], *sides, classes)
    train, validation = split_examples(len(rows), validation_fraction=config.validation_fraction, label=label)
    return _Records(label, rows, train, validation, classes)


def _text(record: Record, place: int, column: str) -> str:
    return text_of(record.values[place], where=record.where, column=column)


def _tokens(config: LabelledTextData | TaggedTextData | TextPairData, texts: Sequence[str]) -> FramedTokens:
    return framed_tokens(build_tokenizer(config.tokenizer, texts, special=added_tokens(config)), config.tokenizer)


def _truncated(cuts: Sequence[bool], noun: str, length: int) -> list[str]:
    """Returns a line about what was too long, where anything was."""
    count = sum(cuts)
    return [f"{count:,} of {len(cuts):,} {noun} are longer than {length:,} tokens and truncated"] if count else []


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
