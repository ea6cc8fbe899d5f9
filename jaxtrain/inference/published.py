"""What a run keeps beside its checkpoints: its tokenizer, and of its published model what makes it one again."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config import Config
from jaxtrain.config.base import Group
from jaxtrain.config.fits import fresh_parts
from jaxtrain.config.model import published_from
from jaxtrain.data import Tokenizer, load_tokenizer
from jaxtrain.data.chat.templates import (
    ChatFormat,
    files_beside,
    format_of_reading,
    published_format,
    published_tokens,
)
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, NamedTokens
from jaxtrain.errors import ConfigError, DataError, reading_published
from jaxtrain.families.family import label_names
from jaxtrain.formats.hub import read_published_config, tokenizer_origin
from jaxtrain.inference.prompts import SpecialTokens, encoder_prompts
from jaxtrain.models.model import Model
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.weights.read import open_published
from jaxtrain.weights.write import SETTINGS, TEMPLATE, TEXT_FILES, Origin, Texts, saved_dtypes

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_DIGEST = "tokenizer_sha256"  # of that file, in run.json
# Folder of a run: config.json and the tokenizer files of the model that it started from.
FOLDER = "published"
_RECORD = "origin.json"


def keep_published(run_dir: Path, model: Group, *, adapter: str | None, is_resumed: bool) -> dict[str, Any] | None:
    """Copy the small files of the published model, and of an adapter over it, that a run starts from into the run."""
    path, kept = published_from(model), run_dir / FOLDER
    if path is None:
        return None
    if is_resumed and (kept / _RECORD).is_file():
        return json.loads((kept / _RECORD).read_text(encoding="utf-8"))
    published, tokenizer = open_published(path), tokenizer_origin(Path(path))
    files = dict(published.source.files)
    if adapter is not None and tokenizer is not None:
        files = {name: text for name, text in files.items() if name not in TEXT_FILES}
        files |= texts_beside(tokenizer, adapter)
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for name, text in files.items():
        (kept / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    write_json_atomic(kept / "config.json", dict(published.source.config))
    record = {"folder": str(Path(path).resolve()), "dtypes": saved_dtypes(published)}
    write_json_atomic(kept / _RECORD, record)
    return record


def kept_published(run_dir: Path) -> tuple[Origin | None, dict[str, Any]]:
    """What a run kept of the published model that it started from, and the record of it; None and {} of none."""
    kept = run_dir / FOLDER
    if not (kept / "config.json").is_file():
        return None, {}
    small = [file for file in sorted(kept.iterdir()) if file.name not in ("config.json", _RECORD)]
    config, record = (json.loads((kept / name).read_text(encoding="utf-8")) for name in ("config.json", _RECORD))
    return Origin(config, {file.name: file.read_bytes() for file in small}, record.get("dtypes", {})), record


def check_class_order(config: Config, classes: Sequence[str] | None) -> None:
    """Raise where a published head that a run starts from has the classes of its data in another order."""
    path = published_from(config.model)
    if path is None or classes is None or config.finetune.adapter is not None or fresh_parts(config.model):
        return
    names = label_names(read_published_config(Path(path))) or []
    if list(classes) != list(names) and sorted(classes) == sorted(names):
        raise ConfigError(
            f"the head of {path} numbers its classes {', '.join(names[:3])}, ..., but the data "
            f"{', '.join(classes[:3])}, ...; write them as numbers (0 for {names[0]}, 1 for {names[1]}, ...)"
        )


def published_classes(config: Mapping[str, Any], name: str) -> Sequence[str] | None:
    """The names of the classes in a config.json; None: it names none."""
    if config.get("problem_type") == "multi_label_classification":
        raise ConfigError(f"{name} gives several classes per row (problem_type); jaxtrain.load_pretrained gives logits")
    return label_names(config)


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


def texts_beside(file: Path, adapter: str | Path | None) -> dict[str, str]:
    """The files that say how a published model chats: those of an adapter over it where that has a template."""
    base = files_beside(file)
    own = {} if adapter is None else files_beside(Path(adapter) / "tokenizer.json")
    if TEMPLATE not in own and not json.loads(own.get(SETTINGS, "{}")).get("chat_template"):
        return base
    return {name: text for name, text in base.items() if name != TEMPLATE} | own


def read_texts(
    files: Mapping[str, str], tokenizer: Tokenizer | None, *, where: str, added: bool
) -> tuple[ChatFormat | None, SpecialTokens]:
    """The chat template (None: there is none) and the special tokens that the files beside a tokenizer name."""
    if not files or not isinstance(tokenizer, NamedTokens):
        return None, SpecialTokens(added)
    with reading_published(f"what is beside the tokenizer of {where}"):
        named, stop = published_tokens(files, tokenizer)
        stop = tuple(np.array(stop, np.int32).tolist())
        known = {name: text for name, text in named.items() if tokenizer.token_id(text) is not None}
        return published_format(files, where, tokenizer), SpecialTokens(added, stop, known)


def exported_texts(info: Mapping[str, Any], tokenizer: Tokenizer | None, origin: Origin | None, model: Model) -> Texts:
    """Chat template and ends of a run, where its published model (`origin`) does not say the same."""
    form = format_of_reading((info.get("data") or {}).get("reading"))
    if model.decoder is None or not isinstance(tokenizer, BpeTokenizer | ByteTokenizer):
        return Texts()
    if form is None:
        if origin is not None and "tokenizer.json" in origin.files:
            return Texts()
        end = tokenizer.end_of_text if model.decoder.encode is None else encoder_prompts(tokenizer).end
        name = None if end is None else tokenizer.decode([end])
        tokens = {} if name is None or tokenizer.token_id(name) != end else {"eos_token": name}
        return Texts(tokens=tokens, ids={"eos_token_id": end})
    files = {} if origin is None else {name: text for name, text in origin.files.items() if name in TEXT_FILES}
    files = {name: text.decode() if isinstance(text, bytes) else text for name, text in files.items()}
    theirs = published_format(files, "the published model", tokenizer)
    named, stop = published_tokens(files, tokenizer) if files else ({}, ())
    # An answer of the run ends with a document, too.
    ends = list(dict.fromkeys([*form.stop, *(() if tokenizer.end_of_text is None else (tokenizer.end_of_text,))]))
    said = set(stop) in (set(form.stop), set(ends))
    return Texts(
        template=None if theirs is not None and theirs.source == form.source else form.source,
        tokens={name: text for name, text in form.tokens.items() if named.get(name) != text},
        ids={} if said else {"eos_token_id": ends if len(ends) > 1 else ends[0]},
    )


def file_digest(path: Path) -> str:
    """The SHA-256 of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tokenizer_file(run_dir: Path, info: Mapping[str, Any]) -> Path | None:
    """The intact tokenizer file of a run; None where the run has none."""
    path = run_dir / TOKENIZER_FILE
    wanted = info.get(TOKENIZER_DIGEST)
    is_there = path.is_file()
    if wanted is None or (is_there and file_digest(path) == wanted):
        return path if is_there else None
    state = "is damaged, or not the run's" if is_there else "is gone"
    raise DataError(f"{path} {state}; run 'jaxtrain train {run_dir}' again, which writes it from the data of the run")
