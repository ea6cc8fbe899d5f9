"""Evaluation on held-out rows: exact means over all of them, padding excluded; and what a classifier gets wrong.

Shapes: B batch, C classes, N rows.
"""

import base64
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import Config
from jaxtrain.config.data import CalledData
from jaxtrain.data import Batches, Data, prefetch
from jaxtrain.data.evaluated import evaluated_numbers, evaluated_rows
from jaxtrain.data.rows import selected_rows
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.metrics.media import thumbnail
from jaxtrain.metrics.progress import Progress
from jaxtrain.models.metrics import MACRO
from jaxtrain.models.model import ModelState, Params, parameter_shapes
from jaxtrain.models.model_call import ModelCall
from jaxtrain.models.output_rows import row_dims
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Batch, Sums, Task
from jaxtrain.models.task_sums import calling_sums, task_sums
from jaxtrain.parallel.division import batch_shards, check_task_stages, step_microbatches
from jaxtrain.runtime.agreement import compiled_by_all
from jaxtrain.runtime.compiler import Value, choose_options
from jaxtrain.runtime.distributed import is_main_process
from jaxtrain.train.assemble import Run, check_fit, model_of, reading_threads
from jaxtrain.train.batch import BatchFeed
from jaxtrain.train.checks import check_parts
from jaxtrain.train.parallelism import Parallelism, make_pipeline, microbatches
from jaxtrain.train.pipelined import evaluation_sums
from jaxtrain.train.state import EvaluationState, TrainState
from jaxtrain.train.step import TrainStep, check_not_donated

# A mean over nothing is NaN; a scalar metric is a float, a vector one a NumPy array.
Means = dict[str, Any]
# What `held_out.json` holds at most; a matrix of more classes cannot be read, and its largest confusions are listed.
_MOST_ROWS, _MOST_CLASSES, _MOST_CONFUSIONS, _MOST_MISTAKES = 2000, 20, 40, 8


