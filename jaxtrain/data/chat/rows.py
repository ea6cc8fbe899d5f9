"""Rows of chats: conversations and pairs of answers, read from files of the usual forms, masked, packed or padded.

Shapes: B rows of a batch, N conversations, L tokens per row.
"""

import bisect
import datetime
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxtrain.config.data import PYTHON_DOCS, ChatData, added_tokens, gives_pairs
from jaxtrain.data.chat.templates import (
    ChatEncoder,
    Message,
    Template,
    chat_format,
    compile_template,
    format_of_reading,
    render,
)
from jaxtrain.data.dataset import Data
from jaxtrain.data.formats.open import find_rows, pass_over_files
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.python_texts import questions
from jaxtrain.data.rows import Row, Rows, padded
from jaxtrain.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    build_tokenizer,
    chunks,
    described,
    special_ids,
    tokenizer_sha256,
)
from jaxtrain.errors import ConfigError, DataError

ANSWERS = "assistant"
# Keys by which a message says whether it counts in the loss: 0 or false, 1 or true.
_WEIGHTS = ("weight", "train", "training", "loss")
# Formats in which a struct has every key in every row, null where the row said nothing.
_COLUMNAR = ("parquet", "arrow")
# Constant, so that the rows of a run are those of every other.
_ORDER_SEED = 20240602
# Characters that are encoded at a time: enough for every core, few enough for their tokens as Python objects.
_CHUNK_CHARACTERS = 2**20


@dataclass(frozen=True)
class Conversation:
    """Messages in their order, from `where` (file and line).

    `first` is the first message that may be an answer to train on; `tools` are JSON schemas of what the model may call.
    """

    where: str
    messages: tuple[Message, ...]
    first: int = 0
    tools: Sequence[Mapping[str, Any]] | None = None

    @property
    def prompt(self) -> str:
        """What stands before the first answer, as text: conversations with equal ones are one group."""
        end = next((i for i in range(self.first, len(self.messages)) if self.messages[i]["role"] == ANSWERS), None)
        return "\n".join(f"{one['role']}: {one.get('content')}" for one in self.messages[:end])


@dataclass(frozen=True)
class Pair:
    """Two conversations that begin alike; pairs of one group stay on one side of the split."""

    chosen: Conversation
    rejected: Conversation
    group: str


def is_trained(message: Message) -> bool:
    """Returns whether a message counts in the loss: OpenAI's `weight: 0` and Axolotl's `train: false` leave it out."""
    return all(message.get(name) in (None, 1) for name in _WEIGHTS)


def _made(path: str | Sequence[str], key: str, make: Callable[[str, Mapping[str, Any]], Any]) -> list[Any]:
    """Returns what is made of (file and line, object) of each row of all files that paths name."""
    paths = [path] if isinstance(path, str) else path
    files = [file for one in paths for file in find_rows(one, what=key, one_format=False)]
    return [
        make(where, _without_nulls(row) if file.format in _COLUMNAR else row)
        for file in files
        for where, row in pass_over_files([file], None)
    ]


def _without_nulls(value: Any) -> Any:
    """Returns a value of a columnar file without the keys that only other rows have; the content of a message stays."""
    if isinstance(value, Mapping):
        said = {key: one for key, one in value.items() if one is not None or (key == "content" and "role" in value)}
        return {key: _without_nulls(one) for key, one in said.items()}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _conversation(where: str, row: Mapping[str, Any]) -> Conversation:
    tools = row.get("tools") or None
    if row.get("label") is False:
        raise DataError(f"{where} is an undesirable answer (label: false, as in KTO); remove the row")
    if "messages" in row:
        return _checked(Conversation(where, _messages(where, row["messages"]), 0, tools))
    if "prompt" in row and "completion" in row:
        before, after = _messages(where, row["prompt"], "user"), _messages(where, row["completion"], ANSWERS)
        return _checked(Conversation(where, (*before, *after), len(before), tools))
    raise DataError(
        f"{where} is not a conversation (it has {', '.join(map(str, row))}); write messages, or prompt and completion; "
        "for chosen and rejected, set task=dpo or task=reward"
    )


def _pair(where: str, row: Mapping[str, Any]) -> Pair:
    if "chosen" not in row or "rejected" not in row:
        there = ", ".join(map(str, row))
        raise DataError(f"{where} is not a pair of answers (it has {there}); write prompt, chosen and rejected")
    chosen, rejected = (_messages(where, row[name], ANSWERS) for name in ("chosen", "rejected"))
    if row.get("prompt") is not None and chosen[0]["role"] == rejected[0]["role"] == ANSWERS:
        prompt = _messages(where, row["prompt"], "user")
        chosen, rejected = (*prompt, *chosen), (*prompt, *rejected)
    shortest = min(len(chosen), len(rejected))
    first = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    if first in (0, shortest):
        raise DataError(f"{where} has answers that are equal, or no common prompt; write prompt, chosen and rejected")
    tools = row.get("tools") or None
    both = [_checked(Conversation(where, messages, first, tools)) for messages in (chosen, rejected)]
    return Pair(both[0], both[1], both[0].prompt)


