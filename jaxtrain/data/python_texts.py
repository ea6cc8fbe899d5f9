"""Texts that come with every Python: its manual, its source, and the docstrings of its functions."""

import ast
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain.config.data import DOCSTRING_PACKAGES

# Folders beside the standard library's source that hold tests, generated files or other packages.
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data"}
# A function and its docstring. Quantifiers that give nothing back keep the search linear.
_FUNCTION = re.compile(
    r'^[ \t]*(?:async )?def (\w++)\((?:[^()]|\([^()]*+\))*+\)(?: *-> *[^:\n]++)?: *\n[ \t]++[rR]?"""(.*?)"""',
    re.DOTALL | re.MULTILINE,
)
_LEAST_WORDS = 4

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


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def read_builtin(name: str) -> tuple[str, tuple[tuple[str, int], ...], Callable[[], Iterator[str]]]:
    """Returns `Documents` of `python_prose`, the language reference, or `python_source`, the standard library."""
    if name == "python_prose":
        return "built-in python_prose", (), _read_prose
    return f"built-in python_source of Python {sys.version.split()[0]}", (), _read_source


def _read_prose() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def _read_source() -> Iterator[str]:
    named = sorted((path.relative_to(_library()).as_posix(), path) for path in _library().rglob("*.py"))
    for name, path in named:
        if _NOT_SOURCE.isdisjoint(name.split("/")) and (text := _text(path)):
            yield text


def _text(path: Path) -> str | None:
    """Returns the text of a file; None: it is no UTF-8, as few fixtures are, or cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return None


@functools.cache
def docstrings(package: str) -> tuple[tuple[str, str, str], ...]:
    """Returns (file, function, docstring) of a package of the standard library; "": of all of it."""
    files = sorted(_library().glob("*.py")) if not package else []
    for folder in [package] if package else DOCSTRING_PACKAGES:
        files += sorted((_library() / folder).rglob("*.py"))
    found = []
    for file in files:
        name = file.relative_to(_library())
        if not {"test", "tests", "idle_test"} & set(name.parts) and (text := _text(file)) is not None:
            for function, doc in _FUNCTION.findall(text):
                cleaned = inspect.cleandoc(doc)
                if len(cleaned.split()) >= _LEAST_WORDS:
                    found.append((str(name), function, cleaned))
    return tuple(found)


@functools.cache
def questions() -> tuple[tuple[str, str, str], ...]:
    """Returns (function, question, answer): the answer is the first paragraph of the function's docstring.

    No two have the same answer, and the order depends on the names alone.
    """
    found: dict[str, tuple[str, str, str]] = {}
    for module in _MODULES:
        for name, doc in _functions(module):
            answer = " ".join(inspect.cleandoc(doc).partition("\n\n")[0].split())
            if _FEWEST_WORDS <= len(answer.split()) <= _MOST_WORDS and answer.isascii():
                question = _QUESTIONS[_number(name) % len(_QUESTIONS)].format(name)
                found.setdefault(answer, (name, question, answer))
    return tuple(sorted(found.values(), key=lambda one: _number(one[0])))


def _number(name: str) -> int:
    """Returns a number that looks random and is the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def _functions(module: str) -> Iterator[tuple[str, str]]:
    """Yields (full name, docstring) of the public functions and methods of a module."""
    path = _library().joinpath(*module.split("."))
    text = _text(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    # Another version of Python may not have the module.
    tree = ast.parse(text or "")
    classes = [one for one in tree.body if isinstance(one, ast.ClassDef) and not one.name.startswith("_")]
    for owner, body in [*((f"{module}.{one.name}", one.body) for one in classes), (module, tree.body)]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                doc = ast.get_docstring(node)
                if doc is not None:
                    yield f"{owner}.{node.name}", doc
