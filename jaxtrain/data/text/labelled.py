"""Labelled texts, tagged words and pairs of texts as rows of padded tokens.

Shapes: L tokens per row, T tokens per target of a decoder.
"""

import functools
import inspect
import re
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.data import DOCSTRING_PACKAGES, LabelledTextData, TaggedTextData, TextPairData, added_tokens
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.rows import Examples
from jaxtrain.data.text.corrupt import IGNORED
from jaxtrain.data.text.frame import (
    Column,
    FramedTokens,
    RaggedRows,
    digest,
    framed_texts,
    framed_tokens,
    framed_words,
    make_column,
)
from jaxtrain.data.text.records import (
    Record,
    class_name,
    class_names,
    declared_classes,
    list_of,
    number_of,
    numbered,
    read_records,
    saved_classes,
    text_of,
)
from jaxtrain.data.tokenizer import build_tokenizer, described, encode_all, needed, tokenizer_sha256
from jaxtrain.errors import DataError

_TextConfig = LabelledTextData | TaggedTextData | TextPairData

# A function and its docstring. Quantifiers that give nothing back keep the search linear.
_FUNCTION = re.compile(
    r'^[ \t]*(?:async )?def (\w++)\((?:[^()]|\([^()]*+\))*+\)(?: *-> *[^:\n]++)?: *\n[ \t]++[rR]?"""(.*?)"""',
    re.DOTALL | re.MULTILINE,
)
_LEAST_WORDS = 4


@dataclass(frozen=True)
class _Records:
    """The rows of a source, and which of them are for training, and for evaluation."""

    label: str
    rows: list[Record]
    train: np.ndarray
    validation: np.ndarray
    # What the file names its classes, in the order of their numbers.
    classes: list[str] | None

    def column(self, place: int, name: str, read: Callable[..., Any]) -> list[Any]:
        """Returns what `read` (`text_of`, ...) makes of the values of a column."""
        return [read(row.values[place], where=row.where, column=name) for row in self.rows]


def open_labelled_text(
    config: LabelledTextData, *, sequence_length: int, task: str | None, reading: Mapping[str, Any] | None
) -> Examples:
    """Opens texts, or pairs of texts, with a class or, under the task "regression", a number each.

    The classes are those of what a model was trained on (`reading`), or those of the data.

    Returns:
        Rows of `inputs`: `tokens`, `segments` (1 for a token, 0 for what fills the row up) and, for pairs whose
        tokenizer tells them apart, `token_types`, int32 [L] each; `targets`: int32 [], or float32 [1] for numbers.

    Raises:
        DataError: A file cannot be read, a value is missing or wrong, or a special token is missing.
    """
    names = [("text", config.text), *([("second_text", config.second_text)] if config.second_text else [])]
    is_class = task != "regression"
    label = ("label", config.label)
    records = _read(config, [*names, label], _labelled_docstrings, named=config.label if is_class else None)
    classes = None
    if is_class:
        found = records.column(-1, config.label, class_name)
        known = saved_classes(reading, config.kind)
        classes = class_names(found, label=records.label, known=known, named=records.classes)
        targets, kind = numbered(found, classes), f"{len(classes)} classes ({_few(classes)})"
    else:
        targets = np.array(records.column(-1, config.label, number_of), np.float32)[:, None]
        kind = "numbers"
    texts = list(zip(*(records.column(i, name, text_of) for i, (_, name) in enumerate(names)), strict=True))
    tokens = _tokens(config, [text for row in texts for text in row])
    columns, cuts = framed_texts(tokens, texts, sequence_length=sequence_length)
    description = f"{records.label}: {len(texts):,} {'pairs of ' if len(names) > 1 else ''}texts, {kind}"
    lines = (description, *_truncated(cuts, "texts", sequence_length))
    return _made(config, records, tokens, columns, targets, lines, classes=classes)


def open_tagged_text(config: TaggedTextData, *, sequence_length: int, reading: Mapping[str, Any] | None) -> Examples:
    """Opens lists of words with a class each; the first token of a word has its class.

    Returns:
        Rows of `inputs`: `tokens` and `segments` int32 [L]; `targets` int32 [L], -100 where there is no class.

    Raises:
        DataError: As for `open_labelled_text`, or a row has not as many classes as words.
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
    kind = f"{len(every):,} words, {len(classes)} classes ({_few(classes)})"
    lines = (
        f"{records.label}: {len(words):,} rows of {kind}",
        *_truncated(found.cuts, "rows", sequence_length),
    )
    return _made(config, records, tokens, columns, column, lines, classes=classes)


def open_text_pairs(config: TextPairData, *, sequence_length: int) -> Examples:
    """Opens pairs of a text to read (L) and a text to write (T).

    Returns:
        Rows of `inputs`: `tokens` and `segments` int32 [L], `decoder_tokens` (the targets one place later, after
        `config.decoder_start`) and `decoder_segments` int32 [T]; `targets` int32 [T], -100 after the end.

    Raises:
        DataError: As for `open_labelled_text`.
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
    return _made(config, records, tokens, columns, column, lines, classes=None)


