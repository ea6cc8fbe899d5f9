"""The tokenizer of a run, which is kept with a digest, its special tokens and its chat template.

What was trained is no text without its tokenizer.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.data import Tokenizer, load_tokenizer
from jaxtrain.data.chat.formats import ChatFormat, files_beside, format_of_reading, published_format, published_tokens
from jaxtrain.data.special import NamedTokens
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.inference.prompts import leading_tokens
from jaxtrain.inference.special import SpecialTokens
from jaxtrain.models.model import Model
from jaxtrain.run.texts import texts_beside

TOKENIZER_FILE = "tokenizer.json"
# Of the file, in run.json.
DIGEST_KEY = "tokenizer_sha256"
# The status of a run that was made of a published model, and not trained.
_IMPORTED = "imported"


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


def special_of_run(info: Mapping[str, Any], run_dir: Path, tokenizer: Tokenizer | None) -> SpecialTokens:
    """The special tokens of a run: what stands before its prompts, and where its texts end.

    Rows of plain text have no beginning of text, so that a model that was trained on them gets none either; an
    imported run is a published model, and a template writes that of chats.
    """
    return _special(files_beside(run_dir / TOKENIZER_FILE), tokenizer, added=_adds(info))


def _adds(info: Mapping[str, Any]) -> bool:
    """Whether a run's prompts get what its tokenizer's file puts before a text."""
    is_chat = format_of_reading((info.get("data") or {}).get("reading")) is not None
    return info.get("status") == _IMPORTED or is_chat


def beginning_note(info: Mapping[str, Any], tokenizer: Tokenizer | None, model: Model) -> str | None:
    """Says that the readers of an exported folder begin a text otherwise than the run does; None: they do not."""
    if model.decoder is None or model.decoder.encode is not None or tokenizer is None or _adds(info):
        return None
    before = leading_tokens(tokenizer)
    if not before:
        return None
    return (
        f"the run was trained on texts without {tokenizer.decode(list(before))!a} before them, and tokenizer.json adds "
        "it: readers of the folder answer as the run does where they encode prompts with add_special_tokens=False"
    )


def special_of_folder(file: Path, tokenizer: Tokenizer, *, adapter: str | Path | None = None) -> SpecialTokens:
    """The special tokens of a published model."""
    return _special(texts_beside(file, adapter), tokenizer, added=True)


def _special(files: Mapping[str, str], tokenizer: Tokenizer | None, *, added: bool) -> SpecialTokens:
    if not files or not isinstance(tokenizer, NamedTokens):
        return SpecialTokens(added)
    named, stop = published_tokens(files, tokenizer)
    known = {name: text for name, text in named.items() if tokenizer.token_id(text) is not None}
    return SpecialTokens(added, stop, known)


def checked_tokenizer(tokenizer: Tokenizer | None, model: Model, run_dir: Path, *, name: str | None) -> Tokenizer:
    """The tokenizer of a run that continues texts."""
    if model.decoder is None:
        raise ConfigError(f"{name or f'model {model.name}'} of {run_dir} does not generate text")
    if tokenizer is None:
        raise ConfigError(f"{run_dir} has no tokenizer.json, so it cannot continue any text")
    return tokenizer


def format_of_run(run: Any) -> ChatFormat | None:
    """The chat template that an `OpenedRun` was trained with, or that of its published model; None: neither."""
    found = format_of_reading((run.info.get("data") or {}).get("reading"))
    if found is None and isinstance(run.tokenizer, NamedTokens):
        found = published_format(files_beside(run.run_dir / TOKENIZER_FILE), str(run.run_dir), run.tokenizer)
    return found


def run_chat_format(run: Any, *, instead: str) -> ChatFormat:
    """The chat template of an `OpenedRun`."""
    found = format_of_run(run)
    if found is None:
        raise ConfigError(
            f"{run.run_dir} has no chat template: it was not trained on data.kind=chat, and its published model came "
            f"without one; {instead}"
        )
    return found
