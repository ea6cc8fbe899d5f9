"""Questions and answers made from the documentation that every Python carries."""

import ast
import functools
import hashlib
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.errors import DataError

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
class Documented:
    """A function, a question about it and the answer.

    Attributes:
        where: Module and name, for messages.
        question: Asks what the function does.
        answer: The first paragraph of its docstring.
    """

    where: str
    question: str
    answer: str


@functools.cache
def documented() -> tuple[Documented, ...]:
    """Returns one question per function; no two have the same answer, and the order depends on their names alone.

    Raises:
        DataError: This Python has no source of its standard library.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Documented] = {}
    for module in _MODULES:
        for name, doc in _functions(library, module):
            answer = " ".join(inspect.cleandoc(doc).partition("\n\n")[0].split())
            if _FEWEST_WORDS <= len(answer.split()) <= _MOST_WORDS and answer.isascii():
                question = _QUESTIONS[_number(name) % len(_QUESTIONS)].format(name)
                found.setdefault(answer, Documented(name, question, answer))
    if len(found) < 2:
        raise DataError(f"the standard library in {library} has no source; set data.path to files of your own")
    return tuple(sorted(found.values(), key=lambda one: _number(one.where)))


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
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _named(f"{module}.{node.name}", node.body)
    yield from _named(module, tree.body)


def _named(owner: str, body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            doc = ast.get_docstring(node)
            if doc is not None:
                yield f"{owner}.{node.name}", doc