def _made(
    config: _TextConfig,
    records: _Records,
    tokens: FramedTokens,
    columns: dict[str, Column],
    targets: Column | np.ndarray,
    description: Sequence[str],
    *,
    classes: list[str] | None,
) -> Examples:
    decoder = columns.get("decoder_tokens")
    segments = {"segments": "tokens"} | ({} if decoder is None else {"decoder_segments": "decoder_tokens"})
    train, validation = (RaggedRows(columns, segments, targets, side) for side in (records.train, records.validation))
    counts = f"{len(records.train):,} training rows and {len(records.validation):,} validation rows"
    is_number = isinstance(targets, np.ndarray) and targets.dtype.kind == "f"
    return Examples(
        train=train,
        validation=validation if len(validation) else None,
        tokenizer=tokens.tokenizer,
        num_outputs=len(classes) if classes is not None else 1 if is_number else None,
        decoder_length=None if decoder is None else decoder.length,
        identity={
            "kind": config.kind,
            "content_sha256": digest(columns, targets),
            "sequence_length": columns["tokens"].length,
            "tokenizer_sha256": tokenizer_sha256(tokens.tokenizer),
            "num_rows": len(records.train),
            "num_validation_rows": len(records.validation),
        },
        description=(*description, counts, described(tokens.tokenizer)),
        reading=None if decoder is not None else {"kind": config.kind, "classes": classes},
    )


def _read(
    config: _TextConfig,
    columns: Sequence[tuple[str, str]],
    own: Callable[[], list[Record]] | None,
    *,
    named: str | None = None,
) -> _Records:
    """Reads the rows for training, and those for evaluation from their own file or from among them."""
    classes = None
    if config.path is not None:
        label, rows = config.path, read_records(config.path, columns, what="data.path", named=named)
        classes = declared_classes(config.path, named, what="data.path") if named else None
    elif own is not None and getattr(config, "builtin", None):
        label, rows = "built-in python_docstrings", own()
    else:
        raise DataError("data.path is null; set it to a .csv, .jsonl or .parquet file")
    if config.validation_path is not None:
        more = read_records(config.validation_path, columns, what="data.validation_path", named=named)
        sides = np.arange(len(rows)), len(rows) + np.arange(len(more))
        return _Records(label, [*rows, *more], *sides, classes)
    sides = split_examples(len(rows), validation_fraction=config.validation_fraction, label=label)
    return _Records(label, rows, *sides, classes)


def _tokens(config: _TextConfig, texts: Sequence[str]) -> FramedTokens:
    return framed_tokens(build_tokenizer(config.tokenizer, texts, special=added_tokens(config)), config.tokenizer)


def _truncated(cuts: Sequence[bool], noun: str, length: int) -> list[str]:
    """Returns a line about what was too long, where anything was."""
    count = sum(cuts)
    return [f"{count:,} of {len(cuts):,} {noun} are longer than {length:,} tokens and truncated"] if count else []


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _labelled_docstrings() -> list[Record]:
    """Returns (docstring, package) of the functions of seven packages of the standard library."""
    found: dict[str, Record] = {}
    for package in DOCSTRING_PACKAGES:
        for where, _, text in _docstrings(package):
            found.setdefault(text, Record(where, (text, package)))
    return list(found.values())


def _named_docstrings() -> list[Record]:
    """Returns (first sentence of a docstring, name of the function as words) of the standard library."""
    found: dict[str, Record] = {}
    for where, name, text in _docstrings(""):
        words = name.strip("_").replace("_", " ").lower()
        sentence = text.partition("\n\n")[0].replace("\n", " ").partition(". ")[0]
        if words.isascii() and not name.startswith("__"):
            found.setdefault(sentence, Record(where, (sentence, words)))
    return list(found.values())


@functools.cache
def _docstrings(package: str) -> tuple[tuple[str, str, str], ...]:
    """Returns (file, function, docstring) of a package of the standard library; "": of all of it."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py")) if not package else []
    for folder in [package] if package else DOCSTRING_PACKAGES:
        files += sorted((library / folder).rglob("*.py"))
    found = []
    for file in files:
        if {"test", "tests", "idle_test"} & set(file.relative_to(library).parts):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for name, doc in _FUNCTION.findall(text):
            cleaned = inspect.cleandoc(doc)
            if len(cleaned.split()) >= _LEAST_WORDS:
                found.append((str(file.relative_to(library)), name, cleaned))
    if not found:
        raise DataError(f"the standard library in {library} has no source of {package or 'its modules'}; set data.path")
    return tuple(found)
