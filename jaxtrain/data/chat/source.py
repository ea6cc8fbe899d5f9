"""Chats from a config: files read, written by the template, encoded, split and put into rows."""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from jaxtrain.config.data import PYTHON_DOCS, ChatData, added_tokens
from jaxtrain.data.chat.conversations import Conversation, Pair, label_of, read_conversations, read_pairs
from jaxtrain.data.chat.encoding import chat_encoder
from jaxtrain.data.chat.formats import ChatFormat, chat_format, format_of_reading
from jaxtrain.data.chat.masks import masked_tokens
from jaxtrain.data.chat.rows import Fitted, PackedRows, PaddedRows, PairRows, Store, digest, fit, make_store, packed
from jaxtrain.data.chat.templates import Template, compile_template
from jaxtrain.data.examples import split_examples
from jaxtrain.data.rows import Rows
from jaxtrain.data.skipped import SkippedRecords, skipped_records
from jaxtrain.data.special import special_ids
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, build_tokenizer, tokenizer_sha256
from jaxtrain.errors import ConfigError, DataError


@dataclass(frozen=True)
class ChatRows:
    """Rows of chats, and what `Data` says of them.

    Attributes:
        train: The training rows.
        validation: The rows kept for evaluation; None: there are none.
        tokenizer: Made the ids.
        identity: Values that identify the rows, for the fingerprint.
        description: Lines that describe the rows to the user.
        reading: See `Data.reading`.
        counts: See `Data.counts`.
        skipped: Counts the bad rows that were left out; None: the first is an error.
    """

    train: Rows
    validation: Rows | None
    tokenizer: ByteTokenizer | BpeTokenizer
    identity: dict[str, Any]
    description: tuple[str, ...]
    reading: dict[str, Any]
    counts: dict[str, int]
    skipped: SkippedRecords | None


@dataclass(frozen=True)
class _Said:
    """What was read: conversations, of a pair both after one another, and which are kept for evaluation.

    Attributes:
        conversations: In the order of the files.
        train: int64, which of them (or of the pairs) are trained on.
        validation: int64, the others.
    """

    conversations: list[Conversation]
    train: np.ndarray
    validation: np.ndarray


def open_chat(
    config: ChatData,
    *,
    sequence_length: int,
    pairs: bool,
    scored: bool = False,
    reading: Mapping[str, Any] | None = None,
) -> ChatRows:
    """Opens conversations, or pairs of answers.

    Args:
        config: Which ones.
        sequence_length: L.
        pairs: Whether rows are pairs of answers.
        scored: Whether the last token of each answer is scored, and so must be an input.
        reading: `Data.reading` of what a model was trained on, whose template is used; None: that of the config.

    Returns:
        Rows of conversations: `inputs` int32 [L] or, where several are packed into a row, `tokens`, `segments` and
        `positions` int32 [L] each; `targets` int32 [L]; `weights` float32 [L], 1 for the targets that are trained.
        Rows of pairs: `inputs`, `targets` and `weights` [2, L], the chosen answer first.

    Raises:
        DataError: A file or row is wrong; names file and line.
        ConfigError: The template is wrong or missing; names its line.
    """
    if pairs and config.train_on == "all":
        raise ConfigError("data.train_on=all takes the prompt into preferences; set data.train_on=answers or last")
    skipped = skipped_records(
        label_of(config), on_bad_record=config.on_bad_record, max_bad_fraction=config.max_bad_fraction
    )
    said = _read_pairs(config, skipped) if pairs else _read(config, skipped)
    tokenizer = build_tokenizer(config.tokenizer, _texts(said.conversations), special=added_tokens(config))
    assert isinstance(tokenizer, ByteTokenizer | BpeTokenizer)
    form = format_of_reading(reading) or chat_format(config, tokenizer)
    template = compile_template(form, today=datetime.date.fromisoformat(config.date))
    encoder = chat_encoder(tokenizer)
    masked = masked_tokens(said.conversations, template, encoder, train_on=config.train_on, skipped=skipped)
    fitted = fit(
        masked,
        length=sequence_length,
        too_long=config.too_long,
        together=2 if pairs else 1,
        scored=scored,
        skipped=skipped,
        of=len(said.conversations),
    )
    if not len(fitted.kept):
        raise DataError(
            f"{label_of(config)} has no conversation with an answer within {sequence_length:,} tokens; raise "
            "data.sequence_length"
        )
    padding = special_ids(tokenizer, config.tokenizer).padding
    store = make_store(fitted.tokens, length=sequence_length, padding=0 if padding is None else padding)
    sides = [_still_there(side, fitted, pairs=pairs) for side in (said.train, said.validation)]
    if not len(sides[0]):
        raise DataError(f"no conversation of {label_of(config)} is left to train on; raise data.sequence_length")
    made = [_rows(config, store, side, pairs=pairs) for side in sides]
    counts = _counts(store, fitted, sides, [len(rows) for rows, _ in made], pairs=pairs)
    return ChatRows(
        train=made[0][0],
        validation=made[1][0] if len(made[1][0]) else None,
        tokenizer=tokenizer,
        identity=_identity(config, form, tokenizer, store, [layout for _, layout in made], pairs=pairs),
        description=_description(config, counts, template, tokenizer, _spelled(said.conversations, encoder.special)),
        reading=form.to_reading(),
        counts=counts,
        skipped=skipped,
    )


