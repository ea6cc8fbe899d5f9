"""Opening a finished (or running) run: each part of it is read when it is first used.

Curves need no checkpoint and no jax, predictions no training data.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.config import Config, Loaded, load_config
from jaxtrain.config.files import read_run, recorded_parts
from jaxtrain.config.model import published_from
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.metrics.history import last_evaluation, read_history
from jaxtrain.metrics.runinfo import run_text
from jaxtrain.run.directory import tokenizer_file
from jaxtrain.runtime.terminal import print_remark

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh
    from matplotlib.figure import Figure

    from jaxtrain.data import Data, Tokenizer
    from jaxtrain.data.chat.templates import ChatFormat
    from jaxtrain.inference.prompts import SpecialTokens
    from jaxtrain.models.model import Model, ModelState, Params
    from jaxtrain.models.sharded import ShardedModel
    from jaxtrain.models.task import Task
    from jaxtrain.run.evaluation import Evaluator, HeldOutRows
    from jaxtrain.run.predict import Predictor
    from jaxtrain.train.state import EvaluationState

# Keys of a config that were for the hardware of the run, or for a published folder that may be gone.
_NOT_KEPT = {"model": ("attention", "from"), "loss": ("logits", "block")}


def open_run(
    run_dir: str | Path,
    *,
    step: int | None = None,
    model: "Model | None" = None,
    task: "Task | None" = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    mesh: "Mesh | None" = None,
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
        run_dir=Path(run_dir),
        config=saved_config(run_dir, overrides=overrides, report=report).config,
        _wanted_step=step,
        _own_model=model,
        _own_task=task,
        _mesh=mesh,
        _quantize=quantize,
        _has_other_data=any(key.partition(".")[0] == "data" for key in _keys(overrides)),
        _report=report,
    )


def saved_config(
    run_dir: str | Path,
    *,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    report: Callable[[str], None] = print_remark,
) -> Loaded:
    """The config of a run for this machine: `data` takes all devices, unless an override says otherwise.

    Text is read with the tokenizer that was saved with the run.

    Raises:
        ConfigError: not a run, or a wrong key or value.
    """
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
class OpenedRun:
    """A run, opened by `open_run`: its directory, and its config with the parallel degrees of this machine."""

    run_dir: Path
    config: Config
    _wanted_step: int | None
    _own_model: "Model | None"
    _own_task: "Task | None"
    _mesh: "Mesh | None"
    _quantize: str | None
    _has_other_data: bool
    _report: Callable[[str], None]

    def __fspath__(self) -> str:
        """The path of the run, or of the one step of it that was asked for."""
        if self._wanted_step is None:
            return str(self.run_dir)
        from jaxtrain.checkpoint.run_folder import checkpoint_folder

        return str(checkpoint_folder(self.run_dir) / str(self._wanted_step))

    def __repr__(self) -> str:
        steps = ", ".join(map(str, self.checkpoints[-5:])) or "none"
        return f"Run {run_text(self.run_dir)}\n  checkpoints: {steps}"

    @property
    def info(self) -> dict[str, Any]:
        """The content of `run.json` as it is: what ran, on what, with which result."""
        return read_run(self.run_dir)

    @property
    def _trained_on(self) -> Mapping[str, Any]:
        return self.info.get("data") or {}

    @property
    def status(self) -> str:
        """How the run ended: done, preempted, diverged, stopped or failed; `running` while it trains."""
        return str(self.info.get("status"))

    @property
    def history(self) -> "dict[str, np.ndarray]":
        """Columns of one length: `step`, int64 [N] ascending, then each metric, float64 [N], NaN where it is not."""
        return read_history(self.run_dir / "metrics.jsonl")

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last evaluation, NaN where not finite, with its `step`; empty where there was none."""
        return last_evaluation(self.run_dir / "metrics.jsonl")

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the saved checkpoints, in ascending order."""
        from jaxtrain.checkpoint.directory import list_steps
        from jaxtrain.checkpoint.run_folder import checkpoint_folder

        return list_steps(checkpoint_folder(self.run_dir))

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of the outputs; None where the run's data did not name any."""
        names = (self._trained_on.get("reading") or {}).get("classes")
        return None if names is None else tuple(names)

    @property
    def step(self) -> int:
        """The step of the checkpoint that `params` are of."""
        return self.state.step

    @property
    def params(self) -> "Params":
        """The parameters as a nested dict of sharded arrays: their moving average where the run keeps one."""
        return self.state.evaluation_params

    @property
    def model_state(self) -> "ModelState":
        """What changes without a gradient (batch statistics): its moving average where the run keeps one."""
        return self.state.evaluation_model_state

    @functools.cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """What made the run's tokens; None where the run has none."""
        from jaxtrain.run.published import read_tokenizer

        return read_tokenizer(self.run_dir, self.info)

    @property
    def chat(self) -> "ChatFormat | None":
        """The chat template that the run was trained with, or that of its published model; None: neither."""
        return self._texts[0]

    @property
    def special(self) -> "SpecialTokens":
        """What is known of the special tokens of its texts."""
        return self._texts[1]

    @functools.cached_property
    def _texts(self) -> "tuple[ChatFormat | None, SpecialTokens]":
        from jaxtrain.data.chat.templates import files_beside, format_of_reading
        from jaxtrain.run.published import read_texts

        own, files = format_of_reading(self._trained_on.get("reading")), files_beside(self.run_dir / "tokenizer.json")
        # Rows of plain text have no beginning of text, so that a model that was trained on them gets none either.
        added = own is not None or self.status == "imported"
        chat, special = read_texts(files, self.tokenizer, where=str(self.run_dir), added=added)
        return own or chat, special

    @functools.cached_property
    def data(self) -> "Data":
        """The run's data, its values turned into numbers as in training; a ConfigError where it came from Python."""
        from jaxtrain.data import open_data

        if not self._has_other_data:
            _check_evaluable(self.info, self.run_dir, "data")
        config, group, saved = self.config, self.config.data, self._trained_on
        held_out_alone = getattr(group, "validation_fraction", None) == 1  # nothing is trained on here
        if held_out_alone:
            plain = {"validation_fraction": 0.0} | ({"augment": False} if hasattr(group, "augment") else {})
            group = group.model_copy(update=plain)
        length = getattr(config.model, "max_sequence_length", None)
        task = config.task if isinstance(config.task, str) else None
        data = open_data(group, sequence_length=length, seed=config.seed, task=task, reading=saved.get("reading"))
        if held_out_alone and data.validation is None:
            data = dataclasses.replace(data, validation=data.train)
        before, after = saved.get("fingerprint"), json.loads(json.dumps(data.fingerprint))
        if not self._has_other_data and before not in (None, after):
            differ = ", ".join(key for key in sorted({*before, *after}) if before.get(key) != after.get(key))
            self._report(f"the data has changed since the run ({differ}): rows it trained on may be among these")
        return data

    @functools.cached_property
    def sharded_model(self) -> "ShardedModel":
        """The run's model on this machine's mesh; a ConfigError where it came from Python and was not given."""
        from jaxtrain.runtime import distributed

        if self._own_model is None:
            _check_evaluable(self.info, self.run_dir, "model")
        distributed.start(compilation_cache=self.config.compilation_cache)
        from jaxtrain.train.assemble import build_sharded_model, with_output_scale

        config, sizes, saved = self.config, dict[str, Any](input_shape=()), self._trained_on
        if self._own_model is None:
            config = with_output_scale(config, saved.get("reading"), task=self.info.get("task"))
            sizes |= {name: saved.get(name) for name in ("vocab_size", "num_outputs")}
            sizes["input_shape"] = tuple(saved["input_shape"])
        return build_sharded_model(config, **sizes, model=self._own_model, task=self._own_task, mesh=self._mesh)

    @functools.cached_property
    def state(self) -> "EvaluationState":
        """What an `Evaluator` reads."""
        from jaxtrain.run.restore import quantized_params, restore_for_evaluation

        model, base = self.sharded_model, published_from(self.config.model)
        found = restore_for_evaluation(self.run_dir, model, step=self._wanted_step, report=self._report, moved_to=base)
        if self._quantize is None:
            return found
        params, remark = quantized_params(found.evaluation_params, model, self._quantize)
        self._report(remark)
        return dataclasses.replace(found, evaluation_params=params)

    @functools.cached_property
    def task(self) -> "Task":
        """What outputs are compared with; a ConfigError where it came from Python and was not given."""
        from jaxtrain.models.tasks import build_task

        if self._own_task is None:
            _check_evaluable(self.info, self.run_dir, "task")
        return self._own_task or build_task(self.config)

    @functools.cached_property
    def evaluator(self) -> "Evaluator":
        """Computes the metrics of the run's task: `run.evaluator(run.state, batches)`."""
        from jaxtrain.run.evaluation import Evaluator
        from jaxtrain.train.assemble import parallelism_of

        parallelism, options = parallelism_of(self.config), self.config.compiler_options
        return Evaluator(self.sharded_model, self.task, parallelism=parallelism, compiler_options=options)

    @functools.cached_property
    def _predictor(self) -> "Predictor":
        from jaxtrain.models.tasks import build_task
        from jaxtrain.run.predict import Predictor

        axes = (self._own_task or build_task(self.config)).batch_axes
        return Predictor(self.sharded_model, axes, self.config.compiler_options)

    def predict(self, inputs: Any, *, batch_size: int | None = None) -> Any:
        """What the model gives for any number of rows, in evaluation mode; no training data is needed.

        Args:
            inputs: an array [rows, ...], a nested dict of them, or rows with an index (`data.validation`), whose entry
                `inputs` is read as it is. Arrays hold what the model takes, with two exceptions: columns of a table
                are in their own units, and pixels for a run on images may be uint8.
            batch_size: the largest batch; None: a microbatch of the run. It is rounded up to divide by the mesh.

        Returns:
            NumPy arrays [rows, ...] in the structure of the model's outputs (logits of a classifier); floats are
            float32. Of several outputs, `logits` alone.

        Raises:
            ConfigError: a model from Python was not given.
            CheckpointError: there is no intact checkpoint.
            DataError: rows that the model does not take.
        """
        from jaxtrain.run.predict import input_rows

        train, saved = self.config.train, self._trained_on
        size = batch_size or max(1, train.global_batch_size // train.accumulation_steps)
        _check_read_alike(inputs, saved)
        rows = input_rows(inputs, saved, self.sharded_model.model)
        return self._predictor(self.params, self.model_state, rows, batch_size=size)

    def predict_file(
        self, path: str | Path, *, batch_size: int | None = None, probabilities: bool = False
    ) -> list[dict[str, Any]]:
        """One dict per row of a file or folder, in its order, as `jaxtrain predict` writes them (docs/predict.md)."""
        from jaxtrain.run.predict import predict_file

        return predict_file(self, path, batch_size=batch_size, probabilities=probabilities)

    def evaluate(self, data: Any = None) -> dict[str, Any]:
        """The metrics of the run's task: `eval_loss` and the others as `eval_*`.

        Args:
            data: a `Data`, whose held-out rows are used, or rows in another form of `fit`, such as a dict of arrays, of
                which all count. None: the run's held-out rows, as many as `evaluation.max_batches` says.

        Raises:
            ConfigError: a part from Python was not given, or it does not fit the data.
            DataError: the data is not there, or has no held-out rows.
        """
        from jaxtrain.run.evaluation import evaluate_rows

        held_out, evaluator = self.held_out(data), self.evaluator
        evaluator.feed.shardings(held_out.batches.spec())  # a mistake in the data is found before a checkpoint is read
        return evaluate_rows(evaluator, self.state, held_out)

    def held_out(self, data: Any = None) -> "HeldOutRows":
        """The rows that `evaluate` takes, in batches that divide by the mesh."""
        from grain import MapDataset

        from jaxtrain.data import Data
        from jaxtrain.data.sources.given import rows_of
        from jaxtrain.run.evaluation import check_data_fits, held_out_rows
        from jaxtrain.run.reference import evaluated_rows

        limit = self.config.evaluation.max_batches if data is None else None
        own = data is None and not self._has_other_data
        given = self.data if data is None else data
        _check_read_alike(given, self._trained_on)
        if not isinstance(given, Data | MapDataset):
            if "mean" in (self._trained_on.get("reading") or {}):
                raise DataError(
                    "a run on a table is evaluated on jaxtrain.open_data({...}, reading=...), not on arrays"
                )
            given = rows_of(given)
        same = own and self._trained_on.get("fingerprint") == json.loads(json.dumps(self.data.fingerprint))
        rows = evaluated_rows(given, self.task, self.run_dir, own=same)
        found = held_out_rows(self.config, rows, self.sharded_model, task=self.task, max_batches=limit)
        if isinstance(rows, Data) and self._own_model is None:
            check_data_fits(self.config, rows, self.sharded_model, own_task=self._own_task is not None)
        return found

    def sample(
        self, prompts: str | Sequence[str], *, new_tokens: int | None = None, seed: int = 0, **sampling: Any
    ) -> Any:
        """Continue a text, or a list of texts in one batch.

        Args:
            prompts: a text, or a list of texts.
            new_tokens: tokens to add to each, at most; None: 200, or as many as the model has positions for.
            seed: of the random choices.
            sampling: of `Sampling`: temperature, top_k, top_p and the like.

        Returns:
            The prompt with its continuation, or a list of them.

        Raises:
            ConfigError: the run writes no text, or an option is out of range.
        """
        from jaxtrain.inference.sampling import Sampling
        from jaxtrain.run.predict import Writing, write, writer_of

        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        found = [""] * len(texts)
        for piece in write(writer_of(self), texts, Writing(new_tokens, Sampling(**sampling), seed, piece=None)):
            found[piece.row] += piece.text
        return found[0] if isinstance(prompts, str) else found

    def plot(self, *names: str) -> "Figure":
        """A matplotlib figure of the run's metrics over steps, training and evaluation in one picture.

        Args:
            names: metrics such as "loss" or "accuracy", which "eval_loss" is drawn with; none: those of the task.

        Raises:
            ConfigError: the run did not log such a metric.
        """
        from jaxtrain.metrics.history import draw_history

        return draw_history(self.history, names, title=self.run_dir.name)


def _check_read_alike(data: Any, trained_on: Mapping[str, Any]) -> None:
    """Raise a DataError where a `Data` has scales or class numbers of its own, and not those of the run."""
    saved, own = trained_on.get("reading"), json.loads(json.dumps(getattr(data, "reading", None)))
    if saved is None or own is None or saved["kind"] != own["kind"]:
        return
    other = [key for key in ("classes", "mean", "deviation") if saved.get(key) != own.get(key)]
    if other:
        raise DataError(
            f"this data has other {', '.join(other)} than the run's; write jaxtrain.open_data({{...}}, "
            'reading=run.info["data"]["reading"])'
        )
