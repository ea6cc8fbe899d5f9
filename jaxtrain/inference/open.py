"""Opening a model with its weights: a run, a published folder or GGUF file, an adapter. Parts are read when first used.

Serve, sample, predict, eval, the harness and the export of programs open theirs here.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxtrain.checkpoint.directory import list_steps
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.config import Config, Loaded, load_config
from jaxtrain.config.files import is_run, read_run, recorded_parts
from jaxtrain.config.fits import check_fits, fresh_parts
from jaxtrain.config.model import published_from
from jaxtrain.config.published import published_family, published_settings, settings_in, settings_of
from jaxtrain.data import Batches, Data, Tokenizer, open_data
from jaxtrain.data.chat.templates import ChatFormat, files_beside, format_of_reading
from jaxtrain.data.sources.given import rows_of
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.families.bert import read_sentence_head
from jaxtrain.formats.hub import is_published, published_place, read_published_config, tokenizer_origin
from jaxtrain.formats.peft_reading import CONFIG, is_adapter_folder, open_adapter_folder
from jaxtrain.formats.rows import Entry
from jaxtrain.inference.predict import OpenedModel, check_read_alike, embeds, tokenizer_of
from jaxtrain.inference.prompts import Served, SpecialTokens
from jaxtrain.inference.published import published_classes, read_texts, read_tokenizer, texts_beside, tokenizer_file
from jaxtrain.metrics.evaluation import TO_HOLD_OUT, Evaluator, dividing_batch, evaluate_batches, held_out_batches
from jaxtrain.metrics.format import format_bytes
from jaxtrain.metrics.history import draw_history, last_evaluation, read_history
from jaxtrain.metrics.runinfo import run_text
from jaxtrain.models.adapters import quantize, quantized_bytes
from jaxtrain.models.model import Model, parameter_shapes
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Task
from jaxtrain.models.tasks import build_task
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.build import build_sharded_model, with_output_scale
from jaxtrain.train.state import EvaluationState
from jaxtrain.weights.load import load_weights
from jaxtrain.weights.restore import restore_for_evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Keys of a config that were for the hardware of the run, or for a published folder that may be gone.
_NOT_KEPT = {"model": ("attention", "from"), "loss": ("logits", "block")}


def open_run(
    run_dir: str | Path,
    *,
    step: int | None = None,
    model: Model | None = None,
    task: Task | None = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    mesh: Mesh | None = None,
    quantize: str | None = None,
    report: Callable[[str], None] = print_remark,
) -> "OpenedRun":
    """Open a run to predict, evaluate, sample and plot; each part is read when it is first used.

    Args:
        run_dir: directory of the run, which may still be training.
        step: which checkpoint; None: the newest intact one.
        model: of a run whose model came from Python: the same model again.
        task: of a run whose task came from Python, which `evaluate` needs.
        overrides: settings on top of the run's config, as `key=value` strings or as a mapping ({"parallel.fsdp": 4}).
        mesh: from `make_mesh`; None: all devices on the `data` axis, unless overrides say otherwise.
        quantize: a format of `quantize` for the linear layers ("int8"); None: as they were trained.
        report: receives one line for each damaged checkpoint that is passed over, and the like.

    Raises:
        ConfigError: not a run, or a wrong override.

    Example:
        >>> result = jt.fit(
        ...     model, jt.classification(), optax.adamw(1e-3), data=rows, steps=4, batch_size=8, run_dir="runs/opened"
        ... )
        done: step 4
        report: runs/opened/report.html
        >>> run = jt.open_run("runs/opened", model=model)
        >>> run.predict(np.ones((8, 4), np.float32)).shape
        (8, 3)
    """
    overrides = overrides if isinstance(overrides, Mapping) else list(overrides)
    return OpenedRun(
        path=Path(run_dir),
        config=saved_config(run_dir, overrides=overrides).config,
        _wanted_step=step,
        _own_model=model,
        _own_task=task,
        _mesh=mesh,
        _quantize=quantize,
        _has_other_data=any(key.partition(".")[0] == "data" for key in _keys(overrides)),
        _report=report,
    )


def saved_config(run_dir: str | Path, *, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Loaded:
    """The config of a run for this machine: `data` takes all devices, and text the tokenizer of the run."""
    info, changed = read_run(run_dir), _keys(overrides)
    saved = dict(info["config"])
    for group, keys in _NOT_KEPT.items():
        if isinstance(saved.get(group), dict):
            saved[group] = {key: value for key, value in saved[group].items() if key not in keys}
    parallel, data = saved.get("parallel") or {}, dict(saved.get("data") or {})
    saved["parallel"] = {key: parallel[key] for key in {"max_replicated_fraction"} & set(parallel)}
    held_out = data.get("validation_path")
    if held_out is not None and "data.path" in changed and "data.validation_path" not in changed:
        raise ConfigError(f"the run evaluates data.validation_path={held_out}; give that key in place of data.path")
    if "tokenizer" in data and not any(key.startswith("data.tokenizer") for key in changed):
        with contextlib.suppress(DataError):  # who needs the tokenizer hears of it
            if (file := tokenizer_file(Path(run_dir), info)) is not None:
                saved["data"] = {**data, "tokenizer": {**(data["tokenizer"] or {}), "kind": "file", "path": str(file)}}
    given: dict[str, Any] = {"keywords" if isinstance(overrides, Mapping) else "overrides": overrides}
    return load_config(saved, **given, origin="run.json")


def _check_evaluable(record: Mapping[str, Any], run_dir: Path, part: str) -> None:
    """Raise where a part would be taken from the config that came from Python in the run."""
    name = recorded_parts(record)[part]
    if name is not None:
        how = "evaluate(data), or give other data with data.kind=... data.path=..."
        how = f"jt.open_run({str(run_dir)!r}).{how}" if part == "data" else f"jt.open_run({str(run_dir)!r}, {part}=...)"
        raise ConfigError(
            f"{run_dir} was trained with {part} ({name}) from Python, which its config does not describe: write {how}"
        )


def _keys(overrides: Iterable[str] | Mapping[str, Any]) -> list[str]:
    """The dotted keys that overrides set."""
    if not isinstance(overrides, Mapping):
        return [word.removeprefix("--").partition("=")[0] for word in overrides]
    below = {key: _keys(value) if isinstance(value, Mapping) and value else [""] for key, value in overrides.items()}
    return [f"{key}.{name}".rstrip(".") for key, names in below.items() for name in names]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class OpenedRun(OpenedModel):
    """A run, opened by `open_run`: its directory, and its config with the parallel degrees of this machine."""

    path: Path
    config: Config
    _wanted_step: int | None
    _own_model: Model | None
    _own_task: Task | None
    _mesh: Mesh | None
    _quantize: str | None
    _has_other_data: bool
    _report: Callable[[str], None]

    def __fspath__(self) -> str:
        """The path of the run, or of the one step of it that was asked for."""
        return str(self.path if self._wanted_step is None else checkpoint_folder(self.path) / str(self._wanted_step))

    def __repr__(self) -> str:
        steps = ", ".join(map(str, self.checkpoints[-5:])) or "none"
        return f"Run {run_text(self.path)}\n  checkpoints: {steps}"

    @property
    def info(self) -> dict[str, Any]:
        """The content of `run.json` as it is: what ran, on what, with which result."""
        return read_run(self.path)

    @property
    def _trained_on(self) -> Mapping[str, Any]:
        return self.info.get("data") or {}

    @property
    def status(self) -> str:
        """How the run ended: done, preempted, diverged, stopped or failed; `running` while it trains."""
        return str(self.info.get("status"))

    @property
    def history(self) -> dict[str, np.ndarray]:
        """Columns of one length: `step`, int64 [N] ascending, then each metric, float64 [N], NaN where it is not."""
        return read_history(self.path / "metrics.jsonl")

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last evaluation, NaN where not finite, with its `step`; empty where there was none."""
        return last_evaluation(self.path / "metrics.jsonl")

    def plot(self, *names: str) -> "Figure":
        """A matplotlib figure of the run's metrics over steps, training and evaluation in one picture.

        Args:
            names: metrics such as "loss" or "accuracy", which "eval_loss" is drawn with; none: those of the task.

        Raises:
            ConfigError: the run did not log such a metric.
        """
        return draw_history(self.history, names, title=self.path.name)

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the saved checkpoints, in ascending order."""
        return list_steps(checkpoint_folder(self.path))

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of the outputs; None where the run's data did not name any."""
        names = (self._trained_on.get("reading") or {}).get("classes")
        return None if names is None else tuple(names)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """What made the run's tokens; None where the run has none."""
        return read_tokenizer(self.path, self.info)

    @functools.cached_property
    def _texts(self) -> tuple[ChatFormat | None, SpecialTokens]:
        own, files = format_of_reading(self._trained_on.get("reading")), files_beside(self.path / "tokenizer.json")
        # Rows of plain text have no beginning of text, so that a model that was trained on them gets none either.
        added = own is not None or self.status == "imported"
        chat, special = read_texts(files, self.tokenizer, where=str(self.path), added=added)
        return own or chat, special

    @functools.cached_property
    def data(self) -> Data:
        """The run's data, its values turned into numbers as in training; a ConfigError where it came from Python."""
        if not self._has_other_data:
            _check_evaluable(self.info, self.path, "data")
        config, group = self.config, self.config.data
        held_out_alone = getattr(group, "validation_fraction", None) == 1  # nothing is trained on here
        if held_out_alone:
            plain = {"validation_fraction": 0.0} | ({"augment": False} if hasattr(group, "augment") else {})
            group = group.model_copy(update=plain)
        length = getattr(config.model, "max_sequence_length", None)
        task, reading = config.task if isinstance(config.task, str) else None, self._trained_on.get("reading")
        data = open_data(group, sequence_length=length, seed=config.seed, task=task, reading=reading)
        is_all = held_out_alone and data.validation is None
        return dataclasses.replace(data, validation=data.train) if is_all else data

    @functools.cached_property
    def sharded_model(self) -> ShardedModel:
        """The run's model on this machine's mesh; a ConfigError where it came from Python and was not given."""
        if self._own_model is None:
            _check_evaluable(self.info, self.path, "model")
        distributed.start(compilation_cache=self.config.compilation_cache)
        config, sizes, saved = self.config, dict[str, Any](input_shape=()), self._trained_on
        if self._own_model is None:
            config = with_output_scale(config, saved.get("reading"), task=self.info.get("task"))
            sizes |= {name: saved.get(name) for name in ("vocab_size", "num_outputs")}
            sizes["input_shape"] = tuple(saved["input_shape"])
        return build_sharded_model(config, **sizes, model=self._own_model, task=self._own_task, mesh=self._mesh)

    @functools.cached_property
    def state(self) -> EvaluationState:
        """What an `Evaluator` reads."""
        model, base = self.sharded_model, published_from(self.config.model)
        found = restore_for_evaluation(self.path, model, step=self._wanted_step, report=self._report, moved_to=base)
        params = quantized(found.evaluation_params, model, self._quantize, report=self._report)
        return dataclasses.replace(found, evaluation_params=params)

    @functools.cached_property
    def task(self) -> Task:
        """What outputs are compared with; a ConfigError where it came from Python and was not given."""
        if self._own_task is None:
            _check_evaluable(self.info, self.path, "task")
        return self._own_task or build_task(self.config)

    @property
    def _batch_axes(self) -> Mapping[str, Any]:
        return (self._own_task or build_task(self.config)).batch_axes

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Computes the metrics of the run's task: `run.evaluator(run.state, batches)`."""
        config = self.config
        return Evaluator(
            self.sharded_model, self.task, parallelism=config.parallel, compiler_options=config.compiler_options
        )

    def evaluate(self, data: Any = None) -> dict[str, Any]:
        """The metrics of the run's task: `eval_loss` and the others as `eval_*`.

        Args:
            data: a `Data`, whose held-out rows are used, or rows in another form of `fit`, such as a dict of arrays, of
                which all count. None: the run's held-out rows, as many as `evaluation.max_batches` says.

        Raises:
            ConfigError: a part from Python was not given, or it does not fit the data.
            DataError: the data is not there, or has no held-out rows.
        """
        batches, evaluator = self.held_out(data), self.evaluator
        evaluator.feed.shardings(batches.spec())  # a mistake in the data is found before a checkpoint is read
        return evaluate_batches(evaluator, self.state, batches)

    def held_out(self, data: Any = None) -> Batches:
        """The rows that `evaluate` takes, in batches that divide by the mesh."""
        given: Any = self.data if data is None else data
        check_read_alike(given, self._trained_on)
        if isinstance(given, Data):
            if given.validation is None:
                raise DataError(f"the data of the run has no held-out rows; {TO_HOLD_OUT}")
            rows = given.validation
        elif isinstance(given, grain.MapDataset):
            rows = given
        elif "mean" in (self._trained_on.get("reading") or {}):
            raise DataError("a run on a table is evaluated on jaxtrain.open_data({...}, reading=...), not on arrays")
        else:
            rows = rows_of(given)
        size = dividing_batch(self.config, self.sharded_model, self.task)
        limit = self.config.evaluation.max_batches if data is None else None
        return held_out_batches(self.config, rows, size=size, max_batches=limit)


