"""Conversations: the one form that templates and masks see, whatever form a row or a request is written in.

A row has messages (OpenAI's role and content, ShareGPT's from and value), or columns of a question and its answer.
Lists and objects may be JSON text, which is all that a CSV file can hold.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.errors import DataError

ANSWERS = "assistant"
# Keys of a message that tell whether it counts in the loss: 1 or true if it does, 0 or false if not.
_WEIGHTS = ("weight", "train", "training", "loss")
# Names of columns, in the order in which they are looked for.
_LISTS = ("messages", "conversations", "conversation")
_QUESTIONS = ("instruction", "question", "query", "problem", "prompt", "input")
_COMPLETIONS = ("output", "response", "solution", "answer", "completion")
_SYSTEM = ("system", "system_prompt")
# Column of a question -> columns of the text that the question is about: Alpaca's input, Dolly's context.
_CONTEXTS = {"instruction": ("input", "context"), "question": ("context",)}
# Keys of ShareGPT's messages -> keys that templates read.
_KEYS = {"from": "role", "value": "content"}
_CALL = "function_call"
# Roles of files -> roles that templates read.
_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": ANSWERS,
    "gpt": ANSWERS,
    "chatgpt": ANSWERS,
    "bing": ANSWERS,
    "bard": ANSWERS,
    "bot": ANSWERS,
    "chatbot": ANSWERS,
    "model": ANSWERS,
    "ai": ANSWERS,
    _CALL: ANSWERS,
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
# Columns of KTO that tell whether an answer is desirable; the second is LLaMA-Factory's.
_LABELS = ("label", "kto_tag")
# What is false, as JSON, CSV files and pandas write it.
_FALSE = ("false", "0", "0.0")
# A text that is a message or a list of them: JSON, or Python's own form, which pandas writes into CSV files.
_MESSAGES_TEXT = re.compile(
    r"""\s*(\[\s*)?\{(?=.*['"](role|from)['"]\s*:).*['"](content|value|tool_calls)['"]\s*:""", re.DOTALL
)
# What a template reads: {"role": ..., "content": ...} and whatever else the file gives.
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages in their order, from `where` (file and line).

    Answers before `messages[first]` are never trained. Conversations of one `group` are all trained on, or all held
    out. `tools` are JSON schemas of what the model may call; `arguments` are further variables of the template, such
    as enable_thinking.
    """

    where: str
    messages: tuple[Message, ...]
    first: int = 0
    group: str = ""
    tools: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def is_trained(message: Message) -> bool:
    """Returns whether a message counts in the loss: OpenAI's `weight: 0` and Axolotl's `train: false` leave it out."""
    return {str(message.get(name)).lower() for name in _WEIGHTS}.isdisjoint(_FALSE)


def read_messages(
    value: Any, *, where: str, keys: Mapping[str, str] = _KEYS, roles: Mapping[str, str] = _ROLES
) -> tuple[Message, ...]:
    """Returns messages with the roles, the text and the calls of tools that templates read.

    Args:
        value: A list of messages, or its JSON text.
        where: Names the row in errors.
        keys: Key of the file's messages -> role or content.
        roles: Role of the file -> role of templates.

    Raises:
        DataError: There is no message, or one has no role, no text, or a part that is not text.
    """
    messages = []
    for fields in read_objects(value, "messages", where):
        # Columnar files give every message the keys of all others.
        message = {keys.get(key, key): entry for key, entry in fields.items() if entry not in (None, [])}
        role = str(message.get("role")).lower()
        if role in roles:
            message["role"] = roles[role]
        elif not fields.get("role"):  # a file in the form of templates may have roles that only its template knows
            raise DataError(f"{where} has {fields!r:.60} for a message; write role and content, or set data.roles")
        calls = read_objects(message.pop("tool_calls", None), "tool_calls", where)
        # LLaMA-Factory has a role for calls, and OpenAI had a key for one.
        functions = read_objects(message.pop("content" if role == _CALL else _CALL, None), _CALL, where)
        calls += [{"type": "function", "function": function} for function in functions]
        if calls:
            message["tool_calls"] = [_call(call, where) for call in calls]
        content = message.get("content")
        # Templates ask whether the content beside calls is none.
        if content is not None or not calls:
            content = _text(content, where)
        message["content"] = content
        messages.append(message)
    if not messages:
        raise DataError(f"{where} has no messages; write [{{role: user, content: text}}, ...]")
    return tuple(messages)


class RowReader:
    """Reads the rows of files of chats.

    Args:
        columns: Usual name of a column, or of a key of messages -> its name in the files.
        roles: Role of the files -> role of templates, in addition to the usual ones.

    Attributes:
        is_read: Column of the rows so far, by its usual name if it has one -> whether it was read.
    """

    def __init__(self, columns: Mapping[Any, str], roles: Mapping[str, str]):
        self._names = {column: name for name, column in columns.items()}
        self._roles = {**_ROLES, **{name.lower(): role for name, role in roles.items()}}
        self.is_read: dict[str, bool] = {}

    def read(self, where: str, row: Mapping[str, Any], *, pairs: bool) -> list[Conversation]:
        """Returns the conversation of a row, or the two of a row with a chosen and a rejected answer."""
        row = {self._names.get(column, column): value for column, value in row.items() if value is not None}
        self.is_read = dict.fromkeys(row, False) | self.is_read
        if pairs:
            return self._pair(where, row)
        return [self._conversation(where, row)]

    def _conversation(self, where: str, row: Mapping[str, Any]) -> Conversation:
        for name in _LABELS:
            if str(row.get(name)).strip().lower() in _FALSE:
                raise DataError(
                    f"{where} is an undesirable answer ({name}: false, as in KTO); remove the row, or name the column "
                    "otherwise if it is another label"
                )
        messages = self._prompt(where, row, *_LISTS)
        if messages:
            return self._build(where, row, messages, 0)
        questions = _QUESTIONS
        completions = _COMPLETIONS
        # Data sets keep the columns of which they made prompt and completion.
        if "prompt" in row and "completion" in row:
            questions = ("prompt",)
            completions = ("completion",)
        completion = self._first(row, *completions)
        prompt = () if completion is None else self._prompt(where, row, *questions)
        if prompt:
            answer = self._messages(where, completion, ANSWERS)
            return self._build(where, row, (*prompt, *answer), len(prompt))
        remedy = (
            "write messages, conversations, prompt and completion, instruction and output, or question and answer, or "
            "name the columns in data.columns"
        )
        if "chosen" in row:
            remedy = "for chosen and rejected, set task=dpo or task=reward"
        raise DataError(f"{where} is not a conversation (it has {', '.join(map(str, row))}); {remedy}")

    def _pair(self, where: str, row: Mapping[str, Any]) -> list[Conversation]:
        if "chosen" not in row or "rejected" not in row:
            keys = ", ".join(map(str, row))
            raise DataError(f"{where} is not a pair of answers (it has {keys}); write prompt, chosen and rejected")
        chosen = self._messages(where, self._first(row, "chosen"), ANSWERS)
        rejected = self._messages(where, self._first(row, "rejected"), ANSWERS)
        if chosen[0]["role"] == rejected[0]["role"] == ANSWERS:
            prompt = self._prompt(where, row, "prompt", *_LISTS, *_QUESTIONS)
            chosen = (*prompt, *chosen)
            rejected = (*prompt, *rejected)
        turns = enumerate(zip(chosen, rejected, strict=False))
        first = next((i for i, (message, other) in turns if message != other), 0)
        if first == 0:
            raise DataError(
                f"{where} has answers that are equal, or no common prompt; write prompt, chosen and rejected"
            )
        return [self._build(where, row, messages, first) for messages in (chosen, rejected)]

    def _first(self, row: Mapping[str, Any], *names: str) -> Any:
        """Returns the value of the first of these columns that a row has, or None if it has none of them."""
        for name in names:
            if name in row:
                self.is_read[name] = True
                return row[name]
        return None

    def _messages(self, where: str, value: Any, role: str) -> tuple[Message, ...]:
        """Returns the messages of a message, of a list or of their text; any other text is one message of this role."""
        if isinstance(value, str) and not _MESSAGES_TEXT.match(value):
            return ({"role": role, "content": value},)
        return read_messages(value, where=where, keys={**_KEYS, **self._names}, roles=self._roles)

    def _prompt(self, where: str, row: Mapping[str, Any], *names: str) -> tuple[Message, ...]:
        """Returns the messages of the first of these columns that a row has, or () if it has none of them."""
        for name in names:
            question = self._first(row, name)
            if question is None:
                continue
            if name in _LISTS:
                question = _parsed(question)
            context = self._first(row, *_CONTEXTS.get(name, ()))
            if context:
                question = f"{_text(question, where)}\n\n{_text(context, where)}"
            return self._messages(where, question, "user")
        return ()

    def _build(self, where: str, row: Mapping[str, Any], messages: tuple[Message, ...], first: int) -> Conversation:
        """Returns the messages up to the last answer as a conversation, with the other columns that are about it.

        The answers from `messages[first]` on may be trained.
        """
        system = self._first(row, *_SYSTEM)
        if system:
            message = {"role": "system", "content": _text(system, where)}
            if messages[0] != message:
                if messages[0]["role"] == "system":
                    raise DataError(f"{where} has a system message beside another one in a column; remove one")
                messages = (message, *messages)
                first += 1
        answers = [i for i in range(first, len(messages)) if messages[i]["role"] == ANSWERS]
        trained = [i for i in answers if is_trained(messages[i])]
        empty = [i for i in answers if not (messages[i].get("tool_calls") or messages[i]["content"].strip())]
        if empty or not trained or answers[0] == 0:
            raise DataError(
                f"{where} has no answer to train, or an empty one; write one with role: {ANSWERS}, or set data.roles"
            )
        group = "\n".join(f"{message['role']}: {message['content']}" for message in messages[: answers[0]])
        tools = read_objects(self._first(row, "tools", "functions"), "tools", where) or None
        arguments = read_object(self._first(row, "chat_template_kwargs"), "chat_template_kwargs", where)
        return Conversation(where, messages[: answers[-1] + 1], answers[0], group, tools, arguments)


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the call of a tool with its arguments as an object.

    OpenAI writes arguments as JSON text, and puts them with the name into an object of their own, `function`.
    """
    call = {key: value for key, value in call.items() if value is not None}
    if "function" in call:
        return {**call, "function": _call(read_object(call["function"], "a function", where), where)}
    return {**call, "arguments": read_object(call.get("arguments"), "arguments of a call", where)}


def _text(content: Any, where: str) -> str:
    """Returns the text of a message, whose content may be a list of parts."""
    parts = content if isinstance(content, list) else [content]
    text = ""
    for part in parts:
        if isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS:
            part = part.get("text")
        if not isinstance(part, str):
            raise DataError(f"{where} has content that is not text: {part!r:.60}; remove it, or the row")
        text += part
    return text


def read_object(value: Any, name: str, where: str) -> dict[str, Any]:
    """Returns an object that is given as such or as JSON text, or an empty one for nothing."""
    parsed = _parsed(value) or {}
    if not isinstance(parsed, dict):
        raise DataError(f"{where} has {value!r:.60} for {name}; write an object, or its JSON text")
    return parsed


def read_objects(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Returns objects that are given as a list, as a single object, or as JSON text; an empty list for nothing."""
    items = _parsed(value) or []
    if not isinstance(items, list):
        items = [items]
    return [read_object(item, name, where) for item in items]


def _parsed(value: Any) -> Any:
    """Returns the value that a text writes in JSON or as a Python literal; any other text or value unchanged."""
    if not isinstance(value, str):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            pass
    return value
