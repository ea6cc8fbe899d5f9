"""The tokenizer that a run keeps: in two places and with a digest, since what was trained is no text without it."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.errors import DataError
from jaxtrain.runtime.files import put_aside, write_bytes_atomic

if TYPE_CHECKING:
    from jaxtrain.data import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
COPY_FILE = "tokenizer.copy.json"
# Of the file, in run.json.
DIGEST_KEY = "tokenizer_sha256"


def keep_tokenizer(run_dir: Path, tokenizer: "Tokenizer") -> tuple[str, str | None]:
    """Writes tokenizer.json into the directory of a run, and a second time beside it.

    Args:
        run_dir: Directory of the run.
        tokenizer: Of the run's data, which was compared with that of its checkpoints.

    Returns:
        The digest of the file, and a line for people where one was damaged, gone or another one.

    Raises:
        OSError: It cannot be written.
    """
    temporary = run_dir / f".{TOKENIZER_FILE}.{os.getpid()}.tmp"
    try:
        tokenizer.save(temporary)
        content = temporary.read_bytes()
    finally:
        temporary.unlink(missing_ok=True)
    missing = [path for path in _places(run_dir) if not path.exists()]
    replaced = [path for path in _places(run_dir) if _write(path, content)]
    if len(missing) == 1:  # where both are, the run begins
        replaced += missing
    line = None
    if replaced:
        shown = " and ".join(map(str, replaced))
        line = f"{shown} was damaged, gone or not the run's: it is written again with the tokenizer of the data"
    return _digest(content), line


def tokenizer_file(run_dir: Path, info: Mapping[str, Any], report: Callable[[str], None]) -> Path | None:
    """Finds the tokenizer of a run.

    Args:
        run_dir: Directory of the run.
        info: Content of its run.json.
        report: Called with one line where the file of the run is damaged or gone and its second copy is used.

    Returns:
        The intact file; None where the run has none.

    Raises:
        DataError: The run has one, and none of its files is intact.
    """
    first, second = _places(run_dir)
    wanted = info.get(DIGEST_KEY)
    if wanted is None:  # a run without text
        return first if first.is_file() else None
    if _digest_of(first) == wanted:
        return first
    state = "is damaged, or not the run's" if first.is_file() else "is gone"
    if _digest_of(second) == wanted:
        report(f"{first} {state}: {second} is used")
        return second
    raise DataError(
        f"{first} {state}, and without it the run reads and writes no text; run 'jaxtrain train {run_dir}' again, "
        "which writes it where the data of the run is still there"
    )


def read_tokenizer(run_dir: Path, info: Mapping[str, Any], report: Callable[[str], None]) -> "Tokenizer | None":
    """Reads the tokenizer of a run; see `tokenizer_file`."""
    from jaxtrain.data import load_tokenizer

    path = tokenizer_file(run_dir, info, report)
    if path is None:
        return None
    tokenizer, data = load_tokenizer(path), info.get("data") or {}
    # Earlier versions did not record it: their documents end as the tokenizer alone says.
    if "end_of_text" in data:
        tokenizer.end_of_text = data["end_of_text"]
    return tokenizer


def _places(run_dir: Path) -> tuple[Path, Path]:
    return run_dir / TOKENIZER_FILE, run_dir / COPY_FILE


def _write(path: Path, content: bytes) -> bool:
    """Writes a file unless it is there; returns whether something else was there."""
    found = put_aside(path) is not None
    if path.is_file():
        if path.read_bytes() == content:
            return False
        found = True
    write_bytes_atomic(path, content)
    return found


def _digest_of(path: Path) -> str | None:
    try:
        return _digest(path.read_bytes())
    except OSError:
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
