"""Conversations and pairs of answers, read from files of the usual forms."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtrain.config.data import PYTHON_DOCS, ChatData
from jaxtrain.data.chat.python_docs import documented
from jaxtrain.data.formats.open import find_rows, pass_over_file
from jaxtrain.data.skipped import BadRecordError, SkippedRecords
from jaxtrain.errors import DataError

# What a template reads: {"role": ..., "content": ...} and whatever else the file gives.
Message = Mapping[str, Any]

ANSWERS = "assistant"
# Keys by which a message says whether it counts in the loss: 0 or false, 1 or true.
_WEIGHTS = ("weight", "train", "training", "loss")
# Formats in which a struct has every key in every row, null where the row said nothing.
_COLUMNAR = ("parquet", "arrow")
_FORMS = "messages, prompt and completion, or prompt, chosen and rejected"


@dataclass(frozen=True)
class Conversation:
    """Messages in their order.

    Attributes:
        where: File and line, for messages.
        messages: What was said.
        first: Index of the first message that may be an answer to train on; those before it are the prompt.
        tools: What the model may call, as templates take it: a list of JSON schemas; None: nothing.
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
    """Two conversations that begin alike.

    Attributes:
        where: File and line, for messages.
        chosen: That with the preferred answer.
        rejected: That with the other one.
        group: Pairs of one group stay on one side of the split; None: those of equal prompts are a group.
    """

    where: str
    chosen: Conversation
    rejected: Conversation
    group: str | None = None


def read_conversations(
    path: str | Sequence[str], *, key: str = "data.path", skipped: SkippedRecords | None = None
) -> list[Conversation]:
    """Reads conversations.

    Args:
        path: As `ChatData.path`.
        key: Where the path was given, for messages.
        skipped: Counts the bad rows, which are left out; None: the first is an error.

    Raises:
        DataError: A file is missing or malformed, or a row is no conversation, or has an empty answer or none.
    """
    if path == PYTHON_DOCS:
        return [_asked(one.where, one.question, one.answer) for one in documented()]
    return _good(path, key, _conversation, skipped)


def read_pairs(
    path: str | Sequence[str], *, key: str = "data.path", skipped: SkippedRecords | None = None
) -> list[Pair]:
    """Reads pairs of answers.

    Args:
        path: As `ChatData.path`.
        key: Where the path was given, for messages.
        skipped: As for `read_conversations`.

    Raises:
        DataError: As for `read_conversations`, or both answers are equal.
    """
    if path == PYTHON_DOCS:
        return list(_documented_pairs())
    return _good(path, key, _pair, skipped)


def is_trained(message: Message) -> bool:
    """Returns whether a message counts in the loss: OpenAI's `weight: 0` and Axolotl's `train: false` leave it out."""
    return all(message.get(name) in (None, 1) for name in _WEIGHTS)


def label_of(config: ChatData) -> str:
    """Returns what people call the data."""
    if config.path == PYTHON_DOCS:
        return f"built-in {PYTHON_DOCS}"
    return config.path if isinstance(config.path, str) else ", ".join(config.path)


def _asked(where: str, question: str, answer: str) -> Conversation:
    return Conversation(where, ({"role": "user", "content": question}, {"role": ANSWERS, "content": answer}), first=1)


def _documented_pairs() -> Iterator[Pair]:
    """Questions with their own answer and that of another function; the two functions form a group."""
    found = documented()
    for one, other in zip(found[::2], found[1::2], strict=False):
        for mine, wrong in ((one, other), (other, one)):
            chosen = _asked(mine.where, mine.question, mine.answer)
            yield Pair(mine.where, chosen, _asked(mine.where, mine.question, wrong.answer), group=one.where)


def _good(
    path: str | Sequence[str],
    key: str,
    make: Callable[[str, Mapping[str, Any]], Any],
    skipped: SkippedRecords | None,
) -> list[Any]:
    """Returns what is made of (file and line, object) of each row of all files that paths name."""
    found: list[Any] = []
    bad: list[BadRecordError] = []
    for one in [path] if isinstance(path, str) else path:
        for file in find_rows(one, what=key, one_format=False):
            for where, row in pass_over_file(file, None, bad=None if skipped is None else bad.append):
                try:
                    found.append(make(where, _without_nulls(row) if file.format in _COLUMNAR else row))
                except BadRecordError as error:
                    if skipped is None:
                        raise
                    bad.append(error)
    if not found and not bad:
        raise DataError(f"{key} {path} has no rows; give a file with at least one")
    for error in bad:
        assert skipped is not None
        skipped.add(error, of=len(found) + len(bad))
    return found


