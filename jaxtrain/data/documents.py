"""Documents that can be read again and again, one at a time, and those that are built in."""

import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.data.skipped import SkippedRecords

# Folders beside the standard library's source that hold tests, generated files or other packages.
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data"}


@dataclass(frozen=True)
class Documents:
    """Texts that can be read more than once.

    Attributes:
        label: Name of the texts in messages.
        files: (name, size in bytes) of each file, the same on every machine that has the data.
        read: Starts a pass over the texts.
        skipped: Counts the bad records of the last pass; None: a bad record is an error.
    """

    label: str
    files: tuple[tuple[str, int], ...]
    read: Callable[[], Iterator[str]]
    skipped: SkippedRecords | None = None


def builtin_documents(name: str) -> Documents:
    """Returns `python_prose`, the language reference, or `python_source`, the standard library, of this Python."""
    if name == "python_prose":
        return Documents("built-in python_prose", (), _read_prose)
    return Documents(f"built-in python_source of Python {sys.version.split()[0]}", (), _read_source)


def _read_prose() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def _read_source() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    named = sorted((path.relative_to(library).as_posix(), path) for path in library.rglob("*.py"))
    for name, path in named:
        # The few files in other encodings are fixtures; skipping them loses no text.
        if _NOT_SOURCE.isdisjoint(name.split("/")):
            try:
                text = path.read_bytes().decode("utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if text:
                yield text