def quantized(params: Any, sharded_model: ShardedModel, format: str | None, *, report: Callable[[str], None]) -> Any:
    """The parameters with the kernels of linear layers in a format, on their devices; None: as they are."""
    if format is None:
        return params
    small = jax.jit(lambda params: quantize(params, sharded_model.model, format))(params)
    compute = jnp.dtype(sharded_model.policy.compute_dtype)
    after, before = map(format_bytes, quantized_bytes(small, compute))
    report(f"{format}: linear layers of {after} instead of {before} in {compute.name}")
    return small


@dataclasses.dataclass(kw_only=True, eq=False)
class OpenedFolder(OpenedModel):
    """A published model, opened by `open_model`."""

    path: Path
    config: Config
    sharded_model: ShardedModel
    tokenizer: Tokenizer | None
    _texts: tuple[ChatFormat | None, SpecialTokens]
    _adapter: str | Path | None
    _quantize: str | None
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _batch_axes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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
        weights = load_weights(model, path, skip=fresh, adapter=self._adapter)
        if weights.params is None or jax.tree.structure(weights.params) != jax.tree.structure(model.abstract_params):
            raise ConfigError(f"{path} has no weights for the requested head; leave model.head out")
        params = quantized(weights.params, model, self._quantize, report=print_remark)
        return EvaluationState(params, weights.model_state or {})


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
    """Open a run, a published folder or file, or an adapter whose base is here; weights are read when they are needed.

    `adapter` is a folder over the published folder `path`, `quantize` the format of linear layers ("int8", "nf4"), and
    `overrides` are settings as on the command line. A published model computes in bf16_pure on an accelerator unless
    precision.policy is set.
    """
    path, words = Path(published_place(path, what="run or model")).expanduser(), list(overrides)
    is_adapter = not is_run(path) and is_adapter_folder(path)
    if is_run(path) or not (is_adapter or is_published(path)):
        if adapter is not None:
            raise ConfigError(f"--adapter is for published folders; write jaxtrain import {adapter} --base FOLDER")
        return open_run(path, step=step, overrides=words, mesh=mesh, quantize=quantize, report=report)
    if step is not None:
        raise ConfigError(f"--step {step} is for runs, which {path} is not; leave it out")
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
        raise ConfigError(f"{adapter / CONFIG} names the base {named}, which does not exist; put it there")
    return base


def open_served(path: str | Path, *, name: str | None = None, **how: Any) -> Served:
    """A model for the server, by `open_model`; `name` is what clients call it, None: the last part of the path."""
    model = open_model(path, **how)
    sharded, decoder = model.sharded_model, model.sharded_model.model.decoder
    if embeds(model) or decoder is None or decoder.encode is not None:
        raise ConfigError(
            f"{path} cannot be served: it does not give the next token of a text; use jaxtrain sample for an "
            "encoder-decoder, and jaxtrain predict for classes and embeddings"
        )
    return Served(
        name=name or Path(str(path).partition("@")[0]).resolve().name.removesuffix(".gguf"),
        sharded_model=sharded,
        tokenizer=tokenizer_of(model),
        params=model.params,
        model_state=model.model_state,
        chat=model.chat,
        created=int(time.time()),
        special=model.special,
        step=model.step,
    )
