"""Where the chat template of a run comes from, which tokens it may name, and at which tokens a model stops."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.config.data import TURN_BEGINS, TURN_ENDS, ChatData
from jaxtrain.data.files import require_file
from jaxtrain.data.special import NamedTokens
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.interop.formats.gguf import read_gguf
from jaxtrain.interop.formats.gguf_tokenizer import tokenizer_files

# Templates that need no file: turns between two tokens, and the texts one after another.
BUILT_IN = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "plain": "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
}
TEMPLATE_FILE = "chat_template.jinja"
_FILES = (TEMPLATE_FILE, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
# Folder of a run, beside its tokenizer, with the small files of the published model that it started from.
_OF_A_RUN = "published"
_KIND = "chat"


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become text.

    Attributes:
        source: The template, in the language of jinja2.
        label: What people call it.
        tokens: Name that a template uses (eos_token) -> text of the token.
        stop: Ids at which a model stops.
    """

    source: str
    label: str
    tokens: Mapping[str, str]
    stop: tuple[int, ...]

    def to_reading(self) -> dict[str, Any]:
        """Returns the format as JSON values, for `Data.reading`."""
        stop = list(self.stop)
        return {"kind": _KIND, "template": self.source, "label": self.label, "tokens": dict(self.tokens), "stop": stop}


def format_of_reading(reading: Mapping[str, Any] | None) -> ChatFormat | None:
    """Returns the format that a run kept in its `Data.reading`; None: it is no run on chats."""
    if reading is None or reading.get("kind") != _KIND:
        return None
    return ChatFormat(reading["template"], reading["label"], reading["tokens"], tuple(reading["stop"]))


def chat_format(config: ChatData, tokenizer: NamedTokens) -> ChatFormat:
    """Finds the format of a config.

    Args:
        config: May name a template; null: that beside the tokenizer's file or inside the GGUF file, or chatml where
            the tokenizer is made for the run.
        tokenizer: Has the ids.

    Raises:
        ConfigError: There is no template, or no token at which the model stops.
        DataError: A file cannot be read.
    """
    files = {} if config.tokenizer.kind != "file" else files_beside(Path(config.tokenizer.path or ""))
    found = _published(files, config.tokenizer.path or "", tokenizer)
    if config.template in BUILT_IN:
        source, label = BUILT_IN[config.template], f"{config.template} (built in)"
    elif config.template is not None:
        if not Path(config.template).expanduser().exists() and not Path(config.template).suffix:
            known = " or ".join(BUILT_IN)
            raise ConfigError(f"data.template={config.template} is no file, nor {known}; give one of them")
        source, label = _text(require_file(config.template, what="data.template")), config.template
    elif config.tokenizer.kind != "file":
        source, label = BUILT_IN["chatml"], "chatml (built in)"
    elif found is None:
        raise ConfigError(
            f"{config.tokenizer.path} has no chat template beside it ({TEMPLATE_FILE}, or chat_template in "
            "tokenizer_config.json); set data.template=chatml, data.template=plain or a file"
        )
    else:
        source, label = found.source, found.label
    tokens, stop = (found.tokens, found.stop) if found is not None else _without_template(files, tokenizer)
    if config.stop is not None:
        i = tokenizer.token_id(config.stop)
        if i is None:
            raise DataError(f"data.stop={config.stop!r} is no token of the tokenizer; give the name of one")
        stop = (i,)
    if not stop:
        raise ConfigError(
            "the tokenizer's files name no token at which the model stops (eos_token); set data.stop to its name"
        )
    return ChatFormat(source, label, tokens, stop)


def files_beside(tokenizer: Path) -> dict[str, str]:
    """Returns the text of the files of a published model that say how it chats, by name.

    Args:
        tokenizer: Its tokenizer.json, the copy of it in a run, or the GGUF file that holds everything.

    Raises:
        DataError: A file is not UTF-8.
    """
    tokenizer = tokenizer.expanduser()
    if tokenizer.suffix == ".gguf":
        return tokenizer_files(tokenizer, read_gguf(tokenizer).metadata)
    kept = tokenizer.parent / _OF_A_RUN
    folder = kept if kept.is_dir() else tokenizer.parent
    return {name: _text(folder / name) for name in _FILES if (folder / name).is_file()}


def published_format(files: Mapping[str, str], where: str, tokenizer: NamedTokens) -> ChatFormat | None:
    """Returns the format that the files of a published model describe; None: they hold no template.

    Args:
        files: Made by `files_beside`.
        where: Names them in messages.
        tokenizer: Has the ids.

    Raises:
        DataError: A file is malformed.
    """
    return _published(files, where, tokenizer)


def published_tokens(files: Mapping[str, str], tokenizer: NamedTokens) -> tuple[dict[str, str], tuple[int, ...]]:
    """Returns what the files of a published model say of its special tokens.

    Args:
        files: Made by `files_beside`, at least one.
        tokenizer: Has the ids.

    Returns:
        Name (bos_token) -> text of the token, and the ids at which the model stops.

    Raises:
        DataError: A file is malformed.
    """
    return _without_template(files, tokenizer)


def _published(files: Mapping[str, str], where: str, tokenizer: NamedTokens) -> ChatFormat | None:
    settings = _object(files, "tokenizer_config.json")
    source, label = files.get(TEMPLATE_FILE), TEMPLATE_FILE
    if source is None:
        source, label = _default(settings.get("chat_template")), f"of {where}"
    if source is None:
        return None
    tokens, stop = _without_template(files, tokenizer)
    return ChatFormat(source, label, tokens, stop)


def _default(found: Any) -> str | None:
    """Returns a template, or the one named default of a list of templates with names."""
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _without_template(files: Mapping[str, str], tokenizer: NamedTokens) -> tuple[dict[str, str], tuple[int, ...]]:
    """Returns the tokens that templates may name, and the ids at which a model stops."""
    if not files:
        known = {"bos_token": TURN_BEGINS, "eos_token": TURN_ENDS}
        tokens = {name: token for name, token in known.items() if tokenizer.token_id(token) is not None}
        return tokens, _ids(tokenizer, [tokens.get("eos_token")])
    settings = {**_object(files, "special_tokens_map.json"), **_object(files, "tokenizer_config.json")}
    tokens = {}
    for name, value in settings.items():
        value = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    ends = _object(files, "generation_config.json").get("eos_token_id")
    given = [one for one in (ends if isinstance(ends, list) else [ends]) if isinstance(one, int)]
    return tokens, tuple(dict.fromkeys([*given, *_ids(tokenizer, [tokens.get("eos_token")])]))


def _ids(tokenizer: NamedTokens, names: Sequence[str | None]) -> tuple[int, ...]:
    found = [tokenizer.token_id(name) for name in names if name is not None]
    return tuple(one for one in found if one is not None)


def _object(files: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name, "{}"))
    except ValueError as error:
        raise DataError(f"{name} beside the tokenizer is not JSON ({error}); fetch it again") from None
    return found if isinstance(found, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text ({error}); fetch it again") from None
