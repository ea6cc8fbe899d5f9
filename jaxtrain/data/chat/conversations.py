"""Conversations and pairs of answers, read from files of the usual forms or made of Python's documentation."""

import ast
import functools
import hashlib
import inspect
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtrain.config.data import PYTHON_DOCS
from jaxtrain.data.formats.open import find_rows, pass_over_file
from jaxtrain.errors import DataError

# What a template reads: {"role": ..., "content": ...} and whatever else the file gives.
Message = Mapping[str, Any]

ANSWERS = "assistant"
# Keys by which a message says whether it counts in the loss: 0 or false, 1 or true.
_WEIGHTS = ("weight", "train", "training", "loss")
# Formats in which a struct has every key in every row, null where the row said nothing.
_COLUMNAR = ("parquet", "arrow")

# Modules of the standard library whose functions many people know.
_MODULES = (
    *("argparse", "ast", "asyncio.events", "asyncio.tasks", "base64", "bisect", "calendar", "cmd", "collections"),
    *("colorsys", "configparser", "contextlib", "copy", "csv", "datetime", "dataclasses", "difflib", "email.message"),
    *("email.utils", "filecmp", "fileinput", "fnmatch", "fractions", "ftplib", "functools", "glob", "gzip", "heapq"),
    *("html", "http.client", "imaplib", "inspect", "ipaddress", "json", "locale", "logging", "mimetypes"),
    *("multiprocessing.pool", "ntpath", "operator", "os", "pathlib", "pickletools", "pkgutil", "platform"),
    *("poplib", "posixpath", "pprint", "queue", "random", "re", "reprlib", "shelve", "shlex", "shutil", "smtplib"),
    *("socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit"),
    *("tokenize", "traceback", "types", "typing", "unittest.case", "urllib.parse", "urllib.request", "uuid"),
    *("warnings", "wave", "weakref", "xml.sax.saxutils", "zipfile", "zoneinfo"),
)
_QUESTIONS = (
    "What does {} do in Python?",
    "What is {} for?",
    "In Python's standard library, what does {} do?",
    "Explain {} briefly.",
    "Can you tell me what {} does?",
    "I found {} in some Python code. What does it do?",
)
_FEWEST_WORDS, _MOST_WORDS = 9, 60


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


def read_conversations(path: str | Sequence[str], *, key: str = "data.path") -> list[Conversation]:
    """Reads conversations of `ChatData.path`; `key` names it in messages.

    Raises:
        DataError: A file is missing or malformed, or a row is no conversation, or has an empty answer or none.
    """
    return documented() if path == PYTHON_DOCS else _good(path, key, _conversation)


def read_pairs(path: str | Sequence[str], *, key: str = "data.path") -> list[Pair]:
    """Reads pairs of answers; see `read_conversations`. Equal answers are an error too."""
    return _documented_pairs() if path == PYTHON_DOCS else _good(path, key, _pair)


def is_trained(message: Message) -> bool:
    """Returns whether a message counts in the loss: OpenAI's `weight: 0` and Axolotl's `train: false` leave it out."""
    return all(message.get(name) in (None, 1) for name in _WEIGHTS)


def _good(
    path: str | Sequence[str],
    key: str,
    make: Callable[[str, Mapping[str, Any]], Any],
) -> list[Any]:
    """Returns what is made of (file and line, object) of each row of all files that paths name."""
    found: list[Any] = []
    for one in [path] if isinstance(path, str) else path:
        for file in find_rows(one, what=key, one_format=False):
            for where, row in pass_over_file(file, None):
                found.append(make(where, _without_nulls(row) if file.format in _COLUMNAR else row))
    if not found:
        raise DataError(f"{key} {path} has no rows; give a file with at least one")
    return found


def _without_nulls(value: Any) -> Any:
    """Returns a value of a columnar file without the keys that only other rows have; the content of a message stays."""
    if isinstance(value, Mapping):
        said = {key: one for key, one in value.items() if one is not None or (key == "content" and "role" in value)}
        return {key: _without_nulls(one) for key, one in said.items()}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _conversation(where: str, row: Mapping[str, Any]) -> Conversation:
    if "messages" in row:
        return _checked(Conversation(where, _messages(where, row["messages"]), 0, row.get("tools") or None))
    if "prompt" in row and "completion" in row:
        before, after = _messages(where, row["prompt"], "user"), _messages(where, row["completion"], ANSWERS)
        return _checked(Conversation(where, (*before, *after), len(before), row.get("tools") or None))
    if "chosen" in row and "rejected" in row:
        raise DataError(f"{where} is a pair of answers; set task=dpo or task=reward, or write messages")
    raise DataError(
        f"{where} is no conversation (it has {', '.join(map(str, row))}); write messages, or prompt and completion"
    )