class Evaluator:
    """Means of loss and metrics over batches, with the parameters (or their moving average) of a state.

    Args:
        step: a train step, or a sharded model.
        task: what outputs are compared with; needed for a sharded model, and taken from a step.
        parallelism: schedule of the pipeline of a sharded model, as for `make_train_step`; None: the defaults.
        compiler_options: for a sharded model, over those of `jaxtrain/runtime/compiler_options.py`.

    Attributes:
        feed: how batches reach the mesh.

    Raises:
        ConfigError: a sharded model without a task, or layers that do not divide over the stages of its mesh.

    Example:
        >>> held_out = jt.Batches(rows, 8, seed=0, shuffle=False)
        >>> evaluate = jt.Evaluator(step)
        >>> means = evaluate(state, jt.prefetch(step.loader(held_out), 0, len(held_out)))
        >>> sorted(means)
        ['eval_accuracy', 'eval_loss']
    """

    def __init__(
        self,
        step: TrainStep | ShardedModel,
        task: Task | None = None,
        *,
        parallelism: Parallelism | None = None,
        compiler_options: Mapping[str, Value] | None = None,
    ):
        if isinstance(step, TrainStep):
            self._sharded_model, self._task, self._pipeline = step.sharded_model, step.task, step.pipeline
            self.feed, options = step.feed, step.compiler_options
        else:
            check_parts(task=task)
            assert task is not None
            mesh = step.mesh
            check_task_stages(mesh.shape, task=task.name, calls_model=task.calls_model, rows=task.rows)
            self._sharded_model, self._task = step, task
            self._pipeline = make_pipeline(step.model, step.layout, parallelism or Parallelism(), 1)
            self.feed = BatchFeed(step, task, microbatches(self._pipeline, 1))
            options = choose_options(mesh.devices.flat[0], mesh.size, compiler_options)
        self._jitted = jax.jit(self._sums, static_argnums=4, compiler_options={**options.used} or None)
        self._compiled: set[int | None] = set()
        self._count = jax.jit(_rows_before_padding)

    def _sums(
        self, params: Params, model_state: ModelState, batch: Batch, moment: tuple[Any, Any], num_rows: int | None
    ) -> Sums:
        sharded_model, task = self._sharded_model, self._task
        with sharded_model.context():
            if task.calls_model:
                step, number = moment
                loss_key, call_key = jax.random.split(jax.random.fold_in(jax.random.key(0), number))
                average = (params, model_state)
                applied = sharded_model.apply_deferred
                call = ModelCall(sharded_model.apply, params, model_state, False, step, call_key, average, applied)
                batch = _first_rows(batch, batch, num_rows)
                (loss_sum, weight, metrics), _ = calling_sums(task, call, batch, loss_key)
            elif self._pipeline is not None and num_rows is None:
                loss_sum, weight, metrics = evaluation_sums(self._pipeline, sharded_model, task, params, batch)
            else:
                # Logits of all rows where some are left out: deferred ones hold a kernel, which has no rows.
                deferred = task.takes_deferred_logits and num_rows is None
                apply = sharded_model.apply_deferred if deferred else sharded_model.apply

                def outputs_of(inputs: Any) -> Any:
                    return apply(params, model_state, inputs, key=None, train=False)[0]

                outputs, batch = _real_rows(outputs_of, batch, num_rows)
                loss_sum, weight, metrics = task_sums(task, outputs, batch, train=False)
        return {"loss": (loss_sum, weight), **metrics}

    def __call__(self, state: TrainState | EvaluationState, batches: Iterable[Mapping[str, Any]]) -> Means:
        """Evaluate.

        Args:
            state: its `evaluation_params` and `evaluation_model_state` are used.
            batches: of one shape, on the mesh or host arrays; rows at the end of a batch whose `weights` are 0 pad it
                and count for no task.

        Returns:
            `eval_loss`, the task's metrics as `eval_*` (a float, or a NumPy array for a vector), and `eval_perplexity`
            for language models. A mean over no weight is NaN; of no batches there is nothing.

        Raises:
            ConfigError: a state that was donated to a step.
        """
        params, model_state = state.evaluation_params, state.evaluation_model_state
        check_not_donated({"params": params, "model_state": model_state})
        totals: dict[str, tuple[Any, Any]] = {}
        step = state.step
        for number, batch in enumerate(batches):
            self.feed.check(batch)
            if not self.feed.is_placed(batch):  # one line where rows do not divide, before anything is traced
                batch = self.feed.place(batch)
            num_rows = self._num_rows(batch)
            if num_rows == 0:
                continue
            arguments = (params, model_state, dict(batch), (step, number), num_rows)
            if num_rows not in self._compiled:
                # jax keeps what is compiled here for the call below.
                mesh = self._sharded_model.mesh
                compiled_by_all(mesh, lambda arguments=arguments: self._jitted.lower(*arguments).compile())
                self._compiled.add(num_rows)
            sums = jax.device_get(self._jitted(*arguments))
            for name, (total, weight) in sums.items():
                before = totals.get(name, (0.0, 0.0))
                # A total has no weight: it is added up and not divided.
                by = None if weight is None else before[1] + np.asarray(weight, np.float64)
                totals[name] = (before[0] + np.asarray(total, np.float64), by)
        means = {f"eval_{name}": _mean(total, weight) for name, (total, weight) in totals.items()}
        means |= {name: float(np.nanmean(means[name])) for name in means if name.startswith(f"eval_{MACRO}")}
        if self._task.name == "language_modeling" and "eval_loss" in means:
            means["eval_perplexity"] = math.exp(min(means["eval_loss"], 700.0))
        return means

    def _num_rows(self, batch: Mapping[str, Any]) -> int | None:
        """The rows before those that fill the batch up; None: all, or the task weighs them itself."""
        if self._task.reads_weights or "weights" not in batch:
            return None
        found = int(self._count(batch["weights"]))
        return None if found == batch["weights"].shape[0] else found


