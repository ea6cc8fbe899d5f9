"""A model that is asked, opened from a run, a published folder or GGUF file, or an adapter; and what it writes."""

import fnmatch
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxtrain.config.files import is_run
from jaxtrain.config.load import load_config
from jaxtrain.config.published import published_family, published_settings, settings_in, settings_of
from jaxtrain.config.schema import Config
from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.formats import published_format
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, load_tokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.chat import answer_ends, encode_questions
from jaxtrain.inference.continued import continue_texts, default_new_tokens
from jaxtrain.inference.decoding import decoder_of
from jaxtrain.inference.prompts import encode_prompts, special_tokens
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.server.served import Served
from jaxtrain.inference.written import Written, write_texts
from jaxtrain.interop.families.bert import read_sentence_head
from jaxtrain.interop.formats.entries import Entry
from jaxtrain.interop.formats.hub import is_published, published_place, tokenizer_origin
from jaxtrain.interop.formats.peft_reading import CONFIG, is_adapter_folder, open_adapter_folder
from jaxtrain.interop.settings import check_fits, fresh_parts
from jaxtrain.models.model import parameter_shapes
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.run.open_run import OpenedRun, open_run
from jaxtrain.run.restore import quantized_params
from jaxtrain.run.texts import format_of_run, special_of_folder, special_of_run, texts_beside
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.assemble import build_sharded_model
from jaxtrain.train.start import accept_start

if TYPE_CHECKING:
    from jax.sharding import Mesh

# Tokens of an answer where nobody says how many.
_ANSWER_TOKENS = 200


def open_served(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    quantize: str | None = None,
    step: int | None = None,
    mesh: "Mesh | None" = None,
    overrides: Iterable[str] = (),
    name: str | None = None,
    encoder_decoders: bool = False,
) -> Served:
    """Opens a model to be asked, with its parameters on their mesh; no train step and no optimizer is built.

    Args:
        path: directory of a run, published folder, GGUF file, or folder of an adapter that names a base which is here.
        adapter: folder of an adapter, as PEFT or `jaxtrain export` writes it, over the published folder `path`.
        quantize: number format of linear layers, "int8" or "nf4"; None: as they are.
        step: of a run: which checkpoint; None: the newest intact one.
        mesh: from `make_mesh`; None: all devices on the `data` axis, unless overrides say otherwise.
        overrides: settings as on the command line ("parallel.tensor=8", "model.head.kind=embedding"). A published model
            computes in bf16_pure on an accelerator unless precision.policy is set.
        name: what clients call the model; None: the last part of the path.
        encoder_decoders: whether a model that reads its prompt with an encoder is opened too, which the server cannot
            batch.

    Raises:
        ConfigError: there is nothing to serve at the path, it has no tokenizer, or an argument does not fit it.
        CheckpointError: its files are missing or damaged.
    """
    name = name or Path(str(path).partition("@")[0]).resolve().name.removesuffix(".gguf")
    path, words = Path(published_place(path, what="run or published folder")), list(overrides)
    if is_run(path):
        if adapter is not None:
            raise ConfigError(f"--adapter is for published folders; write jaxtrain import {adapter} --base FOLDER")
        run = open_run(path, step=step, overrides=words, mesh=mesh, quantize=quantize)
        return _served_run(run, name, encoder_decoders=encoder_decoders)
    if step is not None:
        raise ConfigError(f"--step {step} is for runs, and {path} is none; leave it out")
    if is_adapter_folder(path):
        path, adapter = _base_of(path), path
    if not is_published(path):
        there = "holds neither run.json nor config.json" if path.is_dir() else "is no run and no published folder"
        raise ConfigError(
            f"{path} {there}; give runs/<name>, a folder with config.json and safetensors, or a GGUF file"
        )
    distributed.start()
    config = _folder_config(path, words, adapter)
    check_fits(config.model)
    file, length = tokenizer_origin(path), settings_of(config.model).get("max_sequence_length")
    if length is None or file is None:
        raise ConfigError(
            f"{path} is no model of texts, or has no tokenizer.json; serve one that reads and writes texts"
        )
    model = build_sharded_model(config, input_shape=(length,), mesh=mesh)
    tokenizer = _asked(model, config, load_tokenizer(file), path, encoder_decoders=encoder_decoders)
    return Served(
        name,
        model,
        *_folder_weights(path, config, model, adapter=adapter, quantize=quantize),
        tokenizer,
        published_format(texts_beside(file, adapter), str(adapter or path), tokenizer),
        _embeds(config),
        int(time.time()),
        length,
        special_of_folder(file, tokenizer, adapter=adapter),
    )


