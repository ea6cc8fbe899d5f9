"""The special tokens of a run or of a published model: what stands before its prompts, and where its texts end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.formats import files_beside, format_of_reading, published_tokens
from jaxtrain.data.special import NamedTokens
from jaxtrain.errors import ConfigError
from jaxtrain.inference.prompts import leading_tokens
from jaxtrain.inference.special import SpecialTokens
from jaxtrain.models.model import Model
from jaxtrain.run.exported_texts import texts_beside

# The status of a run that was made of a published model, and not trained.
_IMPORTED = "imported"


def special_of_run(info: Mapping[str, Any], run_dir: Path, tokenizer: Tokenizer | None) -> SpecialTokens:
    """Finds the special tokens of a run.

    Rows of plain text have no beginning of text, so that a model that was trained on them gets none either; an
    imported run is a published model, and a template writes that of chats.

    Args:
        info: The content of run.json.
        run_dir: Directory of the run.
        tokenizer: Of the run.

    Raises:
        DataError: A file of the published model that the run came from is malformed.
    """
    return _special(files_beside(run_dir / "tokenizer.json"), tokenizer, added=_adds(info))


def _adds(info: Mapping[str, Any]) -> bool:
    """Whether a run's prompts get what its tokenizer's file puts before a text."""
    is_chat = format_of_reading((info.get("data") or {}).get("reading")) is not None
    return info.get("status") == _IMPORTED or is_chat


def beginning_note(info: Mapping[str, Any], tokenizer: Tokenizer | None, model: Model) -> str | None:
    """Says that the readers of an exported folder begin a text otherwise than the run does; None: they do not.

    Args:
        info: The content of run.json.
        tokenizer: Of the run, whose file is in the folder.
        model: Of the run.
    """
    if model.decoder is None or model.decoder.encode is not None or tokenizer is None or _adds(info):
        return None
    before = leading_tokens(tokenizer)
    if not before:
        return None
    name = tokenizer.decode(list(before))
    return (
        f"the run was trained on texts without {name!a} before them, and tokenizer.json adds it: readers of the folder "
        "answer as the run does where they encode prompts with add_special_tokens=False"
    )


def special_of_folder(file: Path, tokenizer: Tokenizer, *, adapter: str | Path | None = None) -> SpecialTokens:
    """Finds the special tokens of a published model.

    Args:
        file: Its tokenizer.json or GGUF file.
        tokenizer: Read from it.
        adapter: Folder of an adapter over it, which may have a chat template and special tokens of its own.

    Raises:
        DataError: A file beside it is malformed.
    """
    return _special(texts_beside(file, adapter), tokenizer, added=True)


def _special(files: Mapping[str, str], tokenizer: Tokenizer | None, *, added: bool) -> SpecialTokens:
    if not files or not isinstance(tokenizer, NamedTokens):
        return SpecialTokens(added)
    named, stop = published_tokens(files, tokenizer)
    known = {name: text for name, text in named.items() if tokenizer.token_id(text) is not None}
    return SpecialTokens(added, stop, known)


def checked_tokenizer(tokenizer: Tokenizer | None, model: Model, run_dir: Path, *, name: str | None) -> Tokenizer:
    """Returns the tokenizer of a run that continues texts.

    Args:
        tokenizer: Of the run.
        model: Of the run.
        run_dir: Directory of the run.
        name: What the message calls the model; None: by its own name.

    Raises:
        ConfigError: The model does not generate text, or there is no tokenizer.
    """
    if model.decoder is None:
        raise ConfigError(f"{name or f'model {model.name}'} of {run_dir} does not generate text")
    if tokenizer is None:
        raise ConfigError(
            f"{run_dir} has no tokenizer.json, so it cannot continue any text: it was not trained on text, or the "
            "model that it was made of came without one"
        )
    return tokenizer
