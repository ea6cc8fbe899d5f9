"""A run that was opened again: each part of it is read when it is first used.

Curves need no checkpoint and no jax, predictions need no training data.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.config import Config
from jaxtrain.config.arguments import check_whole
from jaxtrain.config.call import Call
from jaxtrain.config.published import published_from
from jaxtrain.config.saved_run import read_run
from jaxtrain.metrics.history import last_evaluation, read_history
from jaxtrain.metrics.run_card import run_text
from jaxtrain.run.called_sources import called_sources, source_changes
from jaxtrain.run.opened_data import built_from, open_saved_data, rows_of_given
from jaxtrain.run.own_parts import check_evaluable
from jaxtrain.run.run_path import RunPath

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh

    from jaxtrain.data import Data, Tokenizer
    from jaxtrain.metrics.figure import CurveFigure
    from jaxtrain.models.model import Model, ModelState, Params
    from jaxtrain.models.sharded import ShardedModel
    from jaxtrain.models.task import Task
    from jaxtrain.run.evaluation import Evaluator
    from jaxtrain.run.held_out_rows import HeldOutRows
    from jaxtrain.run.predict import Predictor
    from jaxtrain.run.restored import Restored
    from jaxtrain.train.state import EvaluationState


class OpenedRun(RunPath):
    """A run, opened by `open_run`.

    Attributes:
        run_dir: its directory.
        config: of the run, with its parallel degrees replaced by those of this machine.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        *,
        step: int | None,
        model: "Model | None",
        task: "Task | None",
        mesh: "Mesh | None",
        quantize: str | None,
        changed: Sequence[str],
        report: Callable[[str], None],
    ) -> None:
        self.run_dir, self.config = run_dir, config
        self._wanted_step, self._own_model, self._own_task, self._mesh = step, model, task, mesh
        self._quantize, self._report = quantize, report
        self._other_data = any(key.startswith("data.") or key == "data" for key in changed)

    def __repr__(self) -> str:
        return f"Run {run_text(self.run_dir)}\n  checkpoints: {self._checkpoints_text()}"

    def _checkpoints_text(self) -> str:
        steps = self.checkpoints
        return ", ".join(map(str, steps[-5:])) if steps else "none"

    @property
    def info(self) -> dict[str, Any]:
        """The content of `run.json` as it is: what ran, on what, with which result."""
        return read_run(self.run_dir)

    @property
    def status(self) -> str:
        """How the run ended: done, preempted, diverged, stopped or failed; `running` while it trains."""
        return str(self.info.get("status"))

    @property
    def history(self) -> "dict[str, np.ndarray]":
        """The metrics of the run as columns of one length, as they are on disk.

        `step`, int64 [N] ascending, then each metric, float64 [N], NaN at the steps that do not have it (evaluation
        runs at few steps). `pandas.DataFrame(run.history)` is a table of it.
        """
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
        names = ((self.info.get("data") or {}).get("reading") or {}).get("classes")
        return None if names is None else tuple(names)

    @property
    def step(self) -> int:
        """The step of the checkpoint that `params` are of."""
        return self._restored.step

    @property
    def params(self) -> "Params":
        """The parameters as a nested dict of sharded arrays: their moving average where the run keeps one."""
        return self._restored.params

    @property
    def model_state(self) -> "ModelState":
        """What changes without a gradient (batch statistics): its moving average where the run keeps one."""
        return self._restored.model_state

    @property
    def state(self) -> "EvaluationState":
        """What an `Evaluator` reads."""
        from jaxtrain.train.state import EvaluationState

        return EvaluationState(self.params, self.model_state, self.step)

    @functools.cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """What made the run's tokens; None where the run has none."""
        from jaxtrain.run.kept_tokenizer import read_tokenizer

        return read_tokenizer(self.run_dir, self.info, self._report)

    @functools.cached_property
    def data(self) -> "Data":
        """The run's data, opened and read as in training.

        Raises:
            ConfigError: it came from Python, so that no config describes it.
            DataError: it is not there.
        """
        info = self.info
        if not self._other_data:
            check_evaluable(info, self.run_dir, needed=("data",))
        data, remarks = open_saved_data(
            self.config, info, self.run_dir, tokenizer=self.tokenizer, is_other=self._other_data
        )
        for remark in remarks:
            self._report(remark)
        return data

    @functools.cached_property
    def sharded_model(self) -> "ShardedModel":
        """The run's model on this machine's mesh.

        Raises:
            ConfigError: the model came from Python and was not given.
        """
        from jaxtrain.runtime import distributed

        if self._own_model is None:
            check_evaluable(self.info, self.run_dir, needed=("model",))
            self._tell_changes("model")
        distributed.start(compilation_cache=self.config.compilation_cache)
        from jaxtrain.train.assemble import build_sharded_model

        config, sizes = self.config, dict[str, Any](input_shape=())
        if self._own_model is None:
            config, sizes = built_from(config, self.info)
        return build_sharded_model(config, **sizes, model=self._own_model, task=self._own_task, mesh=self._mesh)

    @functools.cached_property
    def _restored(self) -> "Restored":
        from jaxtrain.run.restored import quantized_params, restore_for_evaluation

        model = self.sharded_model
        found = restore_for_evaluation(
            self.run_dir,
            model,
            step=self._wanted_step,
            report=self._report,
            moved_to=published_from(self.config.model),
        )
        if self._quantize is None:
            return found
        params, remark = quantized_params(found.params, model, self._quantize)
        self._report(remark)
        return dataclasses.replace(found, params=params)

    @functools.cached_property
    def task(self) -> "Task":
        """What outputs are compared with.

        Raises:
            ConfigError: it came from Python, is no shipped one, and was not given.
        """
        from jaxtrain.models.tasks import build_task

        if self._own_task is None:
            info = self.info
            # A shipped task that came from Python is the one that the config names.
            if not (info.get("task_is_shipped") is True and info.get("task") == self.config.task):
                check_evaluable(info, self.run_dir, needed=("task",))
            self._tell_changes("task")
        return self._own_task or build_task(self.config)

    def _tell_changes(self, part: str) -> None:
        """Reports that the file of a function that the config names is another one than in training."""
        for remark in source_changes(self.info, called_sources(self.config, among=(part,))):
            self._report(remark)

    @functools.cached_property
    def evaluator(self) -> "Evaluator":
        """Computes the metrics of the run's task: `run.evaluator(run.state, batches)`."""
        from jaxtrain.run.evaluation import Evaluator
        from jaxtrain.train.assemble import parallelism_of

        return Evaluator(
            self.sharded_model,
            self.task,
            parallelism=parallelism_of(self.config),
            compiler_options=self.config.compiler_options,
        )

    @functools.cached_property
    def _predictor(self) -> "Predictor":
        from jaxtrain.models.tasks import build_task
        from jaxtrain.run.predict import Predictor

        return Predictor(
            self.sharded_model,
            batch_axes=(self._own_task or build_task(self.config)).batch_axes,
            trained_on=self.info.get("data") or {},
            compiler_options=self.config.compiler_options,
        )

    def predict(self, inputs: Any, *, batch_size: int | None = None, scaled: bool = False) -> Any:
        """What the model gives for any number of rows, in evaluation mode; no training data is needed.

        Args:
            inputs: an array [rows, ...], a nested dict of them, or rows with an index (`data.validation`), whose entry
                `inputs` is read. Arrays hold what the model takes, with two exceptions: columns of a table in their own
                units, scaled as the run scaled its table, and uint8 pixels [rows, size, size, 3] for a run on an image
                folder. Rows with an index are taken as they are.
            batch_size: the largest batch; None: a microbatch of the run. It is rounded up to divide by the mesh.
            scaled: whether an array for a run on a table already has the run's scale.

        Returns:
            NumPy arrays [rows, ...] in the structure of the model's outputs (logits of a classifier); floats are
            float32. Entries without a value per row are left out.

        Raises:
            ConfigError: a model from Python was not given, or `batch_size` is below 1.
            CheckpointError: there is no intact checkpoint.
            DataError: rows that the model does not take.

        Example:
            >>> run = jaxtrain.open_run("runs/digits_mlp")
            >>> classes = run.predict(images).argmax(-1)
        """
        train = self.config.train
        size = max(1, train.global_batch_size // train.accumulation_steps) if batch_size is None else batch_size
        batch_size = check_whole(size, what="predict: batch_size", least=1, write="batch_size=256")
        return self._predictor(self.params, self.model_state, inputs, batch_size=batch_size, scaled=scaled)

    def predict_file(
        self, path: str | Path, *, batch_size: int | None = None, probabilities: bool = False
    ) -> list[dict[str, Any]]:
        """One dict per row of a table, of images or of texts, in their order, as `jaxtrain predict` writes them.

        Args:
            path: a file or folder, which is read as the run read its own data; docs/predict.md lists the forms.
            batch_size: see `predict`.
            probabilities: whether classes come with the probability of each.

        Raises:
            ConfigError, CheckpointError, DataError: see `predict`; a wrong row is named with its file.
        """
        from jaxtrain.run.predict_file import predicted_rows, run_reader

        reader = run_reader(self.run_dir, self.config, self.info, self.tokenizer)
        outputs = functools.partial(self.predict, batch_size=batch_size)
        return predicted_rows(reader, outputs, path, probabilities=probabilities)

    def evaluate(self, data: Any = None) -> dict[str, Any]:
        """The metrics of the run's task.

        Args:
            data: a `Data`, whose held-out rows are used, or rows in another form of `fit`, such as a dict of arrays, of
                which all count. None: the run's held-out rows, as many as `evaluation.max_batches` says.

        Returns:
            `eval_loss` and the task's metrics as `eval_*`.

        Raises:
            ConfigError: a part from Python was not given, or it does not fit the data.
            DataError: the data is not there, or has no held-out rows.
        """
        from jaxtrain.run.held_out_rows import evaluate_rows

        # The data comes first: a mistake there is found before anything is restored.
        held_out = self.held_out(data)
        evaluator = self.evaluator
        evaluator.feed.shardings(held_out.batches.spec())
        state = self.state
        for remark in held_out.remarks:
            self._report(remark)
        return evaluate_rows(evaluator, state, held_out)

    def held_out(self, data: Any = None) -> "HeldOutRows":
        """The rows that `evaluate` takes, in batches that divide by the mesh; see there. It says nothing of them."""
        from jaxtrain.data import Data
        from jaxtrain.run.held_out_rows import check_data_fits, held_out_rows
        from jaxtrain.run.reference import evaluated_rows

        given = self.data if data is None else rows_of_given(data, self.info)
        rows = evaluated_rows(given, self.task, self.run_dir)
        limit = self.config.evaluation.max_batches if data is None else None
        found = held_out_rows(self.config, rows, self.sharded_model, task=self.task, max_batches=limit)
        if isinstance(rows, Data) and self._own_model is None:
            check_data_fits(self.config, rows, self.sharded_model, own_task=self._own_task is not None)
        return found

    def sample(
        self,
        prompts: str | Sequence[str],
        *,
        new_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        beams: int | None = None,
        seed: int = 0,
        skip_special_tokens: bool = True,
    ) -> Any:
        """Continues texts.

        Args:
            prompts: a text, or a list of texts, which are continued in one batch.
            new_tokens: tokens to add to each, at most; None: 200, or as many as the model has positions for.
            temperature, top_k, top_p, min_p, repetition_penalty: see `Sampling`.
            stop: texts at which a continuation ends.
            beams: beginnings that are followed for the most likely text, in place of random choices; None: no search.
            seed: of the random choices.
            skip_special_tokens: whether special tokens that the model writes are left out.

        Returns:
            The prompt with its continuation, or a list of them.

        Raises:
            ConfigError: the run has no tokenizer, or an option is out of range.
        """
        from jaxtrain.inference.continued import continue_texts
        from jaxtrain.inference.sampling import Sampling
        from jaxtrain.run.special import special_of_run

        sampling = Sampling(temperature, top_k, top_p, min_p=min_p, repetition_penalty=repetition_penalty)
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        special = special_of_run(self.info, self.run_dir, self.tokenizer)
        write = functools.partial(continue_texts, new_tokens=new_tokens, seed=seed, stop=stop, beams=beams)
        texts = write(*self.writer, listed, sampling=sampling, special=special, skip_special_tokens=skip_special_tokens)
        return texts[0] if isinstance(prompts, str) else texts

    @property
    def writer(self) -> "tuple[ShardedModel, Params, Tokenizer]":
        """What continues texts: model, parameters and tokenizer; a ConfigError where the run does not."""
        from jaxtrain.run.special import checked_tokenizer

        is_own = self._own_model is not None or isinstance(self.config.model, Call)
        name = None if is_own else f"model.kind={self.config.model.kind}"
        tokenizer = checked_tokenizer(self.tokenizer, self.sharded_model.model, self.run_dir, name=name)
        return self.sharded_model, self.params, tokenizer

    def plot(self, *names: str) -> "CurveFigure":
        """Curves of the run's metrics over steps, training and evaluation in one picture.

        Args:
            names: metrics such as "loss" or "accuracy", which "eval_loss" is drawn with; none: those of the task.

        Returns:
            A matplotlib figure, which a notebook shows; `figure.savefig("curves.png")` writes it.

        Raises:
            ConfigError: the run did not log such a metric.
        """
        from jaxtrain.metrics.figure import draw_history

        return draw_history(self.history, names, title=self.run_dir.name)
