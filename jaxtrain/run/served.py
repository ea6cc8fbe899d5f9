"""Opening what is asked: a run, a published folder or GGUF file, or an adapter with its base."""

import fnmatch
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.config.load import load_config
from jaxtrain.config.local_path import local_path
from jaxtrain.config.published import published_family, published_settings
from jaxtrain.config.saved_run import is_run
from jaxtrain.data.chat.formats import published_format
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_tokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.server.served import Served
from jaxtrain.interop.fresh import check_fits, fresh_parts
from jaxtrain.interop.settings import settings_in, settings_of
from jaxtrain.interop.weights import is_published
from jaxtrain.models.model import parameter_shapes
from jaxtrain.published.config_file import tokenizer_origin
from jaxtrain.published.entries import Entry
from jaxtrain.published.hub import published_place
from jaxtrain.published.peft import CONFIG, is_adapter_folder, open_adapter_folder
from jaxtrain.published.sentence_pooling import read_sentence_head
from jaxtrain.run.answers import format_of_run
from jaxtrain.run.exported_texts import texts_beside
from jaxtrain.run.open_run import open_run
from jaxtrain.run.special import special_of_folder, special_of_run
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxtrain.config.schema import Config
    from jaxtrain.models.sharded import ShardedModel

_POLICY = "precision.policy"