def _pair(where: str, row: Mapping[str, Any]) -> Pair:
    if "chosen" not in row or "rejected" not in row:
        there = ", ".join(map(str, row))
        raise DataError(f"{where} is no pair of answers (it has {there}); write prompt, chosen and rejected")
    chosen, rejected = (_messages(where, row[name], ANSWERS) for name in ("chosen", "rejected"))
    if row.get("prompt") is not None and chosen[0]["role"] == rejected[0]["role"] == ANSWERS:
        prompt = _messages(where, row["prompt"], "user")
        chosen, rejected = (*prompt, *chosen), (*prompt, *rejected)
    shortest = min(len(chosen), len(rejected))
    first = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    if first == shortest:
        raise DataError(f"{where} has equal answers, chosen and rejected; a pair needs two that differ")
    if first == 0:
        raise DataError(f"{where} has no common beginning of chosen and rejected; write the prompt")
    tools = row.get("tools") or None
    both = [_checked(Conversation(where, messages, first, tools)) for messages in (chosen, rejected)]
    return Pair(both[0], both[1], both[0].prompt)


def _messages(where: str, value: Any, role: str | None = None) -> tuple[Message, ...]:
    """Returns the messages of a value: a list of them or, where `role` is given, also a text."""
    if isinstance(value, str) and role is not None:
        return ({"role": role, "content": value},)
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} has {value!r:.40} for messages; write [{{role: user, content: ...}}, ...]")
    return tuple(_message(f"{where} messages[{i}]", one) for i, one in enumerate(value))


def _message(where: str, value: Any) -> Message:
    # A Parquet column has every key in every row. Templates ask whether the content beside calls of tools is none.
    said = value if isinstance(value, dict) else {}
    found = {name: one for name, one in said.items() if one is not None or name == "content"}
    if not isinstance(found.get("role"), str) or not isinstance(found.get("content"), str | None):
        raise DataError(f"{where} has no role, or a content that is no text; write {{role: user, content: ...}}")
    if found.get("content") is None and "tool_calls" not in found:
        raise DataError(f"{where} has no content; write {{role: {found['role']}, content: ...}}")
    return found


def _checked(conversation: Conversation) -> Conversation:
    """Returns a conversation up to its last answer."""
    where, messages = conversation.where, conversation.messages
    answers = [i for i in range(conversation.first, len(messages)) if messages[i]["role"] == ANSWERS]
    if not any(is_trained(messages[i]) for i in answers) or answers[0] == 0:
        roles = ", ".join(dict.fromkeys(one["role"] for one in messages))
        raise DataError(f"{where} has no answer to train (roles: {roles}); write one with role: {ANSWERS}")
    for i in answers:
        if not (messages[i].get("content") or "").strip() and not messages[i].get("tool_calls"):
            raise DataError(f"{where} has an empty answer (message {i + 1}); fill it in, or remove the row")
    return replace(conversation, messages=messages[: answers[-1] + 1])


def _asked(where: str, question: str, answer: str) -> Conversation:
    return Conversation(where, ({"role": "user", "content": question}, {"role": ANSWERS, "content": answer}), first=1)


def documented() -> list[Conversation]:
    """Returns a question about each function of the standard library, and the first paragraph of its docstring.

    No two have the same answer, and the order depends on their names alone.
    """
    return [_asked(name, question, answer) for name, question, answer in _documented()]


def _documented_pairs() -> list[Pair]:
    """Returns questions with their own answer and that of another function; the two functions form a group."""
    found, pairs = _documented(), []
    for one, other in zip(found[::2], found[1::2], strict=False):
        for (name, question, answer), (_, _, wrong) in ((one, other), (other, one)):
            pairs.append(Pair(_asked(name, question, answer), _asked(name, question, wrong), group=one[0]))
    return pairs


@functools.cache
def _documented() -> tuple[tuple[str, str, str], ...]:
    """Returns (function, question, answer) of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, tuple[str, str, str]] = {}
    for module in _MODULES:
        for name, doc in _functions(library, module):
            answer = " ".join(inspect.cleandoc(doc).partition("\n\n")[0].split())
            if _FEWEST_WORDS <= len(answer.split()) <= _MOST_WORDS and answer.isascii():
                question = _QUESTIONS[_number(name) % len(_QUESTIONS)].format(name)
                found.setdefault(answer, (name, question, answer))
    if len(found) < 2:
        raise DataError(f"the standard library in {library} has no source; set data.path to files of your own")
    return tuple(sorted(found.values(), key=lambda one: _number(one[0])))


def _number(name: str) -> int:
    """Returns a number that looks random and is the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def _functions(library: Path, module: str) -> Iterator[tuple[str, str]]:
    """Yields (full name, docstring) of the public functions and methods of a module."""
    path = library.joinpath(*module.split("."))
    try:
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return  # a module that another version of Python does not have
    classes = [one for one in tree.body if isinstance(one, ast.ClassDef) and not one.name.startswith("_")]
    for owner, body in [*((f"{module}.{one.name}", one.body) for one in classes), (module, tree.body)]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                doc = ast.get_docstring(node)
                if doc is not None:
                    yield f"{owner}.{node.name}", doc
