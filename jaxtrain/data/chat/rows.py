"""Rows of chats: conversations cut, dropped, packed several to a row or padded, and pairs of answers.

Shapes: B rows of a batch, N conversations, L tokens per row.
"""

import bisect
import datetime
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.config.data import PYTHON_DOCS, ChatData, added_tokens
from jaxtrain.data.chat.conversations import Conversation, Pair, read_conversations, read_pairs
from jaxtrain.data.chat.templates import (
    MaskedTokens,
    chat_encoder,
    chat_format,
    compile_template,
    format_of_reading,
    masked_tokens,
)
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.rows import Examples, Row, Rows, padded
from jaxtrain.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    build_tokenizer,
    described,
    special_ids,
    tokenizer_sha256,
)
from jaxtrain.errors import ConfigError, DataError

# Constant, so that the rows of a run are those of every other.
_ORDER_SEED = 20240602


@dataclass(frozen=True)
class Store:
    """Conversations as tokens, one after another; those of pair k are 2 k and 2 k + 1.

    `ids` int32 and `trained` bool [all tokens]; `starts` int64 [N + 1]; `padding` fills rows of `length` up.
    """

    ids: np.ndarray
    trained: np.ndarray
    starts: np.ndarray
    length: int
    padding: int

    @property
    def sizes(self) -> np.ndarray:
        """Places that each conversation takes in a row, int64 [N]: its last token is a target alone."""
        return np.diff(self.starts) - 1


@dataclass(frozen=True)
class _Fitted:
    """Conversations that fit into rows: which (int64), their tokens, and how many were cut, and dropped as too long."""

    kept: np.ndarray
    tokens: list[MaskedTokens]
    cut: int
    dropped: int


