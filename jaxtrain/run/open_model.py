"""The one way to open a model with its weights: a run, a published folder or GGUF file, an adapter.

Serve, sample, predict, the harness and the export of programs open theirs here.
"""

import fnmatch
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtrain.config.files import is_run
from jaxtrain.config.load import load_config
from jaxtrain.config.published import published_family, published_settings, settings_in, settings_of
from jaxtrain.config.schema import Config
from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.templates import ChatFormat
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.inference.prompts import Served, SpecialTokens
from jaxtrain.interop.families.bert import read_sentence_head
from jaxtrain.interop.formats.entries import Entry
from jaxtrain.interop.formats.hub import is_published, published_place, read_published_config, tokenizer_origin
from jaxtrain.interop.formats.peft_reading import CONFIG, is_adapter_folder, open_adapter_folder
from jaxtrain.interop.settings import check_fits, fresh_parts
from jaxtrain.models.model import parameter_shapes
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.run.open_run import open_run, quantized
from jaxtrain.run.predict import OpenedModel, embeds, tokenizer_of
from jaxtrain.run.published import published_classes, read_texts, texts_beside
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.assemble import build_sharded_model
from jaxtrain.train.start import accept_start
from jaxtrain.train.state import EvaluationState


@dataclass(kw_only=True, eq=False)
class OpenedFolder(OpenedModel):
    """A published model, opened by `open_model`."""

    path: Path
    config: Config
    sharded_model: ShardedModel
    tokenizer: Tokenizer | None
    _texts: tuple[ChatFormat | None, SpecialTokens]
    _adapter: str | Path | None
    _quantize: str | None
    info: Mapping[str, Any] = field(default_factory=dict)
    _batch_axes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes that its config.json gives."""
        return published_classes(read_published_config(self.path), str(self.path))

    @functools.cached_property
    def state(self) -> EvaluationState:
        """Its weights, on their mesh."""
        path, model = str(self.path), self.sharded_model
        # With another head than the published one, that head is not read; an embedding need not have parameters.
        settings = settings_in(path, published_settings(path))
        theirs = [row.path for row in published_family(path).tensors(settings) if isinstance(row, Entry)]
        known = [*theirs, *parameter_shapes(model.model)]
        fresh = [one for one in fresh_parts(self.config.model) if any(fnmatch.fnmatchcase(name, one) for name in known)]
        over = None if self._adapter is None else str(self._adapter)
        start = accept_start(path, None, fresh, sharded_model=model, trains=lambda name: False, adapter=over)
        if start.params is None or jax.tree.structure(start.params) != jax.tree.structure(model.abstract_params):
            raise ConfigError(f"{path} has no weights for the head that is asked for; leave model.head out")
        params = quantized(start.params, model, self._quantize, report=print_remark)
        return EvaluationState(params, start.model_state or {})


def open_model(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    quantize: str | None = None,
    step: int | None = None,
    mesh: Mesh | None = None,
    overrides: Iterable[str] = (),
    report: Callable[[str], None] = print_remark,
) -> OpenedModel:
    """Open a model to be asked; no train step and no optimizer is built, and weights are read when they are needed.

    Args:
        path: directory of a run, published folder, GGUF file, id on the hub, `package:NAME/FILE`, or folder of an
            adapter that names a base which is here.
        adapter: folder of an adapter, as PEFT or `jaxtrain export` writes it, over the published folder `path`.
        quantize: number format of linear layers, "int8" or "nf4"; None: as they are.
        step: of a run: which checkpoint; None: the newest intact one.
        mesh: from `make_mesh`; None: all devices on the `data` axis, unless overrides say otherwise.
        overrides: settings as on the command line ("parallel.tensor=8", "model.head.kind=embedding"). A published model
            computes in bf16_pure on an accelerator unless precision.policy is set.
        report: see `open_run`.

    Raises:
        ConfigError: there is no model at the path, or an argument does not fit it.
    """
    path, words = Path(published_place(path, what="run or model")).expanduser(), list(overrides)
    is_adapter = not is_run(path) and is_adapter_folder(path)
    if is_run(path) or not (is_adapter or is_published(path)):
        if adapter is not None:
            raise ConfigError(f"--adapter is for published folders; write jaxtrain import {adapter} --base FOLDER")
        return open_run(path, step=step, overrides=words, mesh=mesh, quantize=quantize, report=report)
    if step is not None:
        raise ConfigError(f"--step {step} is for runs, and {path} is none; leave it out")
    if is_adapter:
        path, adapter = _base_of(path), path
    distributed.start()
    config = _folder_config(path, words, adapter)
    check_fits(config.model)
    file, settings = tokenizer_origin(path), settings_of(config.model)
    size: int = settings.get("image_size") or 224
    shape = (size, size, 3) if "vocab_size" not in settings else (int(settings["max_sequence_length"]),)
    tokenizer = None if file is None else load_tokenizer(file)
    files = {} if file is None else texts_beside(file, adapter)
    return OpenedFolder(
        path=path,
        config=config,
        sharded_model=build_sharded_model(config, input_shape=shape, mesh=mesh),
        tokenizer=tokenizer,
        _texts=read_texts(files, tokenizer, where=str(adapter or path), added=True),
        _adapter=adapter,
        _quantize=quantize,
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
    return load_config(tree, overrides=words, origin="the command line").config


def _base_of(adapter: Path) -> Path:
    """The base that an adapter names, where it is here."""
    named = open_adapter_folder(adapter).config.base
    base = None if named is None else Path(published_place(Path(named).expanduser(), what=f"the base of {adapter}"))
    if base is None or not is_published(base):
        raise ConfigError(f"{adapter / CONFIG} names the base {named}, which is not here; put it there")
    return base


def open_served(path: str | Path, *, name: str | None = None, **how: Any) -> Served:
    """A model for the server, by `open_model`; `name` is what clients call it, None: the last part of the path."""
    model = open_model(path, **how)
    sharded, decoder = model.sharded_model, model.sharded_model.model.decoder
    if not embeds(model) and (decoder is None or decoder.encode is not None):
        raise ConfigError(
            f"{path} cannot be served: it gives neither embeddings nor the next token alone; sample an encoder-decoder "
            "with jaxtrain sample, or set model.head.kind=embedding model.head.pooling=mean for an encoder"
        )
    return Served(
        name=name or Path(str(path).partition("@")[0]).resolve().name.removesuffix(".gguf"),
        sharded_model=sharded,
        tokenizer=tokenizer_of(model),
        params=model.params,
        model_state=model.model_state,
        chat=model.chat,
        embeds=embeds(model),
        created=int(time.time()),
        max_length=getattr(model.config.model, "max_sequence_length", None),
        special=model.special,
        step=model.step,
    )
