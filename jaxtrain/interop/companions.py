"""What stands beside the tensors of a published folder: tokenizer files, the chat template, where texts end."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.errors import CheckpointError
from jaxtrain.published.json_text import parse_json

TEMPLATE, SETTINGS, GENERATION = "chat_template.jinja", "tokenizer_config.json", "generation_config.json"
_OLDER_SETTINGS = "special_tokens_map.json"
TEXT_FILES = (TEMPLATE, SETTINGS, _OLDER_SETTINGS, GENERATION)
"""What says how a model chats, and which tokens are special."""
# Of a tokenizer.json that no published model came with. The text of ids is what the tokenizer says, spaces included.
_OWN_SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
# A file without these keys stands for ids of the family's published tokenizers, which are other tokens elsewhere.
_NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class Texts:
    """What a model was trained to read and write, as far as the published model that it came from does not say it.

    Attributes:
        template: Chat template in the language of jinja2; None: that of the origin, if any.
        tokens: Name of a special token (eos_token) -> its text.
        ids: Key of config.json and generation_config.json (eos_token_id) -> an id, a list of ids, or null.
        tokenizer: Text of a tokenizer.json that says how the run's rows are framed; None: that of the origin or the run
            does, or rows are not framed.
    """

    template: str | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    ids: Mapping[str, int | list[int] | None] = field(default_factory=dict)
    tokenizer: str | None = None


def without_ids(settings: Mapping[str, Any]) -> dict[str, None]:
    """Returns null for the special tokens of a model that came from no published one, and of which nothing is known.

    Args:
        settings: Our model group, from `settings_of`.
    """
    writes_text = settings["kind"] == "encoder_decoder" or settings.get("causal", False)
    return dict(_NO_IDS) if writes_text and settings.get("head") is None else {}


def companions(
    config: Mapping[str, Any], files: Mapping[str, str | bytes], tokenizer: str | None, texts: Texts
) -> dict[str, str | bytes]:
    """Makes the small files of a folder.

    Args:
        config: The config.json, or the keys of it that say special tokens.
        files: Name -> contents of the origin's; they stay as they are where `texts` says nothing else.
        tokenizer: Text of a tokenizer.json, where the origin has none.
        texts: What takes the place of what the files say.

    Returns:
        Name -> contents.

    Raises:
        CheckpointError: A file that is to be changed is damaged.
    """
    found = dict(files)
    is_own = False
    if tokenizer is not None and "tokenizer.json" not in files:
        found["tokenizer.json"], is_own = tokenizer, True
    if texts.tokenizer is not None:
        found["tokenizer.json"] = texts.tokenizer
    said: dict[str, Any] = dict(texts.tokens)
    if texts.template is not None:
        if TEMPLATE in files:
            found[TEMPLATE] = texts.template
        if TEMPLATE not in files or "chat_template" in _object(files, SETTINGS):
            said["chat_template"] = texts.template
    if said or (is_own and SETTINGS not in files):
        found[SETTINGS] = _text((_object(files, SETTINGS) or _OWN_SETTINGS) | said)
    older = _object(files, _OLDER_SETTINGS) if texts.tokens else {}
    if set(older) & set(texts.tokens):
        found[_OLDER_SETTINGS] = _text(older | {name: text for name, text in texts.tokens.items() if name in older})
    if GENERATION in files:
        if texts.ids:
            known = {key: value for key, value in texts.ids.items() if value is not None}
            others = {key: value for key, value in _object(files, GENERATION).items() if key not in texts.ids}
            found[GENERATION] = _text(others | known)
    else:
        ids = (*_NO_IDS, "decoder_start_token_id")
        known = {key: config[key] for key in ids if config.get(key) is not None}
        if known:
            found[GENERATION] = _text(known)
    return found


def _object(files: Mapping[str, str | bytes], name: str) -> dict[str, Any]:
    text = files.get(name, "{}")
    try:
        found = parse_json(text.decode() if isinstance(text, bytes) else text)
    except ValueError as error:
        raise CheckpointError(f"{name} of the published model is not JSON ({error}); fetch it again") from None
    return found if isinstance(found, dict) else {}


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
