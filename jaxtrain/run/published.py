"""What a run keeps of the published model that it started from: enough to write it as a published folder again."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from jaxtrain.config.base import Group
from jaxtrain.config.published import published_from
from jaxtrain.interop.save import Origin, saved_dtypes
from jaxtrain.interop.weights import PublishedModel, open_published
from jaxtrain.runtime.files import write_json_atomic

# Folder of a run: config.json and the tokenizer files of the model that it started from.
FOLDER = "published"
_RECORD = "origin.json"


def keep_published(run_dir: Path, model: Group, *, is_resumed: bool) -> dict[str, Any] | None:
    """Copies the small files of the published model that a run starts from into the run.

    Args:
        run_dir: Directory of the run.
        model: The model group of its config.
        is_resumed: Whether the run goes on: then nothing is copied, and the published model need not be there.

    Returns:
        The folder, and a digest of its config and of the names, shapes and dtypes of its tensors; None for a run that
        starts from no published model.
    """
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
    record = {"folder": str(Path(path).resolve()), "digest": _digest(published), "dtypes": saved_dtypes(published)}
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


def base_folder(run_dir: Path) -> str | None:
    """Returns where the published model was that a run started from, or None."""
    record = run_dir / FOLDER / _RECORD
    return json.loads(record.read_text(encoding="utf-8"))["folder"] if record.is_file() else None


def _digest(published: PublishedModel) -> str:
    tensors = {name: [list(shape), str(dtype)] for name, (shape, dtype) in published.source.tensors.items()}
    text = json.dumps([dict(published.source.config), tensors], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