def _messages(where: str, value: Any, role: str | None = None) -> tuple[Message, ...]:
    """Returns the messages of a value: a list of them or, where `role` is given, also a text."""
    if isinstance(value, str) and role is not None:
        return ({"role": role, "content": value},)
    messages = []
    for one in value if isinstance(value, list) else []:
        # A Parquet column has every key in every row. Templates ask whether the content beside calls of tools is none.
        said = one if isinstance(one, dict) else {}
        found = {name: held for name, held in said.items() if held is not None or name == "content"}
        content = found.get("content")
        is_said = isinstance(content, str) or (content is None and "tool_calls" in found)
        if isinstance(found.get("role"), str) and is_said:
            messages.append(found)
    if not messages or len(messages) < len(value):
        raise DataError(f"{where} has {value!r:.60} for messages; write [{{role: user, content: text}}, ...]")
    return tuple(messages)


def _checked(conversation: Conversation) -> Conversation:
    """Returns a conversation up to its last answer."""
    where, messages = conversation.where, conversation.messages
    answers = [i for i in range(conversation.first, len(messages)) if messages[i]["role"] == ANSWERS]
    is_empty = [not ((messages[i].get("content") or "").strip() or messages[i].get("tool_calls")) for i in answers]
    if not any(is_trained(messages[i]) for i in answers) or answers[0] == 0 or any(is_empty):
        roles = ", ".join(dict.fromkeys(one["role"] for one in messages))
        raise DataError(
            f"{where} has no answer to train, or an empty one (roles: {roles}); write one with role: {ANSWERS}"
        )
    return replace(conversation, messages=messages[: answers[-1] + 1])


def documented() -> list[Conversation]:
    """Returns a question about each function of the standard library, and the first paragraph of its docstring."""
    return [_asked(name, question, answer) for name, question, answer in questions()]


def _documented_pairs() -> list[Pair]:
    """Returns questions with their own answer and that of another function; the two functions form a group."""
    found, pairs = questions(), []
    for one, other in zip(found[::2], found[1::2], strict=False):
        for (name, question, answer), (_, _, wrong) in ((one, other), (other, one)):
            pairs.append(Pair(_asked(name, question, answer), _asked(name, question, wrong), group=one[0]))
    return pairs


def _asked(where: str, question: str, answer: str) -> Conversation:
    return Conversation(where, ({"role": "user", "content": question}, {"role": ANSWERS, "content": answer}), first=1)


@dataclass(frozen=True)
class MaskedTokens:
    """A conversation as tokens: int32 [num_tokens], and which are trained, bool [num_tokens]."""

    where: str
    ids: np.ndarray
    trained: np.ndarray


def masked_tokens(
    conversations: Sequence[Conversation], template: Template, encoder: ChatEncoder, *, train_on: str
) -> Iterator[MaskedTokens]:
    """Encodes conversations and marks what is trained, as `ChatData.train_on` says."""
    marked = ((one.where, *_marked(one, template, train_on=train_on)) for one in conversations)
    for chunk in chunks(marked, lambda one: len(one[1]), most=_CHUNK_CHARACTERS):
        encoded = encoder.encode([text for _, text, _ in chunk])
        for (where, _, spans), found in zip(chunk, encoded, strict=True):
            trained = np.zeros(len(found.ids), bool)
            for start, stop in spans:
                # A token that begins before the answer belongs to the prompt.
                first, last = np.searchsorted(found.starts, (start, stop))
                ends = first + np.flatnonzero(np.isin(found.ids[first:last], template.format.stop))
                if not len(ends):
                    raise ConfigError(
                        f"the chat template {template.format.label} writes no stop token (id "
                        f"{' or '.join(map(str, template.format.stop))}) at the end of an answer ({where}), so a "
                        "model would never learn to stop; set data.stop to the token that it writes there"
                    )
                # What a template writes after the stop token (a line end) nobody generates.
                trained[first : last if template.marks_answers or train_on == "all" else ends[-1] + 1] = True
            yield MaskedTokens(where, found.ids, trained)


