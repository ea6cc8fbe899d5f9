"""The one way to open a model with its weights: a run, a published folder or GGUF file, an adapter; and what it writes.

Serve, sample, predict, the harness and the export of programs open theirs here.
"""

import fnmatch
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grain
import jax

from jaxtrain.config.files import is_run
from jaxtrain.config.load import load_config
from jaxtrain.config.published import published_family, published_settings
from jaxtrain.config.schema import Config
from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.formats import ChatFormat, format_of_reading, published_format
from jaxtrain.data.special import NamedTokens
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, load_tokenizer
from jaxtrain.errors import ConfigError, UserError
from jaxtrain.inference.chat import answer_ends, answer_questions, encode_questions
from jaxtrain.inference.continued import continue_texts, default_new_tokens
from jaxtrain.inference.decoding import decoder_of
from jaxtrain.inference.generate import generate_text, room_for_new_tokens
from jaxtrain.inference.prompts import encode_prompts, special_tokens
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.server.served import Served
from jaxtrain.inference.special import SpecialTokens
from jaxtrain.inference.written import Written, write_texts
from jaxtrain.interop.fresh import check_fits, fresh_parts
from jaxtrain.interop.settings import settings_in, settings_of
from jaxtrain.interop.weights import is_published
from jaxtrain.models.model import ModelState, Params, parameter_shapes
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.published.config_file import read_published_config, tokenizer_origin
from jaxtrain.published.entries import Entry
from jaxtrain.published.hub import published_place
from jaxtrain.published.peft import CONFIG, is_adapter_folder, open_adapter_folder
from jaxtrain.published.sentence_pooling import read_sentence_head
from jaxtrain.run.open_run import OpenedRun, open_run
from jaxtrain.run.predict import Predictor
from jaxtrain.run.published import published_classes, special_of_files, texts_beside
from jaxtrain.run.restore import quantized_params
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.assemble import build_sharded_model
from jaxtrain.train.start import accept_start

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxtrain.metrics.progress import Progress
    from jaxtrain.train.assemble import Run
    from jaxtrain.train.state import TrainState

_ANSWER_TOKENS = 200  # where nobody says how many
_BATCH = 32