def _read(config: ChatData, skipped: SkippedRecords | None) -> _Said:
    found = read_conversations(config.path, skipped=skipped)
    if config.validation_path is not None:
        more = read_conversations(config.validation_path, key="data.validation_path", skipped=skipped)
        return _Said([*found, *more], np.arange(len(found)), len(found) + np.arange(len(more)))
    # The built-in answers are all different, and so are their questions.
    return _Said(found, *_split([one.prompt for one in found], config))


def _read_pairs(config: ChatData, skipped: SkippedRecords | None) -> _Said:
    found = read_pairs(config.path, skipped=skipped)
    if config.validation_path is not None:
        more = read_pairs(config.validation_path, key="data.validation_path", skipped=skipped)
        sides = (np.arange(len(found)), len(found) + np.arange(len(more)))
        return _Said(_both([*found, *more]), *sides)
    groups = [one.chosen.prompt if one.group is None else one.group for one in found]
    return _Said(_both(found), *_split(groups, config))


def _both(pairs: Sequence[Pair]) -> list[Conversation]:
    return [one for pair in pairs for one in (pair.chosen, pair.rejected)]


def _split(groups: Sequence[str], config: ChatData) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows so that those of one group are on one side."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    which = np.array([numbers[group] for group in groups], np.int64)
    _, held_out = split_examples(
        len(numbers), validation_fraction=config.validation_fraction, label=f"{label_of(config)} (equal prompts as one)"
    )
    is_held_out = np.isin(which, held_out)
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def _still_there(side: np.ndarray, fitted: Fitted, *, pairs: bool) -> np.ndarray:
    """Returns the places in the store of what is left of one side."""
    kept = fitted.kept[::2] // 2 if pairs else fitted.kept
    return np.flatnonzero(np.isin(kept, side))


def _rows(config: ChatData, store: Store, side: np.ndarray, *, pairs: bool) -> tuple[Rows, list[list[int]]]:
    """Returns rows, and which conversations (or pairs) each holds."""
    if config.packing and not pairs:
        layout = [side[row].tolist() for row in packed(store.sizes[side], store.length)]
        return PackedRows(store, layout), layout
    rows = PairRows(store, side) if pairs else PaddedRows(store, side)
    return rows, side[:, None].tolist()


def _texts(conversations: Iterable[Conversation]) -> Iterable[str]:
    return (str(one.get("content") or "") for chat in conversations for one in chat.messages)


def _spelled(conversations: Iterable[Conversation], special: Sequence[str]) -> int:
    """Returns how many messages hold the text of a special token, which a template does not tell from its own."""
    return sum(any(name in text for name in special) for text in _texts(conversations))


def _counts(
    store: Store, fitted: Fitted, sides: Sequence[np.ndarray], rows: Sequence[int], *, pairs: bool
) -> dict[str, int]:
    conversations = len(store.starts) - 1
    first = np.zeros(len(store.ids), bool)
    first[store.starts[:-1]] = True  # the first token of a conversation is nobody's target
    return {
        "pairs" if pairs else "conversations": conversations // 2 if pairs else conversations,
        "training_rows": rows[0],
        "validation_rows": rows[1],
        "tokens": len(store.ids),
        "trained_tokens": int((store.trained & ~first).sum()),
        "cut": fitted.cut,
        "dropped": fitted.dropped,
        "held_out": len(sides[1]),
        "row_length": store.length,
    }


def _identity(
    config: ChatData,
    form: ChatFormat,
    tokenizer: ByteTokenizer | BpeTokenizer,
    store: Store,
    layouts: Sequence[Sequence[Sequence[int]]],
    *,
    pairs: bool,
) -> dict[str, Any]:
    return {
        "kind": config.kind,
        "pairs": pairs,
        "content_sha256": digest(store, [row for layout in layouts for row in layout]),
        "template_sha256": sha256(form.source.encode()).hexdigest(),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "sequence_length": store.length,
        "padding": store.padding,
        "num_rows": len(layouts[0]),
        "num_validation_rows": len(layouts[1]),
    }


def _description(
    config: ChatData, counts: Mapping[str, int], template: Template, tokenizer: Any, spelled: int
) -> tuple[str, ...]:
    noun = "pairs" if "pairs" in counts else "conversations"
    share = counts["trained_tokens"] / counts["tokens"]
    lines = [
        f"{label_of(config)}: {counts[noun]:,} {noun}, {counts['tokens']:,} tokens, {share:.0%} of them trained",
        f"template: {template.format.label}",
    ]
    if counts["cut"] or counts["dropped"]:
        whole = counts[noun] + counts["dropped"]
        lines.append(
            f"of {whole:,} {noun}, {counts['cut']:,} are cut to {counts['row_length']:,} tokens and "
            f"{counts['dropped']:,} dropped (too long)"
        )
    if spelled and config.path != PYTHON_DOCS:
        lines.append(f"{spelled:,} messages hold the text of a special token, which is read as that token")
    how = "" if noun == "pairs" else ", packed" if config.packing else ", one conversation each"
    rows = f"{counts['training_rows']:,} training rows and {counts['validation_rows']:,} validation rows"
    lines.append(f"{rows} of {counts['row_length']:,} tokens{how}")
    kind = "bytes" if isinstance(tokenizer, ByteTokenizer) else "tokenizer of the tokenizers library"
    return (*lines, f"tokenizer: {kind}, {tokenizer.vocab_size:,} ids")
