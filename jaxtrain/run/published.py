"""What a run keeps of the published model that it started from: enough to write it as a published folder again."""

import json
import shutil
from pathlib import Path
from typing import Any

from jaxtrain.config.base import Group
from jaxtrain.config.model import published_from
from jaxtrain.interop.base_digest import base_digests
from jaxtrain.interop.companions import TEXT_FILES
from jaxtrain.interop.save import Origin, saved_dtypes
from jaxtrain.interop.settings import settings_in, settings_of
from jaxtrain.interop.weights import PublishedModel, find_places, open_published
from jaxtrain.published.config_file import tokenizer_origin
from jaxtrain.run.texts import texts_beside
from jaxtrain.runtime.files import write_json_atomic

# Folder of a run: config.json and the tokenizer files of the model that it started from.
FOLDER = "published"
_RECORD = "origin.json"


def keep_published(run_dir: Path, model: Group, *, is_resumed: bool, is_base: bool) -> dict[str, Any] | None:
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
    if is_base:
        record["parameters"] = _parameters(published, model)
    write_json_atomic(kept / _RECORD, record)
    return record


def keep_texts(run_dir: Path, adapter: str | Path, *, base: Path) -> None:
    """Write the chat template that an adapter came with over that of its base, in a run of both."""
    file = tokenizer_origin(base)
    if file is None:
        return
    before, files = texts_beside(file, None), texts_beside(file, adapter)
    if files == before:
        return
    for name in TEXT_FILES:
        (run_dir / FOLDER / name).unlink(missing_ok=True)
        if name in files:
            (run_dir / FOLDER / name).write_bytes(files[name].encode())


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


def base_of_adapters(run_dir: Path) -> tuple[str | None, dict[str, str]]:
    """Returns where the published model was that a run started from, or None; and the digests of its parameters."""
    file = run_dir / FOLDER / _RECORD
    if not file.is_file():
        return None, {}
    record = json.loads(file.read_text(encoding="utf-8"))
    return record["folder"], record.get("parameters", {})


def _parameters(published: PublishedModel, model: Group) -> dict[str, str]:
    """Path -> digest of the parameters of a published model, read as a run of this model group reads it."""
    settings = settings_in(published.path, published.settings)
    if settings_of(model).get("tie_embeddings") is False and settings.get("tie_embeddings"):
        settings["tie_embeddings"] = False  # of a file that holds an output layer although its config.json ties it
    return base_digests(published, find_places(published, settings).params)