def open_chat(
    config: ChatData,
    *,
    sequence_length: int,
    pairs: bool,
    scored: bool = False,
    reading: Mapping[str, Any] | None = None,
) -> Examples:
    """Opens conversations, or pairs of answers (`scored`: the last token of each is an input too).

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
    label = config.path if isinstance(config.path, str) else ", ".join(config.path)
    label = f"built-in {label}" if label == PYTHON_DOCS else label
    conversations, sides = _read(config, label, pairs=pairs)
    texts = (str(one.get("content") or "") for chat in conversations for one in chat.messages)
    tokenizer = build_tokenizer(config.tokenizer, texts, special=added_tokens(config))
    assert isinstance(tokenizer, ByteTokenizer | BpeTokenizer)
    form = format_of_reading(reading) or chat_format(config, tokenizer)
    template = compile_template(form, today=datetime.date.fromisoformat(config.date))
    masked = masked_tokens(conversations, template, chat_encoder(tokenizer), train_on=config.train_on)
    most = sequence_length if scored else sequence_length + 1
    fitted = _fit(masked, most=most, too_long=config.too_long, together=2 if pairs else 1)
    # Places in the store of what is left of each side.
    kept = fitted.kept[::2] // 2 if pairs else fitted.kept
    sides = [np.flatnonzero(np.isin(kept, side)) for side in sides]
    if not len(sides[0]):
        raise DataError(
            f"{label} has no conversation with an answer within {sequence_length:,} tokens to train on; raise "
            "data.sequence_length"
        )
    padding = special_ids(tokenizer, config.tokenizer).padding
    store = _make_store(fitted.tokens, length=sequence_length, padding=0 if padding is None else padding)
    if config.packing and not pairs:
        layouts = [[side[row].tolist() for row in packed(store.sizes[side], store.length)] for side in sides]
        made: list[Rows] = [PackedRows(store, layout) for layout in layouts]
    else:
        layouts = [side[:, None].tolist() for side in sides]
        made = [PaddedRows(store, side, together=2 if pairs else 1) for side in sides]
    counts = _counts(store, fitted, sides, made, pairs=pairs)
    identity = {
        "kind": config.kind,
        "pairs": pairs,
        "content_sha256": _digest(store, [row for layout in layouts for row in layout]),
        "template_sha256": hashlib.sha256(form.source.encode()).hexdigest(),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "sequence_length": store.length,
        "padding": store.padding,
        "num_rows": len(layouts[0]),
        "num_validation_rows": len(layouts[1]),
    }
    return Examples(
        train=made[0],
        validation=made[1] if len(made[1]) else None,
        tokenizer=tokenizer,
        identity=identity,
        description=(*_description(label, counts, form.label), described(tokenizer)),
        reading=form.to_reading(),
        counts=counts,
    )


def _read(config: ChatData, label: str, *, pairs: bool) -> tuple[list[Conversation], Sequence[np.ndarray]]:
    """Returns conversations, of a pair both after one another, and which (or which pairs) are for training, evaluation.

    Those of equal prompts are on one side; the built-in answers are all different, and so are their questions.
    """
    read = read_pairs if pairs else read_conversations
    found: list[Conversation | Pair] = [*read(config.path)]
    if config.validation_path is not None:
        more = read(config.validation_path, key="data.validation_path")
        sides = np.arange(len(found)), len(found) + np.arange(len(more))
        found += more
    else:
        groups = [one.prompt if isinstance(one, Conversation) else one.group for one in found]
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        _, held_out = split_examples(
            len(numbers), validation_fraction=config.validation_fraction, label=f"{label} (equal prompts as one)"
        )
        is_held_out = np.isin([numbers[group] for group in groups], held_out)
        sides = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    both = [(one,) if isinstance(one, Conversation) else (one.chosen, one.rejected) for one in found]
    return [one for group in both for one in group], sides


def _fit(conversations: Iterable[MaskedTokens], *, most: int, too_long: str, together: int) -> _Fitted:
    """Cuts or drops conversations of more than `most` tokens; `together` neighbours (2 for pairs) are left as one.

    Raises:
        DataError: A conversation is too long and may be neither cut nor dropped, or both of a pair are equal.
    """
    kept: list[int] = []
    tokens: list[MaskedTokens] = []
    cut = dropped = 0
    found = iter(enumerate(conversations))
    for group in iter(lambda: [one for _, one in zip(range(together), found, strict=False)], []):
        # What follows the last token with a loss changes nothing: it needs no place in a row.
        sizes = [int(np.flatnonzero(one.trained)[-1]) + 1 if one.trained.any() else len(one.ids) for _, one in group]
        parts = [
            MaskedTokens(one.where, one.ids[: min(most, size)], one.trained[: min(most, size)])
            for size, (_, one) in zip(sizes, group, strict=True)
        ]
        is_over = max(sizes) > most
        if is_over and too_long == "error":
            raise DataError(
                f"{parts[0].where} has {max(sizes):,} tokens, but rows have {most - 1:,}; raise data.sequence_length, "
                "or set data.too_long=cut or data.too_long=drop"
            )
        is_same = together == 2 and np.array_equal(parts[0].ids, parts[1].ids)
        if is_same and not is_over:
            raise DataError(f"{parts[0].where} has answers that the chat template makes equal; remove the pair")
        # The first token is nobody's target; a conversation may lose all of its answers to the cut, and a pair what
        # tells its answers apart.
        is_left = all(part.trained[1:].any() for part in parts) and not is_same
        if is_left and not (too_long == "drop" and is_over):
            kept += [number for number, _ in group]
            tokens += parts
            cut += is_over
        else:
            dropped += 1
    return _Fitted(np.array(kept, np.int64), tokens, cut, dropped)


def _make_store(tokens: Sequence[MaskedTokens], *, length: int, padding: int) -> Store:
    starts = np.concatenate([[0], np.cumsum([len(one.ids) for one in tokens], dtype=np.int64)])
    ids = np.concatenate([np.zeros(0, np.int32), *(one.ids for one in tokens)])
    trained = np.concatenate([np.zeros(0, bool), *(one.trained for one in tokens)])
    return Store(ids, trained, starts, length, padding)


def packed(sizes: np.ndarray, length: int) -> list[list[int]]:
    """Distributes conversations of these sizes over few rows of `length` places; returns those of each row.

    The largest goes first, each into the fullest row that has room; rows are in an order that looks random and is
    always the same.
    """
    rows: list[list[int]] = []
    rooms: list[int] = []  # ascending, the rooms that some row has
    with_room: dict[int, list[int]] = {}
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        place = bisect.bisect_left(rooms, size)
        if place == len(rooms):
            room, row = length, len(rows)
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[place], with_room[room]
        rows[row].append(number)
        left = room - size
        if left not in with_room:
            bisect.insort(rooms, left)
            with_room[left] = []
        with_room[left].append(row)
    # Neighbours are of one length, which batches without shuffling would show.
    return [rows[i] for i in np.random.default_rng(_ORDER_SEED).permutation(len(rows))]


class PackedRows(Rows):
    """Rows of several conversations: `tokens`, `segments` (1, 2, ..., and 0 after the last) and `positions` in each."""

    def __init__(self, store: Store, rows: Sequence[Sequence[int]]):
        super().__init__(len(rows))
        self._store = store
        self._members = np.array([number for row in rows for number in row], np.int64)
        self._firsts = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])

    def num_tokens(self, numbers: np.ndarray) -> int:
        before = np.concatenate([[0], np.cumsum(self._store.sizes[self._members])])
        return int(np.diff(before[self._firsts])[numbers].sum())

    def gather(self, indices: np.ndarray) -> Row:
        store, shape = self._store, (len(indices), self._store.length)
        tokens_BL, targets_BL = np.full(shape, store.padding, np.int32), np.full(shape, store.padding, np.int32)
        segments_BL, positions_BL = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        weights_BL = np.zeros(shape, np.float32)
        for place, row in enumerate((indices % len(self)).tolist()):
            at = 0
            for segment, number in enumerate(self._members[self._firsts[row] : self._firsts[row + 1]].tolist()):
                begin, end = int(store.starts[number]), int(store.starts[number + 1]) - 1
                here = slice(at, at + end - begin)
                tokens_BL[place, here], targets_BL[place, here] = store.ids[begin:end], store.ids[begin + 1 : end + 1]
                weights_BL[place, here] = store.trained[begin + 1 : end + 1]
                segments_BL[place, here], positions_BL[place, here] = segment + 1, np.arange(end - begin)
                at = here.stop
        inputs = {"tokens": tokens_BL, "segments": segments_BL, "positions": positions_BL}
        return {"inputs": inputs, "targets": targets_BL, "weights": weights_BL}


class PaddedRows(Rows):
    """Rows of one conversation, or of a pair [2, L] (`together` 2), filled up with places of weight 0."""

    def __init__(self, store: Store, numbers: np.ndarray, *, together: int = 1):
        super().__init__(len(numbers))
        self._store, self._numbers, self._together = store, numbers, together

    def _members(self, indices: np.ndarray) -> np.ndarray:
        return (self._together * self._numbers[indices][:, None] + np.arange(self._together)).reshape(-1)

    def num_tokens(self, numbers: np.ndarray) -> int:
        return int(np.minimum(self._store.sizes[self._members(numbers)] + self._together - 1, self._store.length).sum())

    def gather(self, indices: np.ndarray) -> Row:
        store, members = self._store, self._members(indices % len(self))
        starts, sizes, length = store.starts[members], store.sizes[members], store.length
        # The last token of a pair's answer is an input too where there is room (`scored` ones have it): a reward model
        # scores the token that ends an answer.
        read = np.minimum(sizes + self._together - 1, length)
        found = {
            "inputs": padded(store.ids, starts, read, length=length, fill=store.padding),
            "targets": padded(store.ids, starts + 1, sizes, length=length, fill=store.padding),
            "weights": padded(store.trained, starts + 1, sizes, length=length, fill=0).astype(np.float32),
        }
        if self._together == 1:
            return found
        return {name: column.reshape(len(indices), self._together, -1) for name, column in found.items()}


def _digest(store: Store, layout: Sequence[Sequence[int]]) -> str:
    """Returns a hash of all tokens, of what is trained, and of the rows that hold them."""
    found = hashlib.sha256()
    for array in (store.ids, store.trained, store.starts):
        found.update(np.ascontiguousarray(array).tobytes())
    for row in layout:
        found.update(np.array([len(row), *row], np.int64).tobytes())
    return found.hexdigest()


def _counts(
    store: Store, fitted: _Fitted, sides: Sequence[np.ndarray], rows: Sequence[Rows], *, pairs: bool
) -> dict[str, int]:
    conversations = len(store.starts) - 1
    first = np.zeros(len(store.ids), bool)
    first[store.starts[:-1]] = True  # the first token of a conversation is nobody's target
    return {
        "pairs" if pairs else "conversations": conversations // 2 if pairs else conversations,
        "training_rows": len(rows[0]),
        "validation_rows": len(rows[1]),
        "tokens": len(store.ids),
        "trained_tokens": int((store.trained & ~first).sum()),
        "cut": fitted.cut,
        "dropped": fitted.dropped,
        "held_out": len(sides[1]),
        "row_length": store.length,
    }


def _description(label: str, counts: Mapping[str, int], template: str) -> list[str]:
    noun = "pairs" if "pairs" in counts else "conversations"
    share, length = counts["trained_tokens"] / counts["tokens"], counts["row_length"]
    lines = [
        f"{label}: {counts[noun]:,} {noun}, {counts['tokens']:,} tokens, {share:.0%} of them trained",
        f"template: {template}",
        f"{counts['training_rows']:,} training rows and {counts['validation_rows']:,} validation rows of {length:,} "
        "tokens",
    ]
    if counts["cut"] or counts["dropped"]:
        whole, cut = counts[noun] + counts["dropped"], f"{counts['cut']:,} are cut to {length:,} tokens"
        lines.insert(2, f"of {whole:,} {noun}, {cut} and {counts['dropped']:,} dropped (too long)")
    return lines
