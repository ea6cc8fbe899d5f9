"""What a run or a published model says of its texts, chat template and special tokens, and what an export says."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtrain.config.data import LabelledTextData, TaggedTextData, TextPairData
from jaxtrain.config.schema import Config
from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.formats import (
    ChatFormat,
    files_beside,
    format_of_reading,
    published_format,
    published_tokens,
)
from jaxtrain.data.special import NamedTokens, special_ids
from jaxtrain.data.text.frame import make_frame
from jaxtrain.data.text.frame_file import framed_file
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, load_tokenizer_text, tokenizer_sha256
from jaxtrain.inference.prompts import encoder_prompts
from jaxtrain.inference.special import SpecialTokens
from jaxtrain.interop.save import GENERATION, SETTINGS, TEMPLATE, TEXT_FILES, Origin, Texts
from jaxtrain.models.model import Model

_END, _END_ID = "eos_token", "eos_token_id"
_NAMES_END = re.compile(rf"\b{_END}\b")


def texts_beside(file: Path, adapter: str | Path | None) -> dict[str, str]:
    """The files that say how a published model chats: those of an adapter over it where that has a template."""
    base = files_beside(file)
    own = {} if adapter is None else files_beside(Path(adapter) / "tokenizer.json")
    if TEMPLATE not in own and not json.loads(own.get(SETTINGS, "{}")).get("chat_template"):
        return base
    return {name: text for name, text in base.items() if name != TEMPLATE} | own


def format_of_run(info: Mapping[str, Any], run_dir: Path, tokenizer: Tokenizer | None) -> ChatFormat | None:
    """The chat template of a run: the one that it was trained with, or that of its published model; None: neither."""
    found = format_of_reading((info.get("data") or {}).get("reading"))
    if found is None and isinstance(tokenizer, NamedTokens):
        found = published_format(files_beside(run_dir / "tokenizer.json"), str(run_dir), tokenizer)
    return found


def special_of_run(info: Mapping[str, Any], run_dir: Path, tokenizer: Tokenizer | None) -> SpecialTokens:
    """The special tokens of a run.

    Rows of plain text have no beginning of text, so that a model that was trained on them gets none either; an
    imported run is a published model, and a template writes that of chats.
    """
    is_chat = format_of_reading((info.get("data") or {}).get("reading")) is not None
    files = files_beside(run_dir / "tokenizer.json")
    return _special(files, tokenizer, added=is_chat or info.get("status") == "imported")


def special_of_folder(file: Path, tokenizer: Tokenizer, *, adapter: str | Path | None = None) -> SpecialTokens:
    """The special tokens of a published model with this tokenizer.json or GGUF file, or of an adapter over it."""
    return _special(texts_beside(file, adapter), tokenizer, added=True)


def _special(files: Mapping[str, str], tokenizer: Tokenizer | None, *, added: bool) -> SpecialTokens:
    if not files or not isinstance(tokenizer, NamedTokens):
        return SpecialTokens(added)
    named, stop = published_tokens(files, tokenizer)
    known = {name: text for name, text in named.items() if tokenizer.token_id(text) is not None}
    return SpecialTokens(added, stop, known)


def exported_texts(
    info: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    origin: Origin | None,
    *,
    model: Model,
    config: Config | None = None,
) -> Texts:
    """What a run was trained to read and write, where its published model (`origin`) does not say the same.

    `info` is the content of run.json; `config` says how rows are framed, None: they are not.
    """
    if not isinstance(tokenizer, BpeTokenizer | ByteTokenizer):
        return Texts()
    start = Origin({}, {}, {}) if origin is None else origin
    files = {
        name: text.decode(errors="replace") if isinstance(text, bytes) else text for name, text in start.files.items()
    }
    ends = json.loads(files.get(GENERATION, "{}")).get(_END_ID, start.config.get(_END_ID))
    ends = {one for one in (ends if isinstance(ends, list) else [ends]) if isinstance(one, int)}
    form = format_of_reading((info.get("data") or {}).get("reading"))
    if form is not None:
        return _of_chats(form, tokenizer, files, ends, is_new=origin is None)
    found = Texts()
    if model.decoder is not None and "tokenizer.json" in files:
        found = _of_chosen_end(info, tokenizer, ends)
    elif model.decoder is not None:
        found = _of_documents(tokenizer, start.config, reads=model.decoder.encode is not None)
    if config is None or not isinstance(tokenizer, BpeTokenizer) or not _is_framed(config):
        return found
    return _with_frame(found, tokenizer, files, config, is_new=origin is None)


def _of_chosen_end(info: Mapping[str, Any], tokenizer: BpeTokenizer | ByteTokenizer, ends: set[int]) -> Texts:
    """The end of its texts that a run chose itself over a published model."""
    data = (info.get("config") or {}).get("data") or {}
    name = (data.get("tokenizer") or {}).get("end") or ""
    end = tokenizer.token_id(name)
    if end is None or end != tokenizer.end_of_text or end in ends:
        return Texts()
    return Texts(tokens={_END: name}, ids={_END_ID: end})


def _of_documents(tokenizer: BpeTokenizer | ByteTokenizer, said: Mapping[str, Any], *, reads: bool) -> Texts:
    """Where texts end by a tokenizer that came with no published model."""
    ids = {"bos_token_id": None, _END_ID: encoder_prompts(tokenizer).end if reads else tokenizer.end_of_text}
    if not reads:  # an encoder-decoder begins with its padding, which its family numbers
        ids["pad_token_id"] = special_ids(tokenizer, None).padding
    ids = {key: said.get(key, one) for key, one in ids.items()}
    return Texts(tokens=_names(tokenizer, {key.removesuffix("_id"): one for key, one in ids.items()}), ids=ids)


def _of_chats(
    form: ChatFormat,
    tokenizer: BpeTokenizer | ByteTokenizer,
    files: Mapping[str, str],
    ends: set[int],
    *,
    is_new: bool,
) -> Texts:
    files = {name: text for name, text in files.items() if name in TEXT_FILES}
    theirs = published_format(files, "the published model", tokenizer)
    named = published_tokens(files, tokenizer)[0] if files else {}
    tokens = dict(form.tokens)
    if tokenizer.token_id(tokens.get(_END, "")) not in form.stop and not _NAMES_END.search(form.source):
        # Readers of the folder stop at this token too, and the template does not need it for another one.
        tokens |= _names(tokenizer, {_END: form.stop[0]})
    tokens = {name: text for name, text in tokens.items() if named.get(name) != text}
    ids: dict[str, Any] = {"bos_token_id": None, "pad_token_id": None} if is_new else {}
    ids |= {f"{name}_id": tokenizer.token_id(tokens[name]) for name in ("bos_token", "pad_token") if name in tokens}
    # An answer of the run ends with a document, too.
    own = list(dict.fromkeys([*form.stop, *(() if tokenizer.end_of_text is None else (tokenizer.end_of_text,))]))
    if ends not in (set(form.stop), set(own)):
        ids[_END_ID] = own if len(own) > 1 else own[0]
    return Texts(None if theirs is not None and theirs.source == form.source else form.source, tokens, ids)


def _is_framed(config: Config) -> bool:
    """Whether special tokens stand around the texts of the rows."""
    kinds = LabelledTextData | TaggedTextData | TextPairData
    return isinstance(config.data, kinds) or getattr(config.data, "corruption", None) is not None


def _with_frame(
    found: Texts, tokenizer: BpeTokenizer, files: Mapping[str, str], config: Config, *, is_new: bool
) -> Texts:
    """Adds the frame of the rows, which a tokenizer.json without a post-processor leaves to its readers."""
    text = files.get("tokenizer.json")
    if text is not None:
        theirs = load_tokenizer_text(text, "the published model")
        if tokenizer_sha256(theirs) != tokenizer_sha256(tokenizer):
            return found
    special = special_ids(tokenizer, getattr(config.data, "tokenizer", None))
    pair = bool(getattr(config.data, "second_text", None))
    framed = framed_file(tokenizer.to_json() if text is None else text, tokenizer, special, pair=pair)
    if framed is None and text is not None:
        return found
    ids = {entry for entry, _ in make_frame(tokenizer, special, pair=pair).entries}
    # An encoder-decoder has an end of text in place of [SEP], and no decoder hides tokens.
    is_encoder, reads = not getattr(config.model, "causal", True), config.model.kind == "encoder_decoder"
    named = {
        "cls_token": special.start if special.start in ids and not reads else None,
        "sep_token": special.end if special.end in ids and not reads else None,
        "mask_token": special.mask if is_encoder else None,
        "pad_token": special.padding,
    }
    texts = {name: text for name, text in files.items() if name in TEXT_FILES}
    known = published_tokens(texts, tokenizer)[0] if texts else {}
    tokens = {name: one for name, one in _names(tokenizer, named).items() if name not in known}
    numbers = dict(found.ids)
    if is_new and special.padding is not None and not is_encoder and not reads:
        numbers["pad_token_id"] = special.padding  # by it readers find the last token of each of several rows
    return replace(found, tokens={**tokens, **found.tokens}, ids=numbers, tokenizer=framed)


def _names(tokenizer: BpeTokenizer | ByteTokenizer, tokens: Mapping[str, Any]) -> dict[str, str]:
    """The texts by which files name tokens, of those that have one of their own."""
    texts = {name: tokenizer.decode([one]) for name, one in tokens.items() if isinstance(one, int)}
    return {name: text for name, text in texts.items() if tokenizer.token_id(text) == tokens[name]}