def _marked(conversation: Conversation, template: Template, *, train_on: str) -> tuple[str, Sequence[tuple[int, int]]]:
    """Returns a conversation as text, and (start, end) in characters of what is trained."""
    where, messages, tools = conversation.where, conversation.messages, conversation.tools
    label = template.format.label
    whole = render(template, messages, prompt=False, where=where, tools=tools)
    if train_on == "all":
        if not all(map(is_trained, messages)):
            raise ConfigError(
                f"{where} has messages that are not trained (weight 0), which data.train_on=all would train"
            )
        return whole.text, [(0, len(whole.text))]
    said = [i for i, one in enumerate(messages) if one["role"] == ANSWERS]
    answers = [i for i in said if i >= conversation.first and is_trained(messages[i])]
    answers = answers[-1:] if train_on == "last" else answers
    if template.marks_answers:
        if len(whole.answers) != len(said):
            raise ConfigError(
                f"the chat template {label} marks {len(whole.answers)} answers by {{% generation %}}, but {where} has "
                f"{len(said)}; let it mark each message of role {ANSWERS} once"
            )
        return whole.text, [whole.answers[said.index(i)] for i in answers]
    spans = []
    for i in answers:
        before = render(template, messages[:i], prompt=True, where=where, tools=tools).text
        is_last = i + 1 == len(messages)
        after = whole if is_last else render(template, messages[: i + 1], prompt=False, where=where, tools=tools)
        for shorter, longer, how in (
            (before, after.text, "than its add_generation_prompt"),
            (after.text, whole.text, "if more messages follow"),
        ):
            if not longer.startswith(shorter):
                raise ConfigError(
                    f"the chat template {label} writes message {i + 1} of {where} differently {how}, so the answer "
                    "cannot be located; mark answers by {% generation %} (data.template), or try data.train_on=last"
                )
        spans.append((len(before), len(after.text)))
    return whole.text, spans


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
    config: ChatData, *, sequence_length: int, task: object = None, reading: Mapping[str, Any] | None = None
) -> Data:
    """Opens conversations or, for a task on preferences, pairs of answers.

    Returns:
        Rows of conversations: `inputs` int32 [L] or, where several are packed into a row, `tokens`, `segments` and
        `positions` int32 [L] each; `targets` int32 [L]; `weights` float32 [L], 1 for the targets that are trained.
        Rows of pairs: `inputs`, `targets` and `weights` [2, L], the chosen answer first.
    """
    pairs = gives_pairs(config, task)
    if pairs and config.train_on == "all":
        raise ConfigError("data.train_on=all does not go with pairs of answers; set data.train_on=answers or last")
    label = config.path if isinstance(config.path, str) else ", ".join(config.path)
    label = f"built-in {label}" if label == PYTHON_DOCS else label
    conversations, sides = _read(config, label, pairs=pairs)
    texts = (str(one.get("content") or "") for chat in conversations for one in chat.messages)
    tokenizer = build_tokenizer(config.tokenizer, texts, special=added_tokens(config))
    assert isinstance(tokenizer, ByteTokenizer | BpeTokenizer)
    form = format_of_reading(reading) or chat_format(config, tokenizer)
    template = compile_template(form, today=datetime.date.fromisoformat(config.date))
    masked = masked_tokens(conversations, template, ChatEncoder(tokenizer), train_on=config.train_on)
    most = sequence_length if pairs and task == "reward" else sequence_length + 1
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
        train, validation = (PackedRows(store, layout) for layout in layouts)
    else:
        layouts = [side[:, None].tolist() for side in sides]
        train, validation = (PaddedRows(store, side, together=2 if pairs else 1) for side in sides)
    counts = _counts(store, fitted, pairs=pairs) | {
        "training_rows": len(train),
        "validation_rows": len(validation),
        "held_out": len(sides[1]),
    }
    shape = (2, sequence_length) if pairs else (sequence_length,)
    return Data(
        train=train,
        validation=validation if len(validation) else None,
        fingerprint={
            "kind": config.kind,
            "pairs": pairs,
            "content_sha256": _digest(store, [row for layout in layouts for row in layout]),
            "template_sha256": hashlib.sha256(form.source.encode()).hexdigest(),
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "sequence_length": store.length,
            "padding": store.padding,
            "num_rows": len(train),
            "num_validation_rows": len(validation),
        },
        vocab_size=tokenizer.vocab_size,
        input_shape=shape,
        unit="tokens",
        units_per_row=math.prod(shape),
        tokenizer=tokenizer,
        description=(*_description(label, counts, form.label), described(tokenizer)),
        reading=form.to_reading(),
        counts=counts,
    )


def _read(config: ChatData, label: str, *, pairs: bool) -> tuple[list[Conversation], Sequence[np.ndarray]]:
    """Returns conversations, of a pair both after one another, and which (or which pairs) are for training, evaluation.

    Those of equal prompts are on one side; the built-in answers are all different, and so are their questions.
    """
    make, builtin = (_pair, _documented_pairs) if pairs else (_conversation, documented)
    found: list[Any] = builtin() if config.path == PYTHON_DOCS else _made(config.path, "data.path", make)
    if config.validation_path is not None:
        more = _made(config.validation_path, "data.validation_path", make)
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
    """Cuts or drops conversations of more than `most` tokens; `together` neighbours (2 for pairs) are left as one."""
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


def _counts(store: Store, fitted: _Fitted, *, pairs: bool) -> dict[str, int]:
    conversations = len(store.starts) - 1
    first = np.zeros(len(store.ids), bool)
    first[store.starts[:-1]] = True  # the first token of a conversation is nobody's target
    return {
        "pairs" if pairs else "conversations": conversations // 2 if pairs else conversations,
        "tokens": len(store.ids),
        "trained_tokens": int((store.trained & ~first).sum()),
        "cut": fitted.cut,
        "dropped": fitted.dropped,
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
