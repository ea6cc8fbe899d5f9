"""The tokenizer of a run, which is kept with a digest: what was trained is no text without it."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.data import Tokenizer, load_tokenizer
from jaxtrain.errors import DataError

TOKENIZER_FILE = "tokenizer.json"
# Of the file, in run.json.
DIGEST_KEY = "tokenizer_sha256"


def keep_tokenizer(run_dir: Path, tokenizer: Tokenizer) -> str:
    """Write tokenizer.json into the directory of a run; returns the digest of the file."""
    temporary = run_dir / f".{TOKENIZER_FILE}.{os.getpid()}.tmp"
    tokenizer.save(temporary)
    temporary.replace(run_dir / TOKENIZER_FILE)
    return _digest(run_dir / TOKENIZER_FILE)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tokenizer_file(run_dir: Path, info: Mapping[str, Any]) -> Path | None:
    """The intact tokenizer file of a run; None where the run has none."""
    path, wanted = run_dir / TOKENIZER_FILE, info.get(DIGEST_KEY)
    is_there = path.is_file()
    if wanted is None or (is_there and _digest(path) == wanted):  # a run without text, which may be imported with one
        return path if is_there else None
    state = "is damaged, or not the run's" if is_there else "is gone"
    raise DataError(
        f"{path} {state}, and without it the run reads and writes no text; run 'jaxtrain train {run_dir}' again, "
        "which writes it where the data of the run is still there"
    )


def read_tokenizer(run_dir: Path, info: Mapping[str, Any]) -> Tokenizer | None:
    """Read the tokenizer of a run; see `tokenizer_file`."""
    path = tokenizer_file(run_dir, info)
    if path is None:
        return None
    tokenizer, data = load_tokenizer(path), info.get("data") or {}
    if "end_of_text" in data:  # an imported run ends as the tokenizer alone says
        tokenizer.end_of_text = data["end_of_text"]
    return tokenizer
