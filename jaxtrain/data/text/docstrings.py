"""Real text that every Python brings: the docstrings of its library, with package and function."""

import functools
import inspect
import re
import sysconfig
from pathlib import Path

from jaxtrain.config.data import DOCSTRING_PACKAGES
from jaxtrain.data.text.records import Record
from jaxtrain.errors import DataError

# A function and its docstring. Quantifiers that give nothing back keep the search linear.
_FUNCTION = re.compile(
    r'^[ \t]*(?:async )?def (\w++)\((?:[^()]|\([^()]*+\))*+\)(?: *-> *[^:\n]++)?: *\n[ \t]++[rR]?"""(.*?)"""',
    re.DOTALL | re.MULTILINE,
)
_LEAST_WORDS = 4


def labelled_docstrings() -> list[Record]:
    """Returns (docstring, package) of the functions of seven packages of the standard library."""
    found: list[Record] = []
    seen: set[str] = set()
    for package in DOCSTRING_PACKAGES:
        for where, _, text in _docstrings(package):
            if text not in seen:
                seen.add(text)
                found.append(Record(where, (text, package)))
    return found


def named_docstrings() -> list[Record]:
    """Returns (first sentence of a docstring, name of the function as words) of the standard library."""
    found: list[Record] = []
    seen: set[str] = set()
    for where, name, text in _docstrings(""):
        words = name.strip("_").replace("_", " ").lower()
        sentence = text.partition("\n\n")[0].replace("\n", " ").partition(". ")[0]
        if words.isascii() and not name.startswith("__") and sentence not in seen:
            seen.add(sentence)
            found.append(Record(where, (sentence, words)))
    return found


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
