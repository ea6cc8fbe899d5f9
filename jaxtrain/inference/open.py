"""Opening a trained model: a run, a published folder or GGUF file, or an adapter. Parts are read when first used.

Predict, sample, serve, eval and export of the command line open theirs here.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.checkpoint.directory import list_steps
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.config import Config, Loaded, load_config
from jaxtrain.config.arguments import local_path
from jaxtrain.config.files import is_run, read_run, recorded_parts
from jaxtrain.config.fits import check_fits
from jaxtrain.config.model import published_from
from jaxtrain.config.published import published_settings
from jaxtrain.data import Data, Tokenizer, open_data
from jaxtrain.data.chat.templates import ChatFormat, files_beside, format_of_reading
from jaxtrain.errors import ConfigError
from jaxtrain.families.bert import read_sentence_head
from jaxtrain.formats.hub import is_published, published_place
from jaxtrain.formats.peft_reading import CONFIG, is_adapter_folder, open_adapter_folder
from jaxtrain.inference.opened import OpenedModel
from jaxtrain.inference.prompts import SpecialTokens
from jaxtrain.inference.published import TOKENIZER_FILE, kept_published, read_texts, read_tokenizer
from jaxtrain.metrics.history import draw_history, last_evaluation, read_history
from jaxtrain.metrics.runinfo import run_text
from jaxtrain.models.model import Model
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Task
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.build import build_sharded_model, with_output_scale
from jaxtrain.train.state import EvaluationState
from jaxtrain.weights.restore import restore_for_evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Keys of a config that were for the hardware of the run, or for a published folder that may be gone.
_NOT_KEPT = {"model": ("attention", "from"), "loss": ("logits", "block")}


def open_model(
    path: str | Path,
    *,
    step: int | None = None,
    model: Model | None = None,
    task: Task | None = None,
    adapter: str | Path | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    mesh: Mesh | None = None,
    quantize: str | None = None,
    report: Callable[[str], None] = print_remark,
) -> OpenedModel:
    """Open a trained model to predict, evaluate and write texts; its weights are read when they are first used.

    `predict(arrays)` and `predict_file(path)` give outputs, `evaluate(rows)` the metrics of a task, and
    `sample("text")` a continuation; `sample("question", chat=True)` answers by the chat template of the model.
    `params`, `sharded_model`, `tokenizer` and `classes` are its parts. A run is opened as by `open_run`.

    Args:
        path: a run; a published folder or GGUF file; OWNER/NAME[@REVISION] on the Hugging Face hub, which is
            downloaded unless it is in its cache; or an adapter (PEFT) whose base is on this machine.
        step: of a run, see `open_run`.
        model: of a run, see `open_run`.
        task: what `evaluate` compares outputs with; None: the task of the config.
        adapter: folder of an adapter over the published model at `path`.
        overrides: settings as `key=value` strings or as a mapping ({"parallel.fsdp": 4}). A published model computes
            in bf16_pure on an accelerator unless precision.policy is set.
        mesh: from `make_mesh`; None: all devices on the `data` axis, unless overrides say otherwise.
        quantize: a format of `quantize` for the linear layers ("int8", "nf4"); None: as they are stored.
        report: receives one line for each damaged checkpoint that is passed over, and the like.

    Returns:
        The opened model.

    Raises:
        ConfigError: there is no such model, an argument is for another kind of model, or an override is wrong.

    Example:
        >>> from jaxtrain.data.tokenizer import ByteTokenizer
        >>> params, _ = text_model.init(jax.random.key(0))
        >>> folder = jt.save_pretrained("tiny", params, model={**small, "vocab_size": 256})
        >>> ByteTokenizer().save(folder / "tokenizer.json")
        >>> model = jt.open_model("tiny")  # or jt.open_model("HuggingFaceTB/SmolLM2-135M-Instruct")
        >>> model.predict(np.zeros((2, 8), np.int32)).shape
        (2, 8, 256)
        >>> model.sample("To be", new_tokens=2, temperature=0).startswith("To be")
        True
    """
    path = local_path(published_place(path, what="run or model"), what="run or model").expanduser()
    is_adapter = not is_run(path) and is_adapter_folder(path)
    if is_run(path) or not (is_adapter or is_published(path)):
        if adapter is not None:
            raise ConfigError(f"--adapter is for published folders; write jaxtrain import {adapter} --base FOLDER")
        return open_run(
            path, step=step, model=model, task=task, overrides=overrides, mesh=mesh, quantize=quantize, report=report
        )
    if step is not None or model is not None:
        raise ConfigError(f"a step (--step) or a model from Python is for runs, which {path} is not; leave it out")
    if is_adapter:
        adapter = path
        path = _base_of(adapter)
    distributed.start()
    config = _published_config(path, overrides, adapter)
    check_fits(config.model)
    return OpenedModel(
        path=path,
        config=config,
        own_task=task,
        mesh=mesh,
        quantize=quantize,
        report=report,
        adapter=None if adapter is None else Path(adapter),
    )


def _published_config(path: Path, overrides: Sequence[str] | Mapping[str, Any], adapter: str | Path | None) -> Config:
    """The config of a published model that is not trained."""
    group: dict[str, Any] = {"from": str(path)}
    tree: dict[str, Any] = {"model": group, "optimizer": {"kind": "sgd", "momentum": 0.0}}
    if adapter is not None:
        tree["finetune"] = {"adapter": str(adapter)}
    if jax.default_backend() != "cpu":
        tree["precision"] = {"policy": "bf16_pure"}
    if not any(key.startswith("model.head") for key in overrides):
        head = read_sentence_head(path, published_settings(str(path)))
        if head is not None:
            group["head"] = head
    return _load(tree, overrides, origin="the published model").config


def _load(tree: Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any], *, origin: str) -> Loaded:
    if isinstance(overrides, Mapping):
        return load_config(tree, keywords=overrides, origin=origin)
    return load_config(tree, overrides=overrides, origin=origin)


def _base_of(adapter: Path) -> Path:
    """The base that an adapter names, which must be on this machine."""
    name = open_adapter_folder(adapter).config.base
    base = None if name is None else Path(published_place(Path(name).expanduser(), what=f"the base of {adapter}"))
    if base is None or not is_published(base):
        raise ConfigError(f"{adapter / CONFIG} names the base {name}, which does not exist; put it there")
    return base


def open_run(
    run_dir: str | Path,
    *,
    step: int | None = None,
    model: Model | None = None,
    task: Task | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
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
    loaded = saved_config(run_dir, overrides=overrides)
    return OpenedRun(
        path=Path(run_dir),
        config=loaded.config,
        requested_step=step,
        own_model=model,
        own_task=task,
        mesh=mesh,
        quantize=quantize,
        has_other_data=any(key.startswith("data.") for key in _overridden(loaded)),
        report=report,
    )


def saved_config(run_dir: str | Path, *, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Loaded:
    """The config of a run for this machine: `data` takes all devices, and text the tokenizer of the run."""
    info = read_run(run_dir)
    saved = dict(info["config"])
    for group, keys in _NOT_KEPT.items():
        if isinstance(saved.get(group), dict):
            saved[group] = {key: value for key, value in saved[group].items() if key not in keys}
    saved.pop("parallel", None)
    loaded = _load(saved, overrides, origin="run.json")
    overridden = _overridden(loaded)
    data = loaded.config.data
    held_out = getattr(data, "validation_path", None)
    if held_out is not None and "data.path" in overridden and "data.validation_path" not in overridden:
        raise ConfigError(f"the run evaluates data.validation_path={held_out}; give that key in place of data.path")
    tokenizer = getattr(data, "tokenizer", None)
    if tokenizer is None or any(key.startswith("data.tokenizer") for key in overridden):
        return loaded
    file = Path(run_dir) / TOKENIZER_FILE
    if not file.is_file():
        return loaded
    tokenizer = tokenizer.model_copy(update={"kind": "file", "path": str(file)})
    data = data.model_copy(update={"tokenizer": tokenizer})
    return dataclasses.replace(loaded, config=loaded.config.model_copy(update={"data": data}))


def _overridden(loaded: Loaded) -> list[str]:
    """The keys that were set on top of the config of a run."""
    return [key for key, origin in loaded.origins.items() if origin in ("command line", "keyword")]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class OpenedRun(OpenedModel):
    """A run, opened by `open_run`: a model with its data and its history.

    Attributes:
        path: directory of the run.
        config: that of the run, with the parallel degrees of this machine.
        requested_step: of the checkpoint; None: the newest intact one.
        own_model: from Python; None: the model of the config.
        has_other_data: whether overrides set keys of `data`.
    """

    requested_step: int | None
    own_model: Model | None
    has_other_data: bool

    def __repr__(self) -> str:
        return f"Run {run_text(self.path)}"

    def __fspath__(self) -> str:
        """The path of the run, or of the one step of it that was asked for."""
        if self.requested_step is None:
            return str(self.path)
        return str(checkpoint_folder(self.path) / str(self.requested_step))

    @property
    def info(self) -> dict[str, Any]:
        """The content of `run.json` as it is: what ran, on what, with which result."""
        return read_run(self.path)

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
    def published_config(self) -> Mapping[str, Any]:
        """The config.json of the published model that the run started from; empty: there is none."""
        origin = kept_published(self.path)
        return {} if origin is None else origin.config

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes in the order of the outputs; None: the data of the run did not name any."""
        return self.reading.get("classes")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """What made the run's tokens; None: the run has none."""
        return read_tokenizer(self.path, self.info)

    @functools.cached_property
    def _texts(self) -> tuple[ChatFormat | None, SpecialTokens]:
        form = format_of_reading(self.reading)
        # Rows of plain text have no beginning of text, so that a model that was trained on them gets none either.
        added = form is not None or self.status == "imported"
        files = files_beside(self.path / TOKENIZER_FILE)
        published_form, special = read_texts(files, self.tokenizer, where=str(self.path), added=added)
        return form or published_form, special

    @functools.cached_property
    def data(self) -> Data:
        """The run's data, its values turned into numbers as in training; a ConfigError if it came from Python."""
        if not self.has_other_data:
            self._check_described("data", "evaluate(data), or give other data with data.kind=... data.path=...")
        config = self.config
        group = config.data
        # Nothing is trained on here: all rows may be held out.
        holds_out_all = getattr(group, "validation_fraction", None) == 1
        if holds_out_all:
            plain = {"validation_fraction": 0.0, "augment": False}
            group = group.model_copy(update={key: value for key, value in plain.items() if hasattr(group, key)})
        data = open_data(
            group,
            sequence_length=getattr(config.model, "max_sequence_length", None),
            seed=config.seed,
            task=config.task if isinstance(config.task, str) else None,
            reading=self.trained_on.get("reading"),
        )
        if holds_out_all and data.validation is None:
            return dataclasses.replace(data, validation=data.train)
        return data

    @functools.cached_property
    def sharded_model(self) -> ShardedModel:
        """The run's model on this machine's mesh; a ConfigError if it came from Python and was not given."""
        config = self.config
        distributed.start(compilation_cache=config.compilation_cache)
        if self.own_model is not None:
            return build_sharded_model(config, input_shape=(), model=self.own_model, task=self.own_task, mesh=self.mesh)
        self._check_described("model", f"jt.open_run({str(self.path)!r}, model=...)")
        saved = self.trained_on
        return build_sharded_model(
            with_output_scale(config, saved.get("reading"), task=self.info.get("task")),
            input_shape=tuple(saved["input_shape"]),
            vocab_size=saved.get("vocab_size"),
            num_outputs=saved.get("num_outputs"),
            task=self.own_task,
            mesh=self.mesh,
        )

    @functools.cached_property
    def state(self) -> EvaluationState:
        """Parameters and model state of the checkpoint on the mesh, as an `Evaluator` reads them."""
        state = restore_for_evaluation(
            self.path,
            self.sharded_model,
            step=self.requested_step,
            report=self.report,
            moved_to=published_from(self.config.model),
        )
        return dataclasses.replace(state, evaluation_params=self._quantized(state.evaluation_params))

    @property
    def step(self) -> int:
        """The step of the checkpoint that `params` are of."""
        return self.state.step

    @functools.cached_property
    def task(self) -> Task:
        """What outputs are compared with; a ConfigError if it came from Python and was not given."""
        if self.own_task is None:
            self._check_described("task", f"jt.open_run({str(self.path)!r}, task=...)")
        return super().task

    def _check_described(self, part: str, remedy: str) -> None:
        """Raise where the config does not describe a part, because it came from Python."""
        name = recorded_parts(self.info)[part]
        if name is not None:
            raise ConfigError(
                f"{self.path} was trained with {part} ({name}) from Python, which its config does not describe: write "
                f"{remedy}"
            )
