"""Documents of text that is built in, in plain files, or in JSON lines; each pass reads them again, one at a time."""

import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config.data import JsonlData, TextData
from jaxtrain.data.files import BYTE_ORDER_MARK, FileState, decode_utf8, file_state, find_files, read_file, read_lines
from jaxtrain.data.json_line import json_object
from jaxtrain.data.skipped import NAMED, BadRecordError, SkippedRecords, skipped_records, without_advice
from jaxtrain.errors import DataError

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


def open_documents(config: TextData | JsonlData) -> Documents:
    """Finds the documents of a source without reading them.

    Args:
        config: Which text.

    Returns:
        The documents; calling their `read` reads them.

    Raises:
        DataError: A file is missing or empty. `read` raises it where a file is not UTF-8 or not JSON lines.
    """
    if isinstance(config, JsonlData):
        files = find_files(config.path, suffix=".jsonl")
        states = [file_state(path) for _, path in files]
        skipped = skipped_records(
            config.path, on_bad_record=config.on_bad_record, max_bad_fraction=config.max_bad_fraction
        )
        return Documents(
            config.path, _sizes(files), lambda: _read_jsonl(states, field=config.field, skipped=skipped), skipped
        )
    if config.path is not None:
        files = find_files(config.path, suffix=".txt")
        states = [file_state(path) for _, path in files]
        return Documents(config.path, _sizes(files), lambda: map(read_document, states))
    if config.builtin == "python_prose":
        return Documents("built-in python_prose", (), _read_prose)
    if config.builtin == "python_source":
        return Documents(f"built-in python_source of Python {sys.version.split()[0]}", (), _read_source)
    raise DataError("data.path and data.builtin are both null; set one, for example data.builtin=python_prose")


def _sizes(files: tuple[tuple[str, Path], ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name, path.stat().st_size) for name, path in files)


def read_document(state: FileState) -> str:
    """Returns the text of a file."""
    content = read_file(state.path)
    state.check()
    return decode_utf8(content, path=state.path).removeprefix(BYTE_ORDER_MARK)


def _read_jsonl(states: list[FileState], *, field: str, skipped: SkippedRecords | None) -> Iterator[str]:
    """Yields the documents; bad lines are left out and counted where `skipped` is given."""
    num_lines = num_bad = 0
    named: list[str] = []
    for state in states:
        offset = 0
        for number, line in enumerate(read_lines(state.path), start=1):
            try:
                text = line_document(line, field=field, path=state.path, number=number, offset=offset)
            except BadRecordError as error:
                if skipped is None:
                    raise
                num_lines, num_bad, text = num_lines + 1, num_bad + 1, None
                if len(named) < NAMED:
                    named.append(without_advice(error))
            offset += len(line)
            if text is not None:
                num_lines += 1
                yield text
        # A pass for the tokenizer and a pass for the ids must see the same.
        state.check()
    if skipped is not None:
        skipped.set(named, num_bad, of=num_lines)


def line_document(line: bytes, *, field: str, path: Path, number: int, offset: int) -> str | None:
    """Returns the text of a line of JSON; None where it is empty.

    Args:
        line: As it stands in the file.
        field: Key of the text.
        path, number, offset: File, number of the line from 1, and its first byte, for messages.

    Raises:
        BadRecordError: It is no object of JSON, or holds no text there.
    """
    text = decode_utf8(line, path=path, offset=offset).strip()
    if number == 1:
        text = text.removeprefix(BYTE_ORDER_MARK).strip()
    return _field(text, field=field, where=f"{path}:{number}") if text else None


def _field(line: str, *, field: str, where: str) -> str:
    record = json_object(line, where=where)
    if field not in record:
        keys = ", ".join(map(str, record)) or "none"
        raise BadRecordError(f"{where} has no field '{field}' (it has: {keys}); set data.field to one of them")
    if not isinstance(record[field], str):
        raise BadRecordError(
            f"{where} field '{field}' holds a value of type {type(record[field]).__name__}, not text; set data.field"
        )
    return record[field]


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