def open_served(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    quantize: str | None = None,
    policy: str | None = None,
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
        policy: number formats to compute in; None: those of the run; of a published model bf16_pure on an accelerator
            and fp32 on a CPU.
        step: of a run: which checkpoint; None: the newest intact one.
        mesh: from `make_mesh`; None: all devices on the `data` axis, unless overrides say otherwise.
        overrides: settings as on the command line ("parallel.tensor=8", "model.head.kind=embedding").
        name: what clients call the model; None: the last part of the path.
        encoder_decoders: whether a published model that reads its prompt with an encoder is opened too, which the
            server cannot batch.

    Raises:
        ConfigError: there is nothing to serve at the path, it has no tokenizer, or an argument does not fit it.
        CheckpointError: its files are missing or damaged.
    """
    name = name or Path(str(path).partition("@")[0]).resolve().name.removesuffix(".gguf")
    path = local_path(published_place(path, what="run or published folder"), what="run or published folder")
    words = [*([] if policy is None else [f"{_POLICY}={policy}"]), *overrides]
    if is_run(path):
        if adapter is not None:
            raise ConfigError(
                f"--adapter {adapter} goes over a published folder, and {path} is a run; make a run of both: jaxtrain "
                f"import {adapter} --base FOLDER -o RUN_DIR"
            )
        return _served_run(path, words, quantize=quantize, step=step, mesh=mesh, name=name)
    if step is not None:
        raise ConfigError(f"--step {step} is for runs, and {path} is none; leave it out")
    if is_adapter_folder(path):
        if adapter is not None:
            raise ConfigError(
                f"{path} is an adapter itself; write its base first: jaxtrain serve BASE --adapter {path}"
            )
        path, adapter = _base_of(path), path
    if not is_published(path):
        there = "holds neither run.json nor config.json" if path.is_dir() else "is no run and no published folder"
        raise ConfigError(
            f"{path} {there}; give runs/<name>, a folder with config.json and safetensors, or a GGUF file"
        )
    return _served_folder(
        path, words, adapter=adapter, quantize=quantize, mesh=mesh, name=name, encoder_decoders=encoder_decoders
    )


def _served_run(
    path: Path, words: list[str], *, quantize: str | None, step: int | None, mesh: "Mesh | None", name: str
) -> Served:
    run = open_run(path, step=step, overrides=words, mesh=mesh, quantize=quantize)
    tokenizer = _checked_tokenizer(run.tokenizer, path)
    model, chat = run.sharded_model, format_of_run(run)
    _check_says_something(model, run.config, path)
    longest = getattr(run.config.model, "max_sequence_length", None)
    return Served(
        name,
        model,
        run.params,
        run.model_state,
        tokenizer,
        chat,
        _embeds(run.config),
        int(time.time()),
        longest,
        special_of_run(run.info, run.run_dir, tokenizer),
    )


def _served_folder(
    path: Path,
    words: list[str],
    *,
    adapter: str | Path | None,
    quantize: str | None,
    mesh: "Mesh | None",
    name: str,
    encoder_decoders: bool,
) -> Served:
    tree: dict[str, Any] = {"model": {"from": str(path)}, "optimizer": {"kind": "sgd", "momentum": 0.0}}
    if not any(word.startswith("model.head") for word in words):
        head = read_sentence_head(path, published_settings(str(path)))
        tree["model"] |= {} if head is None else {"head": head}
    if adapter is not None:
        tree["finetune"] = {"adapter": str(adapter)}
    file = tokenizer_origin(path)
    tokenizer = _checked_tokenizer(None if file is None else load_tokenizer(file), path)
    assert file is not None
    chat = published_format(texts_beside(file, adapter), str(adapter or path), tokenizer)
    distributed.start()
    import jax

    if jax.default_backend() != "cpu" and not any(word.startswith(f"{_POLICY}=") for word in words):
        words = [f"{_POLICY}=bf16_pure", *words]
    config = load_config(tree, overrides=words, origin="serve").config
    check_fits(config.model)
    from jaxtrain.run.restored import quantized_params
    from jaxtrain.train.assemble import build_sharded_model
    from jaxtrain.train.start import accept_start

    settings = settings_of(config.model)
    length = settings.get("max_sequence_length")
    if length is None:
        raise ConfigError(f"{path} is no model of texts; serve one that reads and writes texts")
    model = build_sharded_model(config, input_shape=(length,), mesh=mesh)
    if not encoder_decoders or model.model.decoder is None:
        _check_says_something(model, config, path)
    start = accept_start(
        str(path),
        None,
        _left_out(path, config, model),
        sharded_model=model,
        trains=lambda path: False,
        adapter=None if adapter is None else str(adapter),
    )
    params = start.params
    if params is None or jax.tree.structure(params) != jax.tree.structure(model.abstract_params):
        raise ConfigError(
            f"{path} has no weights for the head that is asked for; leave model.head out, or train the head first"
        )
    if quantize is not None:
        params, remark = quantized_params(params, model, quantize)
        print_remark(remark)
    return Served(
        name,
        model,
        params,
        start.model_state or {},
        tokenizer,
        chat,
        _embeds(config),
        int(time.time()),
        length,
        special_of_folder(file, tokenizer, adapter=adapter),
    )


def _left_out(path: Path, config: "Config", model: "ShardedModel") -> list[str]:
    """Patterns of parameters that are not read, because another head is asked for than the published one."""
    family, settings = published_family(str(path)), settings_in(str(path), published_settings(str(path)))
    theirs = [row.path for row in family.tensors(settings) if isinstance(row, Entry)]
    known = [*theirs, *parameter_shapes(model.model)]
    # An embedding need not have parameters of its own.
    return [one for one in fresh_parts(config.model) if any(fnmatch.fnmatchcase(path, one) for path in known)]


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


def _checked_tokenizer(tokenizer: Tokenizer | None, path: Path) -> BpeTokenizer | ByteTokenizer:
    if not isinstance(tokenizer, BpeTokenizer | ByteTokenizer):
        raise ConfigError(f"{path} has no tokenizer.json, so that nobody can ask it; put the model's own there")
    return tokenizer


def _embeds(config: "Config") -> bool:
    head = getattr(config.model, "head", None)
    return head is not None and head.kind == "embedding"


def _check_says_something(model: "ShardedModel", config: "Config", path: Path) -> None:
    """Raises where a model gives neither text nor embeddings."""
    decoder = model.model.decoder
    if _embeds(config) or (decoder is not None and decoder.encode is None):
        return
    if decoder is not None:
        raise ConfigError(
            f"{path} reads its prompt with an encoder, which the server cannot batch; use jaxtrain sample"
        )
    raise ConfigError(
        f"{path} gives neither text nor embeddings; serve a language model, or an encoder with "
        "model.head.kind=embedding model.head.pooling=mean"
    )
