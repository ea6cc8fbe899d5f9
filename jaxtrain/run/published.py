"""What a run keeps beside its checkpoints: its tokenizer, and of the published model that it started from.

What was trained is no text without its tokenizer, and with the small files of its published model it is written as a
published folder again.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.base import Group
from jaxtrain.config.model import published_from
from jaxtrain.data import Tokenizer, load_tokenizer
from jaxtrain.interop.save import Origin, saved_dtypes
from jaxtrain.interop.weights import open_published
from jaxtrain.run.directory import TOKENIZER_FILE, file_digest, tokenizer_file
from jaxtrain.runtime.files import write_json_atomic

# Folder of a run: config.json and the tokenizer files of the model that it started from.
FOLDER = "published"
_RECORD = "origin.json"


def keep_published(run_dir: Path, model: Group, *, is_resumed: bool) -> dict[str, Any] | None:
    """Copy the small files of the published model that a run starts from into the run."""
    path, kept = published_from(model), run_dir / FOLDER
    if path is None:
        return None
    if is_resumed and (kept / _RECORD).is_file():
        return json.loads((kept / _RECORD).read_text(encoding="utf-8"))
    published = open_published(path)
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for name, text in published.source.files.items():
        (kept / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    write_json_atomic(kept / "config.json", dict(published.source.config))
    record = {"folder": str(Path(path).resolve()), "dtypes": saved_dtypes(published)}
    write_json_atomic(kept / _RECORD, record)
    return record


def origin_of(run_dir: Path) -> Origin | None:
    """Returns what a run kept of the published model that it started from, or None."""
    kept = run_dir / FOLDER
    if not (kept / "config.json").is_file():
        return None
    files = {
        file.name: file.read_bytes() for file in sorted(kept.iterdir()) if file.name not in ("config.json", _RECORD)
    }
    record = json.loads((kept / _RECORD).read_text(encoding="utf-8"))
    return Origin(json.loads((kept / "config.json").read_text(encoding="utf-8")), files, record.get("dtypes", {}))


def base_of_adapters(run_dir: Path) -> str | None:
    """Returns where the published model was that a run started from, or None."""
    file = run_dir / FOLDER / _RECORD
    return json.loads(file.read_text(encoding="utf-8"))["folder"] if file.is_file() else None


def keep_tokenizer(run_dir: Path, tokenizer: Tokenizer) -> str:
    """Write tokenizer.json into the directory of a run; returns the digest of the file."""
    temporary = run_dir / f".{TOKENIZER_FILE}.{os.getpid()}.tmp"
    tokenizer.save(temporary)
    temporary.replace(run_dir / TOKENIZER_FILE)
    return file_digest(run_dir / TOKENIZER_FILE)


def read_tokenizer(run_dir: Path, info: Mapping[str, Any]) -> Tokenizer | None:
    """Read the tokenizer of a run; see `tokenizer_file`."""
    path = tokenizer_file(run_dir, info)
    if path is None:
        return None
    tokenizer, data = load_tokenizer(path), info.get("data") or {}
    if "end_of_text" in data:  # an imported run ends as the tokenizer alone says
        tokenizer.end_of_text = data["end_of_text"]
    return tokenizer
