"""Evaluation on held-out rows: exact means over all of them, padding excluded. Shapes: B batch."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import Config
from jaxtrain.config.schema import Parallelism
from jaxtrain.data import Batches, prefetch
from jaxtrain.data.configured import reading_threads
from jaxtrain.data.rows import evaluated_rows
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Batch, ModelCall, Reference, Sums, Task, calling_sums, sum_ratios, task_sums
from jaxtrain.parallel.division import batch_shards, check_task_stages, microbatches_by_name, step_microbatches
from jaxtrain.runtime.compiler import Value, choose_options
from jaxtrain.runtime.distributed import compiled_by_all
from jaxtrain.train.batch import BatchFeed
from jaxtrain.train.build import make_pipeline, stage_schedule
from jaxtrain.train.program import evaluation_sums
from jaxtrain.train.state import EvaluationState, TrainState, check_parts
from jaxtrain.train.step import TrainStep, check_not_donated

TO_HOLD_OUT = "set data.validation_fraction, or give fit validation=0.1"
# A mean over nothing is NaN; a scalar metric is a float, a vector one a NumPy array.
Means = dict[str, Any]


class Evaluator:
    """Means of loss and metrics over batches, with the parameters (or their moving average) of a state.

    Args:
        step: a train step, or a sharded model.
        task: what outputs are compared with; needed for a sharded model, and taken from a step.
        parallelism: schedule of the pipeline of a sharded model, as for `make_train_step`; None: the defaults.
        compiler_options: for a sharded model, over those of `jaxtrain/runtime/compiler.py`.

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
            schedule = stage_schedule(step.model, mesh, parallelism or Parallelism(), 1)
            self._pipeline = make_pipeline(step, schedule)
            self.feed = BatchFeed(step, task, microbatches_by_name(schedule, 1))
            options = choose_options(mesh.devices.flat[0], mesh.size, compiler_options)
        self._jitted = jax.jit(self._sums, static_argnums=5, compiler_options={**options.used} or None)
        self._compiled: set[int | None] = set()
        self._count = jax.jit(_rows_before_padding)

    def _sums(
        self,
        params: Params,
        model_state: ModelState,
        reference: Reference | None,
        batch: Batch,
        moment: tuple[Any, Any],
        num_rows: int | None,
    ) -> Sums:
        sharded_model, task = self._sharded_model, self._task
        with sharded_model.context():
            if task.calls_model:
                step, number = moment
                loss_key, call_key = jax.random.split(jax.random.fold_in(jax.random.key(0), number))
                average = (params, model_state)
                applied = sharded_model.apply_deferred
                call = ModelCall(
                    sharded_model.apply, params, model_state, False, step, call_key, average, applied, reference
                )
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
            state: its `evaluation_params` and `evaluation_model_state` are used, and its `reference` by a task that
                compares with it.
            batches: of one shape, on the mesh or host arrays; rows at the end of a batch whose `weights` are 0 pad it
                and count for no task.

        Returns:
            `eval_loss`, the task's metrics as `eval_*` (a float, or a NumPy array for a vector), and `eval_perplexity`
            for language models. A mean over no weight is NaN; of no batches there is nothing.

        Raises:
            ConfigError: a state that was donated to a step.
        """
        params, model_state = state.evaluation_params, state.evaluation_model_state
        reference = state.reference
        check_not_donated({"params": params, "model_state": model_state, "reference": reference})
        totals: dict[str, tuple[Any, Any]] = {}
        step = state.step
        for number, batch in enumerate(batches):
            batch = self.feed.accept(batch)  # rows that do not divide fail before anything is traced
            num_rows = self._num_rows(batch)
            if num_rows == 0:
                continue
            arguments = (params, model_state, reference, dict(batch), (step, number), num_rows)
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
        means = {f"eval_{name}": _mean(*sum_ratios(*sums)) for name, sums in totals.items()}
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

    Outputs of all rows are cut where each of them has one entry per row or none; others are computed of these alone.
    """
    if count is None:
        return outputs_of(batch["inputs"]), batch
    size = batch["weights"].shape[0]

    def shapes(times: int) -> list[tuple[int, ...]]:
        def one(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = (times * size, *leaf.shape[1:]) if leaf.shape[:1] == (size,) else leaf.shape
            return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

        found = jax.eval_shape(outputs_of, jax.tree.map(one, batch["inputs"]))
        return [leaf.shape for leaf in jax.tree.leaves(found)]

    # Of twice the rows, what has one entry per row is twice as long.
    once, twice = shapes(1), shapes(2)
    has_rows = [more == (2 * size, *shape[1:]) for shape, more in zip(once, twice, strict=True)]
    if any(not rows and shape != more for rows, shape, more in zip(has_rows, once, twice, strict=True)):
        batch = _first_rows(batch, batch, count)
        return outputs_of(batch["inputs"]), batch
    leaves, structure = jax.tree.flatten(outputs_of(batch["inputs"]))
    cut = [leaf[:count] if rows else leaf for leaf, rows in zip(leaves, has_rows, strict=True)]
    return jax.tree.unflatten(structure, cut), _first_rows(batch, batch, count)


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


def held_out_batches(
    config: Config, rows: grain.MapDataset, *, size: int | None = None, max_batches: int | None
) -> Batches:
    """Return batches of held-out rows.

    Args:
        config: of the run.
        rows: the held-out rows.
        size: rows of a batch; None: as in the run. It may be larger to divide by another mesh.
        max_batches: how many batches of the run are evaluated, spread over all rows; None: all rows.
    """
    run_size = config.train.global_batch_size
    max_rows = None if max_batches is None else max_batches * run_size
    rows = evaluated_rows(rows, max_rows)
    return Batches(rows, size or run_size, seed=config.seed, shuffle=False, workers=reading_threads(config))


def evaluate_batches(evaluator: Evaluator, state: EvaluationState, batches: Batches) -> Means:
    """The metrics of batches; of a task with separate rows they are exact whatever the batch is."""
    loaded = prefetch(evaluator.feed.loader(batches), 0, len(batches), depth=1)
    try:
        return evaluator(state, loaded)
    finally:
        loaded.close()


def dividing_batch(config: Config, sharded_model: ShardedModel, task: Task) -> int:
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
            f"devices, or train.global_batch_size={size}, whose loss is another"
        )
    return size