def _served_run(run: OpenedRun, name: str, *, encoder_decoders: bool) -> Served:
    model = run.sharded_model
    tokenizer = _asked(model, run.config, run.tokenizer, run.run_dir, encoder_decoders=encoder_decoders)
    where = run.info, run.run_dir, tokenizer
    return Served(
        name,
        model,
        run.params,
        run.model_state,
        tokenizer,
        format_of_run(*where),
        _embeds(run.config),
        int(time.time()),
        getattr(run.config.model, "max_sequence_length", None),
        special_of_run(*where),
        run.step,
    )


def _folder_config(path: Path, words: list[str], adapter: str | Path | None) -> Config:
    tree: dict[str, Any] = {"model": {"from": str(path)}, "optimizer": {"kind": "sgd", "momentum": 0.0}}
    if not any(word.startswith("model.head") for word in words):
        head = read_sentence_head(path, published_settings(str(path)))
        tree["model"] |= {} if head is None else {"head": head}
    if adapter is not None:
        tree["finetune"] = {"adapter": str(adapter)}
    if jax.default_backend() != "cpu":
        words = ["precision.policy=bf16_pure", *words]
    return load_config(tree, overrides=words, origin="serve").config


def _folder_weights(
    path: Path, config: Config, model: ShardedModel, *, adapter: str | Path | None, quantize: str | None
) -> tuple[Any, Any]:
    """Parameters and model state of a published model."""
    # With another head than the published one, that head is not read; an embedding need not have parameters.
    settings = settings_in(str(path), published_settings(str(path)))
    theirs = [row.path for row in published_family(str(path)).tensors(settings) if isinstance(row, Entry)]
    known = [*theirs, *parameter_shapes(model.model)]
    fresh = [one for one in fresh_parts(config.model) if any(fnmatch.fnmatchcase(path, one) for path in known)]
    over = None if adapter is None else str(adapter)
    start = accept_start(str(path), None, fresh, sharded_model=model, trains=lambda path: False, adapter=over)
    params = start.params
    if params is None or jax.tree.structure(params) != jax.tree.structure(model.abstract_params):
        raise ConfigError(f"{path} has no weights for the head that is asked for; leave model.head out")
    if quantize is not None:
        params, remark = quantized_params(params, model, quantize)
        print_remark(remark)
    return params, start.model_state or {}


def _base_of(adapter: Path) -> Path:
    """The base that an adapter names, where it is a folder that is here."""
    named = open_adapter_folder(adapter).config.base
    base = None if named is None else Path(published_place(Path(named).expanduser(), what=f"the base of {adapter}"))
    if base is None or not is_published(base):
        raise ConfigError(
            f"{adapter / CONFIG} names the base {named}, which is no folder here; write jaxtrain serve BASE --adapter "
            f"{adapter}"
        )
    return base


def _embeds(config: Config) -> bool:
    head = getattr(config.model, "head", None)
    return head is not None and head.kind == "embedding"