def _without_nulls(value: Any) -> Any:
    """Returns a value of a columnar file without the keys that only other rows have; the content of a message stays."""
    if isinstance(value, Mapping):
        said = {key: one for key, one in value.items() if one is not None or (key == "content" and "role" in value)}
        return {key: _without_nulls(one) for key, one in said.items()}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _conversation(where: str, row: Mapping[str, Any]) -> Conversation:
    if "messages" in row:
        conversation = Conversation(where, _messages(where, row["messages"], "messages"))
    elif "prompt" in row and "completion" in row:
        if row.get("label") in (False, "false", "False"):
            raise BadRecordError(
                f"{where} has label: false, a bad answer to unlearn; remove the row, or write pairs (dpo)"
            )
        before = _messages(where, row["prompt"], "prompt", role="user")
        after = _messages(where, row["completion"], "completion", role=ANSWERS)
        conversation = Conversation(where, (*before, *after), first=len(before))
    elif "chosen" in row and "rejected" in row:
        raise DataError(f"{where} is a pair of answers; set task=dpo or task=reward, or write messages")
    else:
        raise _no_form(where, row)
    return _checked(replace(conversation, tools=_tools(where, row)))


def _pair(where: str, row: Mapping[str, Any]) -> Pair:
    if "chosen" not in row or "rejected" not in row:
        if "messages" in row or "completion" in row:
            raise DataError(f"{where} is one conversation, not a pair; write prompt, chosen and rejected")
        raise _no_form(where, row)
    chosen, rejected = (_messages(where, row[name], name, role=ANSWERS) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise BadRecordError(f"{where} has equal answers, chosen and rejected; a pair needs two that differ")
    if chosen[0]["role"] == rejected[0]["role"] == ANSWERS:
        if row.get("prompt") is None:
            raise BadRecordError(f"{where} has no prompt before its answers; write prompt, chosen and rejected")
        prompt = _messages(where, row["prompt"], "prompt", role="user")
        chosen, rejected = (*prompt, *chosen), (*prompt, *rejected)
    shortest = min(len(chosen), len(rejected))
    first = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    if first == 0:
        raise BadRecordError(
            f"{where} has no common beginning of chosen and rejected; write the prompt in both, or apart"
        )
    if first == shortest:
        raise BadRecordError(f"{where}: one of chosen and rejected is the beginning of the other; give two answers")
    tools = _tools(where, row)
    both = [_checked(Conversation(where, messages, first, tools)) for messages in (chosen, rejected)]
    return Pair(where, both[0], both[1])


def _no_form(where: str, row: Mapping[str, Any]) -> BadRecordError:
    there = f"it has {', '.join(map(str, row)) or 'no keys'}"
    return BadRecordError(f"{where} is no conversation ({there}); write {_FORMS}")


def _messages(where: str, value: Any, key: str, *, role: str | None = None) -> tuple[Message, ...]:
    """Returns the messages of a value: a list of them or, where `role` is given, also a text."""
    if isinstance(value, str) and role is not None:
        return ({"role": role, "content": value},)
    if not isinstance(value, list) or not value:
        takes = "a list of messages" if role is None else "a text or a list of messages"
        found = "an empty list" if value == [] else f"a value of type {type(value).__name__}"
        raise BadRecordError(f"{where} {key} holds {found}; write {takes}: [{{role, content}}, ...]")
    return tuple(_message(f"{where} {key}[{i}]", one) for i, one in enumerate(value))


def _tools(where: str, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    tools = row.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(one, dict) for one in tools)):
        raise BadRecordError(
            f"{where} tools holds a value of type {type(tools).__name__}; write a list of JSON schemas"
        )
    return tools


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        meant = " (from and value are role and content)" if isinstance(value, dict) and "from" in value else ""
        raise BadRecordError(f"{where} has no role{meant}; write {{role: user, content: ...}}")
    # A Parquet column has every key in every row. Templates ask whether the content beside calls of tools is none.
    found = {name: one for name, one in value.items() if one is not None or name == "content"}
    content = found.get("content")
    if content is None and "tool_calls" not in found:
        raise BadRecordError(f"{where} has no content; write {{role: {found['role']}, content: ...}}")
    if not isinstance(content, str | None):
        raise BadRecordError(f"{where} has a content of type {type(content).__name__}; chats are text alone")
    for name in _WEIGHTS:
        if found.get(name) not in (None, 0, 1):
            raise BadRecordError(f"{where} has {name}: {found[name]!r}; write 0 for a message without loss, or 1")
    if not _is_text(content or ""):
        raise BadRecordError(f"{where} has half a character (a lone surrogate such as \\ud800); fix or remove the row")
    return found


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked(conversation: Conversation) -> Conversation:
    """Returns a conversation up to its last answer.

    Raises:
        BadRecordError: There is no answer, an empty one, none with a weight, or nothing before the first.
    """
    where, messages = conversation.where, conversation.messages
    answers = [i for i in range(conversation.first, len(messages)) if messages[i]["role"] == ANSWERS]
    if not answers:
        roles = ", ".join(dict.fromkeys(one["role"] for one in messages))
        raise BadRecordError(f"{where} has no answer (roles: {roles}); write one with role: {ANSWERS}")
    for i in answers:
        if not (messages[i].get("content") or "").strip() and not messages[i].get("tool_calls"):
            raise BadRecordError(f"{where} has an empty answer (message {i + 1}); fill it in, or remove the row")
    if not any(is_trained(messages[i]) for i in answers):
        raise BadRecordError(f"{where} has no answer with a weight; give one weight: 1, or remove the row")
    if answers[0] == 0:
        raise BadRecordError(f"{where} begins with an answer; write what it answers before it")
    return replace(conversation, messages=messages[: answers[-1] + 1])
