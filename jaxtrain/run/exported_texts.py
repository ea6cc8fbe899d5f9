"""What the folder of a run says of its texts: the chat template and the special tokens that it was trained with."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtrain.config.data import LabelledTextData, TaggedTextData, TextPairData
from jaxtrain.config.schema import Config
from jaxtrain.data.chat.formats import (
    ChatFormat,
    files_beside,
    format_of_reading,
    published_format,
    published_tokens,
)
from jaxtrain.data.special import special_ids
from jaxtrain.data.text.frame import make_frame
from jaxtrain.data.text.frame_file import framed_file
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_tokenizer_text, tokenizer_sha256
from jaxtrain.errors import DataError
from jaxtrain.inference.prompts import encoder_prompts
from jaxtrain.interop.companions import GENERATION, SETTINGS, TEMPLATE, TEXT_FILES, Texts
from jaxtrain.interop.save import Origin
from jaxtrain.models.model import Model
from jaxtrain.published.json_text import parse_json

_END, _END_ID = "eos_token", "eos_token_id"
_AS_TRAINED = "written as the run was trained, not as its published model says: "
_NAMES_END = re.compile(rf"\b{_END}\b")


def exported_texts(
    info: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    origin: Origin | None,
    *,
    model: Model,
    config: Config | None = None,
) -> tuple[Texts, str | None]:
    """Finds what a run was trained to read and write, where its published model does not say the same.

    Args:
        info: The content of run.json.
        tokenizer: Of the run.
        origin: What the run kept of the published model that it started from, or None.
        model: Of the run.
        config: Of the run, which says how its rows are framed; None: they are not.

    Returns:
        What is written, and a line for people where it takes the place of what the published model says.

    Raises:
        DataError: A file of the published model is malformed.
    """
    if not isinstance(tokenizer, BpeTokenizer | ByteTokenizer):
        return Texts(), None
    form = format_of_reading((info.get("data") or {}).get("reading"))
    if form is not None:
        return _of_chats(form, tokenizer, origin)
    found, replaced = _of_documents(info, tokenizer, origin, model=model)
    if config is None or not isinstance(tokenizer, BpeTokenizer) or not _is_framed(config):
        return found, replaced
    return _with_frame(found, replaced, tokenizer, origin, config=config)


def _of_documents(
    info: Mapping[str, Any], tokenizer: BpeTokenizer | ByteTokenizer, origin: Origin | None, *, model: Model
) -> tuple[Texts, str | None]:
    if model.decoder is None:
        return Texts(), None
    if origin is not None and "tokenizer.json" in origin.files:
        return _of_chosen_end(info, tokenizer, origin)
    return _of_texts(tokenizer, {} if origin is None else origin.config, model=model), None


def texts_beside(file: Path, adapter: str | Path | None) -> dict[str, str]:
    """Returns the files that say how a published model chats: those of an adapter over it where it has a template.

    Args:
        file: The tokenizer.json or GGUF file of the model.
        adapter: Folder of the adapter, or None.

    Raises:
        DataError: A file is malformed.
    """
    base = files_beside(file)
    if adapter is None:
        return base
    own = files_beside(Path(adapter) / "tokenizer.json")
    if TEMPLATE not in own and not _parsed(own.get(SETTINGS)).get("chat_template"):
        return base
    return {name: text for name, text in base.items() if name != TEMPLATE} | own


def _is_framed(config: Config) -> bool:
    """Whether special tokens stand around the texts of the rows."""
    kinds = LabelledTextData | TaggedTextData | TextPairData
    return isinstance(config.data, kinds) or getattr(config.data, "corruption", None) is not None


def _with_frame(
    found: Texts, replaced: str | None, tokenizer: BpeTokenizer, origin: Origin | None, *, config: Config
) -> tuple[Texts, str | None]:
    """Adds the frame of the rows, which a tokenizer.json without a post-processor leaves to its readers."""
    texts = (*TEXT_FILES, "tokenizer.json")
    files = {} if origin is None else {name: _decoded(text) for name, text in origin.files.items() if name in texts}
    text = files.get("tokenizer.json")
    if text is not None and not _is_same(text, tokenizer):
        return found, replaced
    special = special_ids(tokenizer, getattr(config.data, "tokenizer", None))
    pair = bool(getattr(config.data, "second_text", None))
    framed = framed_file(tokenizer.to_json() if text is None else text, tokenizer, special, pair=pair)
    if framed is None and text is not None:
        return found, replaced
    ids = {entry for entry, _ in make_frame(tokenizer, special, pair=pair).entries}
    # An encoder-decoder has an end of text in place of [SEP], and no decoder hides tokens.
    is_encoder = not getattr(config.model, "causal", True)
    reads = config.model.kind == "encoder_decoder"
    named = {
        "cls_token": special.start if special.start in ids and not reads else None,
        "sep_token": special.end if special.end in ids and not reads else None,
        "mask_token": special.mask if is_encoder else None,
        "pad_token": special.padding,
    }
    known = published_tokens(files, tokenizer)[0] if files else {}
    tokens = {name: _name(tokenizer, i) for name, i in named.items() if i is not None and name not in known}
    tokens = {name: one for name, one in tokens.items() if one is not None}
    numbers = dict(found.ids)
    if origin is None and special.padding is not None and not is_encoder and not reads:
        # By it readers find the last token of each of several rows.
        numbers["pad_token_id"] = special.padding
    if framed is not None and text is not None:
        line = "the special tokens around a text (tokenizer.json)"
        replaced = f"{_AS_TRAINED}{line}" if replaced is None else f"{replaced} and {line}"
    return replace(found, tokens={**tokens, **found.tokens}, ids=numbers, tokenizer=framed), replaced


def _is_same(text: str, tokenizer: BpeTokenizer) -> bool:
    """Whether a tokenizer.json is that of the run."""
    try:
        return tokenizer_sha256(load_tokenizer_text(text, "the published model")) == tokenizer_sha256(tokenizer)
    except DataError:
        return False


def _of_chosen_end(
    info: Mapping[str, Any], tokenizer: BpeTokenizer | ByteTokenizer, origin: Origin
) -> tuple[Texts, str | None]:
    """What a run says that chose the end of its documents itself, where its published model ends texts otherwise."""
    data = (info.get("config") or {}).get("data") or {}
    name = (data.get("tokenizer") or {}).get("end")
    if not isinstance(name, str):
        return Texts(), None
    end = tokenizer.token_id(name)
    files = {file: _decoded(text) for file, text in origin.files.items() if file in TEXT_FILES}
    if end is None or end != tokenizer.end_of_text or end in _end_ids(files, origin.config):
        return Texts(), None
    replaced = f"{_AS_TRAINED}{name!a} as the end of a text"
    return Texts(tokens={_END: name}, ids={_END_ID: end}), replaced


def _of_texts(tokenizer: BpeTokenizer | ByteTokenizer, said: Mapping[str, Any], *, model: Model) -> Texts:
    """What a tokenizer says that came with no published model; ids in the config.json of a model stay."""
    assert model.decoder is not None
    reads = model.decoder.encode is not None
    end = encoder_prompts(tokenizer).end if reads else tokenizer.end_of_text
    ids = {"bos_token_id": None, _END_ID: end}
    if not reads:  # an encoder-decoder begins with its padding, which its family numbers
        ids["pad_token_id"] = special_ids(tokenizer, None).padding
    ids = {key: said.get(key, one) for key, one in ids.items()}
    tokens = {key.removesuffix("_id"): _name(tokenizer, one) for key, one in ids.items() if isinstance(one, int)}
    return Texts(tokens={name: text for name, text in tokens.items() if text is not None}, ids=ids)


def _of_chats(
    form: ChatFormat, tokenizer: BpeTokenizer | ByteTokenizer, origin: Origin | None
) -> tuple[Texts, str | None]:
    files = (
        {} if origin is None else {name: _decoded(text) for name, text in origin.files.items() if name in TEXT_FILES}
    )
    theirs = published_format(files, "the published model", tokenizer)
    named = published_tokens(files, tokenizer)[0] if files else {}
    tokens = dict(form.tokens)
    if tokenizer.token_id(tokens.get(_END, "")) not in form.stop and not _NAMES_END.search(form.source):
        # Readers of the folder stop at this token too, and the template does not need it for another one.
        first = _name(tokenizer, form.stop[0])
        tokens |= {} if first is None else {_END: first}
    tokens = {name: text for name, text in tokens.items() if named.get(name) != text}
    ids: dict[str, Any] = {} if origin is not None else {"bos_token_id": None, "pad_token_id": None}
    for name in ("bos_token", "pad_token"):
        if name in tokens:
            ids[f"{name}_id"] = tokenizer.token_id(tokens[name])
    # An answer of the run ends with a document, too.
    ends = list(dict.fromkeys([*form.stop, *(() if tokenizer.end_of_text is None else (tokenizer.end_of_text,))]))
    before = _end_ids(files, {} if origin is None else origin.config)
    if set(before) not in (set(form.stop), set(ends)):
        ids[_END_ID] = ends if len(ends) > 1 else ends[0]
    template = None if theirs is not None and theirs.source == form.source else form.source
    parts = []
    if theirs is not None and template is not None:
        parts.append(f"the chat template {form.label}")
    if before and _END_ID in ids:
        shown = " ".join(tokenizer.decode([one]) for one in form.stop)
        parts.append(f"{shown!a} as the end of an answer")
    replaced = None
    if parts:
        replaced = f"{_AS_TRAINED}{' and '.join(parts)}"
    return Texts(template, tokens, ids), replaced


def _end_ids(files: Mapping[str, str], config: Mapping[str, Any]) -> list[int]:
    """The ids at which other programs end the texts of a published model."""
    found = _parsed(files.get(GENERATION)).get(_END_ID, config.get(_END_ID))
    return [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, int)]


def _name(tokenizer: BpeTokenizer | ByteTokenizer, token: int) -> str | None:
    """The text by which files name a token; None: it has none of its own."""
    text = tokenizer.decode([token])
    return text if tokenizer.token_id(text) == token else None


def _decoded(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        found = {} if text is None else parse_json(text)
    except ValueError:
        return {}  # what reads the whole file says what is wrong with it
    return found if isinstance(found, dict) else {}
