"""What /tokenize, /detokenize and /tokenizer_info answer: a tokenizer over HTTP, as evaluation harnesses ask for it."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.inference.server.bodies import check_model
from jaxtrain.inference.server.fields import Field, flag, is_whole, read_fields, shown, text, unsupported, wrong
from jaxtrain.inference.server.prompts import PromptReader
from jaxtrain.inference.server.refused import RefusedError

_TOKENIZE = {
    "model": Field(text),
    "prompt": Field(text, required=True),
    "add_special_tokens": Field(flag),
    "return_token_strs": Field(unsupported(False, instead="leave it out")),
}


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(is_whole(one) for one in value):
        raise wrong(value, name, "a list of token ids")
    return value


_DETOKENIZE = {"model": Field(text), "tokens": Field(_ids, required=True)}


def tokenize(body: Mapping[str, Any], reader: PromptReader, *, served: str, length: int) -> dict[str, Any]:
    """The ids of a text; special tokens that it spells are read as such.

    Args:
        body: from `parse_body`.
        reader: has the tokenizer.
        served: name of the model.
        length: tokens that prompt and answer may have together.
    """
    fields = read_fields(body, _TOKENIZE)
    _check_model(fields, served)
    given = fields["add_special_tokens"]
    ids = reader.encode(fields["prompt"], add_special_tokens=reader.special.added if given is None else given)
    return {"tokens": ids, "count": len(ids), "max_model_len": length}


def _check_model(fields: Mapping[str, Any], served: str) -> None:
    """Raise where another model is named; harnesses name none here."""
    if fields["model"] is not None:
        check_model(fields["model"], served)


def detokenize(body: Mapping[str, Any], reader: PromptReader, *, served: str) -> dict[str, Any]:
    """The text of ids.

    Args:
        body: from `parse_body`.
        reader: has the tokenizer.
        served: name of the model.
    """
    fields = read_fields(body, _DETOKENIZE)
    _check_model(fields, served)
    ids = fields["tokens"]
    outside = next((one for one in ids if not 0 <= one < reader.vocab_size), None)
    if outside is not None:
        raise RefusedError(
            400,
            f"tokens holds {shown(outside)}, which is no token id; use 0 to {reader.vocab_size - 1}",
            param="tokens",
        )
    return {"prompt": reader.tokenizer.decode(ids)}


def tokenizer_info(reader: PromptReader) -> dict[str, Any]:
    """The special tokens and the chat template."""
    end = reader.tokenizer.end_of_text
    named: dict[str, Any] = {"bos_token": None, "eos_token": None, "pad_token": None, "unk_token": None}
    if end is not None:
        named["eos_token"] = reader.tokenizer.decode([end])
    chat = reader.chat
    for known in (reader.special.named, {} if chat is None else chat.tokens):
        named |= {name: token for name, token in known.items() if name in named}
    return {
        "tokenizer_class": "jaxtrain",
        **named,
        "vocab_size": reader.vocab_size,
        "chat_template": None if chat is None else chat.source,
    }
