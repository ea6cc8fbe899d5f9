"""Rows of chats: conversations and pairs of answers, read from files of the usual forms, masked, packed or padded.

Shapes: B rows of a batch, N conversations, L tokens per row.
"""

import bisect
import datetime
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxtrain.config.data import PYTHON_DOCS, ChatData, added_tokens, gives_pairs
from jaxtrain.data.chat.conversation import ANSWERS, Conversation, RowReader, is_trained
from jaxtrain.data.chat.templates import (
    ChatEncoder,
    Rendered,
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
from jaxtrain.data.rows import Row, Rows
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

# Formats in which an object has the keys of all rows, null where its own row has no value.
_COLUMNAR = ("parquet", "arrow")
# Constant, so that every run has the same rows in the same order.
_ORDER_SEED = 20240602
# Characters that are encoded at a time: enough to occupy every core, few enough to hold their tokens in memory.
_CHUNK_CHARACTERS = 2**20


def _read_files(reader: RowReader, path: str | Sequence[str], key: str, *, pairs: bool) -> list[list[Conversation]]:
    """Returns the conversation of each row, or its pair of them; a file that is named twice is read once."""
    files = {}
    for name in [path] if isinstance(path, str) else path:
        for file in find_rows(name, what=key, one_format=False):
            files.setdefault(file.path.resolve(), file)
    examples = []
    for file in files.values():
        for where, row in pass_over_files([file], None):
            if file.format in _COLUMNAR:
                row = _without_nulls(row)
            examples.append(reader.read(where, row, pairs=pairs))
    return examples


def _without_nulls(value: Any) -> Any:
    """Returns a value of a columnar file without the keys whose values are null."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def documented() -> list[list[Conversation]]:
    """Returns a question about each function of the standard library, and the first paragraph of its docstring."""
    return [[_dialogue(name, question, answer, question)] for name, question, answer in questions()]


def _documented_pairs() -> list[list[Conversation]]:
    """Returns each question with its own answer and that of another function; the two functions form a group."""
    items = questions()
    pairs = []
    for first, second in zip(items[::2], items[1::2], strict=False):
        group = first[0]
        for (name, question, answer), (_, _, wrong) in ((first, second), (second, first)):
            pairs.append([_dialogue(name, question, text, group) for text in (answer, wrong)])
    return pairs


def _dialogue(where: str, question: str, answer: str, group: str) -> Conversation:
    messages = ({"role": "user", "content": question}, {"role": ANSWERS, "content": answer})
    return Conversation(where, messages, 1, group)


@dataclass(frozen=True)
class MaskedTokens:
    """A conversation as tokens: `ids` int32 [num_tokens], and which of them are `trained`, bool [num_tokens]."""

    where: str
    ids: np.ndarray
    trained: np.ndarray


def masked_tokens(
    conversations: Sequence[Conversation], template: Template, encoder: ChatEncoder, *, train_on: str
) -> Iterator[MaskedTokens]:
    """Encodes conversations and marks the tokens that `ChatData.train_on` selects."""
    marked = (_marked(conversation, template, train_on=train_on) for conversation in conversations)
    for chunk in chunks(marked, lambda rendered: len(rendered.text), most=_CHUNK_CHARACTERS):
        encoded = encoder.encode([rendered.text for rendered in chunk])
        for rendered, tokens in zip(chunk, encoded, strict=True):
            trained = np.zeros(len(tokens.ids), bool)
            for start, stop in rendered.answers:
                # A token that begins before the answer belongs to the prompt.
                first, last = np.searchsorted(tokens.starts, (start, stop))
                ends = np.flatnonzero(np.isin(tokens.ids[first:last], template.format.stop))
                if not ends.any():
                    raise ConfigError(
                        f"the chat template {template.format.label} writes no stop token (id "
                        f"{' or '.join(map(str, template.format.stop))}) at the end of an answer "
                        f"({rendered.where}), or nothing before it, so a model would never learn to stop, or to call "
                        "tools; set data.stop to the token that it writes there, or data.template to one that writes "
                        "calls"
                    )
                # A model stops at the stop token: what a template writes after it (a line end) is not trained.
                if train_on != "all" and not template.marks_answers:
                    last = first + ends[-1] + 1
                trained[first:last] = True
            yield MaskedTokens(rendered.where, tokens.ids, trained)


def _marked(conversation: Conversation, template: Template, *, train_on: str) -> Rendered:
    """Returns a conversation as text; `answers` are only those that are trained, or the whole text for all."""
    where = conversation.where
    messages = conversation.messages
    label = template.format.label
    rendered = render(template, conversation, prompt=False)
    text = rendered.text
    if train_on == "all":
        if not all(map(is_trained, messages)):
            raise ConfigError(
                f"{where} has messages that are not trained (weight 0), which data.train_on=all would train"
            )
        return replace(rendered, answers=((0, len(text)),))
    answers = [i for i, message in enumerate(messages) if message["role"] == ANSWERS]
    trained = [i for i in answers if i >= conversation.first and is_trained(messages[i])]
    if train_on == "last":
        trained = trained[-1:]
    if template.marks_answers:
        if len(rendered.answers) != len(answers):
            raise ConfigError(
                f"the chat template {label} marks {len(rendered.answers)} answers by {{% generation %}}, but {where} "
                f"has {len(answers)}; let it mark each message of role {ANSWERS} once"
            )
        return replace(rendered, answers=tuple(rendered.answers[answers.index(i)] for i in trained))
    spans = []
    for i in trained:
        before = render(template, replace(conversation, messages=messages[:i]), prompt=True).text
        after = text
        if i + 1 < len(messages):
            after = render(template, replace(conversation, messages=messages[: i + 1]), prompt=False).text
        if not after.startswith(before) or not text.startswith(after):
            raise ConfigError(
                f"the chat template {label} writes message {i + 1} of {where} differently if more messages follow, or "
                "than its add_generation_prompt, so the answer cannot be located; mark answers by {% generation %} "
                "(data.template), or try data.train_on=last"
            )
        spans.append((len(before), len(after)))
    return replace(rendered, answers=tuple(spans))


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
    if label == PYTHON_DOCS:
        label = f"built-in {label}"
    examples, sides, columns = _read_examples(config, label, pairs=pairs)
    conversations = [conversation for example in examples for conversation in example]
    texts = (message["content"] or "" for chat in conversations for message in chat.messages)
    tokenizer = build_tokenizer(config.tokenizer, texts, special=added_tokens(config))
    assert isinstance(tokenizer, ByteTokenizer | BpeTokenizer)
    form = format_of_reading(reading) or chat_format(config, tokenizer)
    template = compile_template(form, today=datetime.date.fromisoformat(config.date))
    masked = list(masked_tokens(conversations, template, ChatEncoder(tokenizer), train_on=config.train_on))
    max_tokens = sequence_length
    # The last token is a target alone, except to a reward model, which scores it.
    if not (pairs and task == "reward"):
        max_tokens += 1
    kept, fitted, num_cut = _fit(masked, max_tokens=max_tokens, too_long=config.too_long, group_size=2 if pairs else 1)
    tokens = [conversation for example in fitted for conversation in example]
    packing = config.packing and not pairs
    padding = special_ids(tokenizer, config.tokenizer).padding or 0
    sizes = np.array([len(conversation.ids) - 1 for conversation in tokens])
    layout = []
    parts = []
    for side in sides:
        # Numbers of its examples among those that fit.
        numbers = np.flatnonzero(np.isin(kept, side))
        rows = [[number] for number in numbers]
        if packing:
            rows = [numbers[row] for row in packed(sizes[numbers], sequence_length)]
        layout += rows
        parts.append(
            ChatRows(
                [[conversation for number in row for conversation in fitted[number]] for row in rows],
                length=sequence_length,
                padding=padding,
                pairs=pairs,
                packing=packing,
            )
        )
    train, validation = parts
    if not len(train):
        raise DataError(
            f"{label} has no conversation with an answer within {sequence_length:,} tokens to train on; raise "
            "data.sequence_length"
        )
    counts = {
        "pairs" if pairs else "conversations": len(kept),
        "tokens": sum(len(conversation.ids) for conversation in tokens),
        "trained_tokens": sum(int(conversation.trained[1:].sum()) for conversation in tokens),
        "cut": num_cut,
        "dropped": len(examples) - len(kept),
        "training_rows": len(train),
        "validation_rows": len(validation),
    }
    shape = (2, sequence_length) if pairs else (sequence_length,)
    return Data(
        train=train,
        validation=validation if len(validation) else None,
        fingerprint={
            "kind": config.kind,
            "pairs": pairs,
            "content_sha256": _digest(tokens, layout),
            "template_sha256": hashlib.sha256(form.source.encode()).hexdigest(),
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "sequence_length": sequence_length,
            "padding": padding,
            "num_rows": len(train),
            "num_validation_rows": len(validation),
        },
        vocab_size=tokenizer.vocab_size,
        input_shape=shape,
        unit="tokens",
        units_per_row=math.prod(shape),
        tokenizer=tokenizer,
        description=(*_description(label, counts, form.label, columns, sequence_length), described(tokenizer)),
        reading=form.to_reading(),
        counts=counts,
    )


def _read_examples(
    config: ChatData, label: str, *, pairs: bool
) -> tuple[list[list[Conversation]], Sequence[np.ndarray], Mapping[str, bool]]:
    """Reads the examples, which are lists of one conversation or of the two of a pair.

    Returns:
        The examples, the numbers of those to train on and of those held out, and `RowReader.is_read`. Examples of one
        group, such as those of equal prompts, are all trained on, or all held out.
    """
    reader = RowReader(config.columns or {}, config.roles or {})
    if config.path == PYTHON_DOCS:
        examples = _documented_pairs() if pairs else documented()
    else:
        examples = _read_files(reader, config.path, "data.path", pairs=pairs)
    if config.validation_path is not None:
        num_training = len(examples)
        examples += _read_files(reader, config.validation_path, "data.validation_path", pairs=pairs)
        sides = np.split(np.arange(len(examples)), [num_training])
    else:
        groups = [example[0].group for example in examples]
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        _, held_out = split_examples(
            len(numbers), validation_fraction=config.validation_fraction, label=f"{label} (equal prompts as one)"
        )
        is_held_out = np.isin([numbers[group] for group in groups], held_out)
        sides = [np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)]
    return examples, sides, reader.is_read


def _fit(
    conversations: Sequence[MaskedTokens], *, max_tokens: int, too_long: str, group_size: int
) -> tuple[list[int], list[list[MaskedTokens]], int]:
    """Cuts or drops examples of more than `max_tokens`; `group_size` conversations in a row are one example.

    Returns:
        The numbers of the examples that fit, their conversations, and how many of them were cut.
    """
    kept: list[int] = []
    examples: list[list[MaskedTokens]] = []
    num_cut = 0
    for first in range(0, len(conversations), group_size):
        example = []
        longest = 0
        for conversation in conversations[first : first + group_size]:
            # What follows the last trained token changes no loss, and needs no place in a row.
            size = len(conversation.ids) - int(np.argmax(conversation.trained[::-1]))
            longest = max(longest, size)
            size = min(size, max_tokens)
            example.append(replace(conversation, ids=conversation.ids[:size], trained=conversation.trained[:size]))
        where = example[0].where
        is_too_long = longest > max_tokens
        if is_too_long and too_long == "error":
            raise DataError(
                f"{where} has {longest:,} tokens, but rows have {max_tokens - 1:,}; raise data.sequence_length, "
                "or set data.too_long=cut or data.too_long=drop"
            )
        has_equal_answers = group_size == 2 and np.array_equal(example[0].ids, example[1].ids)
        if has_equal_answers and not is_too_long:
            raise DataError(f"{where} has answers that the chat template makes equal; remove the pair")
        # Token 0 is never a target. A cut may leave no target, or no difference between two answers.
        has_targets = all(conversation.trained[1:].any() for conversation in example)
        if has_equal_answers or not has_targets or (is_too_long and too_long == "drop"):
            continue
        kept.append(first // group_size)
        examples.append(example)
        num_cut += is_too_long
    return kept, examples, num_cut


def packed(sizes: np.ndarray, length: int) -> list[list[int]]:
    """Distributes conversations of these sizes over rows of `length` tokens; returns the conversations of each row.

    The largest goes first, each into the fullest row that has room; rows are in an order that looks random and is
    always the same.
    """
    rows: list[list[int]] = []
    rows_with_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms: list[int] = []  # the rooms that some row has, ascending
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        smallest = bisect.bisect_left(rooms, size)
        if smallest == len(rooms):
            rooms.append(length)
            rows_with_room[length].append(len(rows))
            rows.append([])
        room = rooms[smallest]
        row = rows_with_room[room].pop()
        rows[row].append(number)
        if not rows_with_room[room]:
            del rooms[smallest]
        room -= size
        if not rows_with_room[room]:
            bisect.insort(rooms, room)
        rows_with_room[room].append(row)
    # Consecutive rows hold conversations of similar sizes; batches that are not shuffled should not.
    return [rows[i] for i in np.random.default_rng(_ORDER_SEED).permutation(len(rows))]


class ChatRows(Rows):
    """Rows of `length` tokens; `padding` of weight 0 follows the last conversation of a row.

    With `packing` a row holds several conversations: its inputs are `tokens`, `segments` (1, 2, ..., and 0 after the
    last) and `positions` in each. Otherwise it holds one conversation, or with `pairs` both of a pair [2, L].
    """

    def __init__(
        self, rows: Sequence[Sequence[MaskedTokens]], *, length: int, padding: int, pairs: bool, packing: bool
    ):
        super().__init__(len(rows))
        self._rows = rows
        self._length = length
        self._padding = padding
        self._pairs = pairs
        self._packing = packing

    def num_tokens(self, numbers: np.ndarray) -> int:
        return sum(
            min(len(conversation.ids) - 1 + self._pairs, self._length)
            for number in numbers
            for conversation in self._rows[number]
        )

    def gather(self, indices: np.ndarray) -> Row:
        rows = [self._rows[index] for index in indices % len(self)]
        if not self._packing:
            rows = [[conversation] for row in rows for conversation in row]
        shape = (len(rows), self._length)
        inputs_BL = np.full(shape, self._padding, np.int32)
        targets_BL = np.full(shape, self._padding, np.int32)
        segments_BL = np.zeros(shape, np.int32)
        positions_BL = np.zeros(shape, np.int32)
        weights_BL = np.zeros(shape, np.float32)
        for b, row in enumerate(rows):
            start = 0
            for segment, conversation in enumerate(row, 1):
                stop = start + len(conversation.ids) - 1
                inputs_BL[b, start:stop] = conversation.ids[:-1]
                targets_BL[b, start:stop] = conversation.ids[1:]
                weights_BL[b, start:stop] = conversation.trained[1:]
                segments_BL[b, start:stop] = segment
                positions_BL[b, start:stop] = np.arange(stop - start)
                if self._pairs:
                    # A reward model scores the token that ends an answer: it is an input too where there is room.
                    inputs_BL[b, stop : stop + 1] = conversation.ids[-1]
                start = stop
        columns = {"inputs": inputs_BL, "targets": targets_BL, "weights": weights_BL}
        if self._pairs:
            return {name: column.reshape(-1, 2, self._length) for name, column in columns.items()}
        if self._packing:
            return columns | {"inputs": {"tokens": inputs_BL, "segments": segments_BL, "positions": positions_BL}}
        return columns


def _digest(conversations: Sequence[MaskedTokens], layout: Sequence[Sequence[int]]) -> str:
    """Returns a hash of all tokens, of what is trained, and of the rows that hold them."""
    starts = np.cumsum([0, *(len(conversation.ids) for conversation in conversations)])
    arrays = [conversation.ids for conversation in conversations]
    arrays += [conversation.trained for conversation in conversations]
    arrays += [starts, *(np.array([len(row), *row], np.int64) for row in layout)]
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def _description(
    label: str, counts: Mapping[str, int], template: str, columns: Mapping[str, bool], length: int
) -> list[str]:
    noun = "pairs" if "pairs" in counts else "conversations"
    share = counts["trained_tokens"] / counts["tokens"]
    lines = [f"{label}: {counts[noun]:,} {noun}, {counts['tokens']:,} tokens, {share:.0%} of them trained"]
    if columns:
        read = [name for name in columns if columns[name]]
        lines.append(f"columns read: {', '.join(read)} (the rows have: {', '.join(columns)})")
    lines.append(f"template: {template}")
    if counts["cut"] or counts["dropped"]:
        total = counts[noun] + counts["dropped"]
        lines.append(
            f"of {total:,} {noun}, {counts['cut']:,} are cut to {length:,} tokens and {counts['dropped']:,} dropped "
            "(too long)"
        )
    lines.append(
        f"{counts['training_rows']:,} training rows and {counts['validation_rows']:,} validation rows of {length:,} "
        "tokens"
    )
    return lines