def _rows_before_padding(weights: jax.Array) -> jax.Array:
    """One more than the index of the last row with a weight that is not 0; int32 []."""
    counts_B = jnp.any(weights.reshape(weights.shape[0], -1) != 0, axis=-1)
    return jnp.max(jnp.where(counts_B, jnp.arange(1, len(counts_B) + 1), 0))


def _real_rows(outputs_of: Callable[[Any], Any], batch: Batch, count: int | None) -> tuple[Any, Batch]:
    """Outputs and batch of the first `count` rows; None: of all.

    The model runs on all rows, which divide by the mesh, and its outputs are cut, where each of them has one entry per
    row or none; other outputs (a matrix of rows by rows, two views in one array) are computed of these rows alone.
    """
    if count is None:
        return outputs_of(batch["inputs"]), batch
    size = batch["weights"].shape[0]
    dims, shapes = row_dims(outputs_of, batch["inputs"], size)
    leaves = jax.tree.leaves(shapes)
    if any(dim is not None and (dim != 0 or leaf.shape[0] != size) for dim, leaf in zip(dims, leaves, strict=True)):
        batch = _first_rows(batch, batch, count)
        return outputs_of(batch["inputs"]), batch
    outputs = outputs_of(batch["inputs"])
    cut = [leaf if dim is None else leaf[:count] for leaf, dim in zip(jax.tree.leaves(outputs), dims, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(outputs), cut), _first_rows(batch, batch, count)


def _first_rows(tree: Any, batch: Mapping[str, Any], count: int | None) -> Any:
    """The tree with the first `count` rows of every leaf that has one entry per row; None: as it is."""
    if count is None:
        return tree
    size = batch["weights"].shape[0]
    return jax.tree.map(lambda leaf: leaf[:count] if jnp.ndim(leaf) and leaf.shape[0] == size else leaf, tree)


def _mean(total: Any, weight: Any) -> Any:
    """total / weight, NaN where the weight is 0; the total where there is no weight."""
    if weight is None:
        return float(total) if np.ndim(total) == 0 else total
    total, weight = np.broadcast_arrays(total, weight)
    mean = np.divide(total, weight, out=np.full(total.shape, np.nan), where=weight != 0)
    return float(mean) if mean.ndim == 0 else mean


def most_evaluated(config: Config) -> int | None:
    """How many held-out rows an evaluation takes at most; None: all. Batches are counted as the run makes them."""
    batches = config.evaluation.max_batches
    return None if batches is None else batches * config.train.global_batch_size


def held_out_batches(run: Run) -> Batches:
    """The batches of the held-out rows that a run evaluates; it must have some."""
    config = run.config
    assert run.data.validation is not None
    rows = evaluated_rows(run.data.validation, most_evaluated(config))
    size = config.train.global_batch_size
    return Batches(rows, size, seed=config.seed, shuffle=False, workers=reading_threads(config))


@dataclasses.dataclass(frozen=True)
class HeldOutRows:
    """Rows of a run that is opened again, to evaluate."""

    batches: Batches
    num_batches: int
    num_rows: int
    remarks: tuple[str, ...]


def held_out_rows(
    config: Config,
    rows: Data | grain.MapDataset,
    sharded_model: ShardedModel,
    *,
    task: Task,
    max_batches: int | None,
) -> HeldOutRows:
    """The rows to evaluate, in batches that divide by the mesh.

    Args:
        config: of the run.
        rows: data, whose held-out rows are taken, or rows.
        sharded_model, task: that they are for.
        max_batches: largest number of batches of the configured size; None: all.
    """
    if isinstance(rows, Data):
        if rows.validation is None:
            raise DataError(f"the data of the run has no held-out rows; {to_hold_out(config)}")
        rows = rows.validation
    size = _dividing_batch(config, sharded_model, task)
    remarks = ()
    # Counted in batches of the run: those that divide by this mesh may be larger.
    if max_batches is not None and (most := max_batches * config.train.global_batch_size) < len(rows):
        remarks = (
            f"evaluation: {most:,} of {len(rows):,} held-out rows, spread over all of them "
            f"(evaluation.max_batches={max_batches}); evaluation.max_batches=null takes all",
        )
        rows = evaluated_rows(rows, most)
    batches = Batches(rows, size, seed=config.seed, shuffle=False, workers=reading_threads(config))
    return HeldOutRows(batches, len(batches), len(rows), remarks)


def to_hold_out(config: Config) -> str:
    """What gives a run rows for evaluation."""
    if isinstance(config.data, CalledData):
        return f"let the function of data.call={config.data.call} return {{'train': {{...}}, 'validation': {{...}}}}"
    return "set data.validation_fraction (of other data that is evaluated: 1), or give fit validation=0.1"


def evaluate_rows(evaluator: Evaluator, state: EvaluationState, held_out: HeldOutRows) -> Means:
    """The metrics of rows; of a task with separate rows they are exact whatever the batch is."""
    loaded = prefetch(evaluator.feed.loader(held_out.batches), 0, held_out.num_batches, depth=1)
    try:
        return evaluator(state, loaded)
    finally:
        loaded.close()


def check_data_fits(config: Config, data: Data, sharded_model: ShardedModel, *, own_task: bool) -> None:
    """Raise where the model of a config would be another one with this data, or where kinds contradict one another."""
    rows: Any = data.train if data.validation is None else data.validation
    targets = rows[0].get("targets")
    if isinstance(targets, np.ndarray | np.generic):
        check_fit(config, data, jax.ShapeDtypeStruct(targets.shape, targets.dtype), own_task=own_task)
    sizes = {"input_shape": data.input_shape, "vocab_size": data.vocab_size, "num_outputs": data.num_outputs}
    found = parameter_shapes(model_of(config, **sizes))
    adapted = sharded_model.model.adapted
    trained = parameter_shapes(sharded_model.model if adapted is None else adapted.original)
    for path, leaf in trained.items():
        shape = found[path].shape if path in found else None
        if shape != leaf.shape:
            raise ConfigError(
                f"the data does not fit the run: its rows {list(data.input_shape)} with "
                f"{data.num_outputs or data.vocab_size} outputs make {path} {shape}, which was trained as "
                f"{leaf.shape}; give data of the same sizes"
            )


def _dividing_batch(config: Config, sharded_model: ShardedModel, task: Task) -> int:
    """The smallest batch, from the configured one up, that divides by this machine's shards.

    Means over separate rows are exact whatever the batch is, so an evaluation need not fail over it.
    """
    degrees = sharded_model.mesh.shape
    shards = batch_shards(degrees) * step_microbatches(config.parallel, degrees["pipe"], 1)
    asked = config.train.global_batch_size
    size = -(-asked // shards) * shards
    if size != asked and task.rows != "separate":
        fewer = max(number for number in range(1, shards + 1) if asked % number == 0)
        raise ConfigError(
            f"the loss of task {task.name!r} (rows={task.rows!r}) depends on the rows of a batch, and "
            f"train.global_batch_size={asked} does not divide by the {shards} shards of this mesh; use {fewer} "
            f"devices (open_run with mesh=jt.make_mesh(data={fewer}, devices=jax.devices()[:{fewer}])), or "
            f"train.global_batch_size={size}, whose loss is another"
        )
    return size


def held_out_details(run: Run, state: TrainState, step: int, progress: Progress) -> dict[str, Any] | None:
    """What a classifier gets wrong, for the report: JSON values for `held_out.json`; None for other tasks.

    Every process of a run takes part. A finished run is not lost over its report: what fails is one line.
    """
    if run.data.validation is None or run.step.task.name != "classification":
        return None
    try:
        with progress.phase("finding mistakes"):
            found = _mistakes(run, state)
            return None if found is None else {"task": "classification", "step": step, **found}
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        progress.message(f"the report has no confusion matrix, because computing it failed: {line}")
        return None


def _mistakes(run: Run, state: TrainState) -> dict[str, Any] | None:
    """The confusions, and the wrong rows of the largest losses; None where rows have no one class."""
    config, step, validation = run.config, run.step, run.data.validation
    assert validation is not None
    numbers = evaluated_numbers(len(validation), most_evaluated(config))
    numbers = numbers[evaluated_numbers(len(numbers), _MOST_ROWS)]
    size, rows = config.train.global_batch_size, selected_rows(validation, numbers)
    batches = Batches(rows, size, seed=config.seed, shuffle=False, workers=reading_threads(config))
    spec = batches.spec()
    targets = spec.get("targets")
    if "inputs" not in spec or targets is None or targets.ndim != 1 or not jnp.issubdtype(targets.dtype, jnp.integer):
        return None

    def forward(params: Params, model_state: ModelState, batch: Batch) -> Any:
        with step.sharded_model.context():
            logits_BC, _ = step.sharded_model.apply(params, model_state, batch["inputs"], key=None, train=False)
        is_table = isinstance(logits_BC, jax.Array) and logits_BC.ndim == 2
        return (logits_BC.astype(jnp.float32) if is_table else None), batch["targets"], batch["weights"]

    # Replicated, so that each process can read all of it.
    everywhere = NamedSharding(step.mesh, PartitionSpec())
    jitted = jax.jit(forward, out_shardings=everywhere, compiler_options={**step.compiler_options.used} or None)
    load, params, model_state = step.loader(batches), state.evaluation_params, state.evaluation_model_state
    found = [jax.device_get(jitted(params, model_state, load(k))) for k in range(len(batches))]
    if found[0][0] is None:
        return None
    logits, targets, weights = (np.concatenate(part) for part in zip(*found, strict=True))
    # Rows that fill the last batch up weigh nothing, and a negative target is ignored everywhere.
    (rows_N,) = np.nonzero((weights != 0) & (targets >= 0))
    if not len(rows_N):
        return None
    logits_NC, targets_N, weights_N, num_classes = logits[rows_N], targets[rows_N], weights[rows_N], logits.shape[-1]
    log_probabilities_NC = logits_NC - np.logaddexp.reduce(logits_NC, axis=-1, keepdims=True)
    predicted_N, index_N = logits_NC.argmax(-1), np.arange(len(rows_N))
    losses_N = np.nan_to_num(-log_probabilities_NC[index_N, targets_N], nan=np.inf)
    pairs, counts = np.unique(np.stack([targets_N, predicted_N]), axis=1, return_counts=True)
    cells = [(int(target), int(guess), int(count)) for (target, guess), count in zip(pairs.T, counts, strict=True)]
    confused = sorted((cell for cell in cells if cell[0] != cell[1]), key=lambda cell: -cell[2])
    names = (run.data.reading or {}).get("classes")
    wrong = np.flatnonzero(targets_N != predicted_N)
    worst = wrong[np.argsort(-losses_N[wrong], kind="stable")[:_MOST_MISTAKES]]
    return {
        "rows": len(rows_N),
        "read": len(numbers),
        "has_weights": bool((weights_N != weights_N[0]).any()),
        "of_rows": len(validation),
        "right": int((targets_N == predicted_N).sum()),
        "num_classes": num_classes,
        "classes": [str(name) for name in names] if names is not None and len(names) == num_classes else None,
        "matrix": cells if num_classes <= _MOST_CLASSES else None,
        "confusions": confused[:_MOST_CONFUSIONS],
        "mistakes": [
            {
                "row": int(numbers[rows_N[index]]),
                "target": int(targets_N[index]),
                "predicted": int(predicted_N[index]),
                "loss": float(losses_N[index]),
                "confidence": float(np.exp(log_probabilities_NC[index, predicted_N[index]])),
                "picture": _picture(run, int(numbers[rows_N[index]])),
            }
            for index in (worst if is_main_process() else ())
        ],
    }


def _picture(run: Run, row: int) -> str | None:
    if run.data.validation is None or len(run.data.input_shape) not in (2, 3):
        return None
    found: Any = run.data.validation[row]
    picture = thumbnail(np.asarray(found["inputs"]))
    return None if picture is None else base64.b64encode(picture).decode("ascii")