@dataclass(kw_only=True, eq=False)
class OpenedFolder:
    """A published model, opened by `open_model`: what an `OpenedRun` has of these names."""

    path: Path
    config: Config
    sharded_model: ShardedModel
    tokenizer: Tokenizer | None
    chat: ChatFormat | None
    special: SpecialTokens
    adapter: str | Path | None
    quantize: str | None
    step: None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def params(self) -> Params:
        """The parameters on their mesh, read when they are first asked for."""
        return self._weights[0]

    @property
    def model_state(self) -> ModelState:
        """What changes without a gradient."""
        return self._weights[1]

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes that its config.json gives."""
        return published_classes(read_published_config(self.path), str(self.path))

    def predict(self, rows: grain.MapDataset, *, batch_size: int | None = None) -> Any:
        """Outputs of rows with an index; see `OpenedRun.predict`."""
        predictor = Predictor(self.sharded_model, {})
        return predictor(self.params, self.model_state, rows, batch_size=batch_size or _BATCH)

    @functools.cached_property
    def _weights(self) -> tuple[Params, ModelState]:
        path, model = str(self.path), self.sharded_model
        # With another head than the published one, that head is not read; an embedding need not have parameters.
        settings = settings_in(path, published_settings(path))
        theirs = [row.path for row in published_family(path).tensors(settings) if isinstance(row, Entry)]
        known = [*theirs, *parameter_shapes(model.model)]
        fresh = [one for one in fresh_parts(self.config.model) if any(fnmatch.fnmatchcase(name, one) for name in known)]
        over = None if self.adapter is None else str(self.adapter)
        start = accept_start(path, None, fresh, sharded_model=model, trains=lambda name: False, adapter=over)
        params = start.params
        if params is None or jax.tree.structure(params) != jax.tree.structure(model.abstract_params):
            raise ConfigError(f"{path} has no weights for the head that is asked for; leave model.head out")
        if self.quantize is not None:
            params, remark = quantized_params(params, model, self.quantize)
            print_remark(remark)
        return params, start.model_state or {}


OpenedModel = OpenedRun | OpenedFolder


def open_model(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    quantize: str | None = None,
    step: int | None = None,
    mesh: "Mesh | None" = None,
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
    tokenizer, files = (None, {}) if file is None else (load_tokenizer(file), texts_beside(file, adapter))
    return OpenedFolder(
        path=path,
        config=config,
        sharded_model=build_sharded_model(config, input_shape=shape, mesh=mesh),
        tokenizer=tokenizer,
        chat=published_format(files, str(adapter or path), tokenizer) if isinstance(tokenizer, NamedTokens) else None,
        special=special_of_files(files, tokenizer, added=True),
        adapter=adapter,
        quantize=quantize,
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
    sharded, decoder, embeds = model.sharded_model, model.sharded_model.model.decoder, _embeds(model)
    if not embeds and (decoder is None or decoder.encode is not None):
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
        embeds=embeds,
        created=int(time.time()),
        max_length=getattr(model.config.model, "max_sequence_length", None),
        special=model.special,
        step=model.step,
    )


def writer_of(model: OpenedModel, *, answers: bool = False) -> OpenedModel:
    """The model, if it writes texts, and with `answers` has a chat template."""
    if _embeds(model) or model.sharded_model.model.decoder is None:
        name = model.sharded_model.model.name
        raise ConfigError(f"{os.fspath(model)} (model {name}) writes no text; use jaxtrain predict or jaxtrain serve")
    if answers and model.chat is None:
        raise ConfigError(f"{os.fspath(model)} has no chat template; leave --chat out, and ask in plain text")
    return model


def tokenizer_of(model: OpenedModel) -> BpeTokenizer | ByteTokenizer:
    """The tokenizer of a model that is asked in texts."""
    if not isinstance(model.tokenizer, BpeTokenizer | ByteTokenizer):
        raise ConfigError(f"{os.fspath(model)} has no tokenizer.json, so that nobody can ask it; put its own there")
    return model.tokenizer


def _embeds(model: OpenedModel) -> bool:
    head = getattr(model.config.model, "head", None)
    return head is not None and head.kind == "embedding"


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


def write(writer: OpenedModel, texts: Sequence[str], writing: Writing, *, answers: bool = False) -> Iterator[Written]:
    """Continue texts in one batch, each given out before its continuation, or answer them by the chat template."""
    tokenizer, model, params, special = tokenizer_of(writer), writer.sharded_model, writer.params, writer.special
    new_tokens, skip = writing.new_tokens, writing.skip_special_tokens
    chosen: dict[str, Any] = {"sampling": writing.sampling, "seed": writing.seed, "stop": writing.stop}
    if writing.beams is not None:
        chosen |= {"beams": writing.beams, "special": special, "skip_special_tokens": skip}
        found = continue_texts(model, params, tokenizer, texts, new_tokens=new_tokens, **chosen)
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
        stop_tokens=ends,
        hidden=special_tokens(tokenizer) if skip else (),
        begins=begins,
        top=top if top is None or vocab_size is None else min(top, vocab_size),
        piece=writing.piece,
        **chosen,
    )


def sample_text(run: "Run", state: "TrainState", progress: "Progress") -> str | None:
    """Continue or answer `evaluation.sample_prompt`; None where there is no prompt, no tokenizer or no text model."""
    settings, tokenizer = run.config.evaluation, run.data.tokenizer
    prompt, form = settings.sample_prompt, format_of_reading(run.data.reading)
    if prompt is None or tokenizer is None or run.step.model.decoder is None:
        return None
    options = {"sampling": Sampling(settings.sample_temperature), "seed": run.config.seed}
    new_tokens, model, params = settings.sample_tokens, run.step.sharded_model, state.evaluation_params
    try:
        with progress.phase("sampling"):
            if form is not None:
                answers = answer_questions(model, params, tokenizer, form, [prompt], new_tokens=new_tokens, **options)
                return f"{prompt}\n\n{answers[0]}"
            new_tokens = min(new_tokens, room_for_new_tokens(run.step.model.decoder, len(tokenizer.encode(prompt))))
            options["add_special_tokens"] = False  # rows of plain text have none
            return generate_text(run.step, params, tokenizer, [prompt], new_tokens=new_tokens, **options)[0]
    except UserError as error:  # the run is done: it is not lost over its sample
        progress.message(f"no sample: {error}")
        return None
