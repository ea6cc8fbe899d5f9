"""What a run keeps beside its checkpoints: its tokenizer, and of its published model what makes it one again."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.base import Group
from jaxtrain.config.model import published_from
from jaxtrain.data import Tokenizer, load_tokenizer
from jaxtrain.data.chat.templates import (
    ChatFormat,
    files_beside,
    format_of_reading,
    published_format,
    published_tokens,
)
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, NamedTokens, json_beside
from jaxtrain.errors import reading_published
from jaxtrain.formats.hub import tokenizer_origin
from jaxtrain.inference.prompts import SpecialTokens, encoder_prompts
from jaxtrain.models.model import Model
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.weights.read import open_published
from jaxtrain.weights.write import SETTINGS, TEMPLATE, TEXT_FILES, Origin, Texts, saved_dtypes, write_files

TOKENIZER_FILE = "tokenizer.json"
# Folder of a run: config.json and the tokenizer files of the model that it started from.
FOLDER = "published"
_RECORD = "origin.json"


def keep_published(
    run_dir: Path,
    model: Group,
    *,
    adapter: str | None,
    is_resumed: bool,
) -> dict[str, Any] | None:
    """Copy the small files of the published model, and of an adapter over it, that a run starts from into the run."""
    path = published_from(model)
    folder = run_dir / FOLDER
    if path is None:
        return None
    if is_resumed and (folder / _RECORD).is_file():
        return json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    published = open_published(path)
    tokenizer = tokenizer_origin(Path(path))
    files = dict(published.source.files)
    if adapter is not None and tokenizer is not None:
        for name in TEXT_FILES:
            files.pop(name, None)
        files |= texts_beside(tokenizer, adapter)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_files(folder, files)
    write_json_atomic(folder / "config.json", dict(published.source.config))
    record = {
        "folder": str(Path(path).resolve()),
        "dtypes": saved_dtypes(published),
    }
    write_json_atomic(folder / _RECORD, record)
    return record


def kept_published(run_dir: Path) -> Origin | None:
    """What a run kept of the published model that it started from; None: it started from none."""
    folder = run_dir / FOLDER
    if not (folder / "config.json").is_file():
        return None
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    config = json.loads(files.pop("config.json"))
    record = json.loads(files.pop(_RECORD))
    return Origin(config, files, record["dtypes"])


def keep_tokenizer(run_dir: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json into the directory of a run."""
    temporary = run_dir / f".{TOKENIZER_FILE}.{os.getpid()}.tmp"
    tokenizer.save(temporary)
    temporary.replace(run_dir / TOKENIZER_FILE)


def read_tokenizer(run_dir: Path, info: Mapping[str, Any]) -> Tokenizer | None:
    """Read the tokenizer of a run; None: the run has none."""
    path = run_dir / TOKENIZER_FILE
    if not path.is_file():
        return None
    tokenizer = load_tokenizer(path)
    data = info.get("data") or {}
    if "end_of_text" in data:  # an imported run ends as the tokenizer alone says
        tokenizer.end_of_text = data["end_of_text"]
    return tokenizer


def texts_beside(file: Path, adapter: str | Path | None) -> dict[str, str]:
    """The files that say how a published model chats: those of an adapter over it if that has a template."""
    files = files_beside(file)
    if adapter is None:
        return files
    adapter_files = files_beside(Path(adapter) / TOKENIZER_FILE)
    if TEMPLATE not in adapter_files and not json_beside(adapter_files, SETTINGS).get("chat_template"):
        return files
    files.pop(TEMPLATE, None)
    return files | adapter_files


def read_texts(
    files: Mapping[str, str],
    tokenizer: Tokenizer | None,
    *,
    where: str,
    added: bool,
) -> tuple[ChatFormat | None, SpecialTokens]:
    """Read the chat template (None: there is none) and the special tokens from the files beside a tokenizer.

    Args:
        files: name -> text.
        tokenizer: that the files belong to.
        where: its folder, for messages.
        added: whether what the tokenizer's file puts before a text stands before a prompt.
    """
    if not files or not isinstance(tokenizer, NamedTokens):
        return None, SpecialTokens(added)
    with reading_published(f"what is beside the tokenizer of {where}"):
        names, stop = published_tokens(files, tokenizer)
        names = {name: text for name, text in names.items() if tokenizer.token_id(text) is not None}
        return published_format(files, where, tokenizer), SpecialTokens(added, tuple(map(int, stop)), names)


def exported_texts(
    info: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    origin: Origin | None,
    model: Model,
) -> Texts:
    """The chat template and the ends of texts that a run was trained with.

    Nothing is said of a run on plain text that started from a published model, whose files stay as they are.
    """
    if model.decoder is None or not isinstance(tokenizer, BpeTokenizer | ByteTokenizer):
        return Texts()
    end = tokenizer.end_of_text
    form = format_of_reading((info.get("data") or {}).get("reading"))
    if form is not None:
        # An answer ends with a document, too.
        ends = list(form.stop)
        if end is not None and end not in ends:
            ends.append(end)
        return Texts(form.source, form.tokens, {"eos_token_id": ends})
    if origin is not None and TOKENIZER_FILE in origin.files:
        return Texts()
    if model.decoder.encode is not None:
        _, end = encoder_prompts(tokenizer)
    tokens = {}
    if end is not None:
        name = tokenizer.decode([end])
        if tokenizer.token_id(name) == end:
            tokens = {"eos_token": name}
    return Texts(tokens=tokens, ids={"eos_token_id": end})