def _asked(
    model: ShardedModel, config: Config, tokenizer: Tokenizer | None, path: Path, *, encoder_decoders: bool
) -> BpeTokenizer | ByteTokenizer:
    """The tokenizer of a model that can be asked, before its parameters are read."""
    decoder = model.model.decoder
    if decoder is None and not _embeds(config):
        raise ConfigError(
            f"{path} gives neither text nor embeddings; serve a language model, or an encoder with "
            "model.head.kind=embedding model.head.pooling=mean"
        )
    if decoder is not None and decoder.encode is not None and not encoder_decoders:
        raise ConfigError(f"{path} reads its prompt with an encoder, which cannot be batched; use jaxtrain sample")
    if not isinstance(tokenizer, BpeTokenizer | ByteTokenizer):
        raise ConfigError(f"{path} has no tokenizer.json, so that nobody can ask it; put the model's own there")
    return tokenizer


def open_writer(
    path: str | Path,
    *,
    answers: bool = False,
    quantize: str | None = None,
    step: int | None = None,
    overrides: Iterable[str] = (),
) -> Served:
    """What writes texts: `open_served` of a model that does, and with `answers` has a chat template."""
    served = open_served(path, quantize=quantize, step=step, overrides=overrides, encoder_decoders=True)
    if served.embeds:
        raise ConfigError(f"{path} gives embeddings and no text; use jaxtrain predict or jaxtrain serve")
    if answers and served.chat is None:
        raise ConfigError(f"{path} has no chat template; leave --chat out, and ask in plain text")
    return served


@dataclass(frozen=True)
class Writing:
    """How texts are written.

    `piece` tokens are between two looks (None: all), `top` alternatives get log-probabilities (None: there are none),
    and with `beams` that many beginnings are followed for the most likely text, in place of random choices.
    """

    new_tokens: int | None
    sampling: Sampling
    seed: int = 0
    stop: Sequence[str] = ()
    skip_special_tokens: bool = True
    top: int | None = None
    piece: int | None = 1
    beams: int | None = None


def write(writer: Served, texts: Sequence[str], writing: Writing, *, answers: bool = False) -> Iterator[Written]:
    """Continue texts in one batch, each given out before its continuation, or answer them by the chat template."""
    model, params, tokenizer, special = writer.sharded_model, writer.params, writer.tokenizer, writer.special
    sampling, seed, stop, new_tokens = writing.sampling, writing.seed, writing.stop, writing.new_tokens
    if writing.beams is not None:
        found = continue_texts(
            model,
            params,
            tokenizer,
            texts,
            new_tokens=new_tokens,
            sampling=sampling,
            seed=seed,
            stop=stop,
            beams=writing.beams,
            special=special,
            skip_special_tokens=writing.skip_special_tokens,
        )
        yield from (Written(row, text, ended=True) for row, text in enumerate(found))
        return
    if answers:
        assert writer.chat is not None
        tokens, room = encode_questions(model, tokenizer, writer.chat, texts)
        new_tokens = max(1, min(_ANSWER_TOKENS if new_tokens is None else new_tokens, room))
        ends, begins = answer_ends(writer.chat, tokenizer), [True] * len(texts)
    else:
        encoded = encode_prompts(model.model, tokenizer, texts, add_special_tokens=special.added)
        if new_tokens is None:
            new_tokens = default_new_tokens(decoder_of(model.model), encoded)
        tokens, begins = encoded.tokens, [not given for given in encoded.given]
        ends = {*special.stop, *(() if encoded.end is None else (encoded.end,))}
        for row, given in enumerate(encoded.given):
            if given:
                yield Written(row, tokenizer.decode(given))
    vocab_size, top = model.model.vocab_size, writing.top
    yield from write_texts(
        model,
        params,
        tokenizer,
        tokens,
        new_tokens=new_tokens,
        sampling=sampling,
        seed=seed,
        stop=stop,
        stop_tokens=ends,
        hidden=special_tokens(tokenizer) if writing.skip_special_tokens else (),
        begins=begins,
        top=top if top is None or vocab_size is None else min(top, vocab_size),
        piece=writing.piece,
    )
