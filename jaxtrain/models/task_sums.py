"""The sums of a task over rows: the loss is called, what it returned is checked and brought into one form."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.arguments import shown
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import ModelState
from jaxtrain.models.model_call import ModelCall
from jaxtrain.models.targets import target_weights
from jaxtrain.models.task import Batch, CallingLoss, Sums, Task, TaskSums

# What the step, a row of metrics.jsonl and the evaluator report by themselves.
_RESERVED = (
    *("loss", "grad_norm", "weight", "skipped_steps", "skipped_in_a_row", "spiked", "spikes"),
    *("learning_rate", "loss_scale"),
    *("step", "tokens", "examples", "tokens_per_second", "examples_per_second", "step_seconds", "data_wait_seconds"),
    *("model_flops_utilization", "device_memory_bytes", "perplexity"),
)
_EXAMPLE = "return jnp.sum(losses), jnp.float32(losses.size), {}"


def task_sums(task: Task, outputs: Any, batch: Batch, *, train: bool) -> TaskSums:
    """Compute the loss of a task, its weight and its metrics, and check what the loss returned.

    Args:
        task: whose loss is computed.
        outputs: of the model.
        batch: its rows.
        train: True in a train step, False in evaluation.

    Returns:
        Sum float32 [], weight float32 [], and metrics (see `Sums`).

    Raises:
        ConfigError: the loss returned something else.
    """
    batch = with_weights(batch)
    found = (task.loss if train else task.evaluation)(outputs, batch)
    _check_no_pairs(task, found, outputs, batch)
    return _checked_sums(task, found, batch)


def calling_sums(task: Task, call: ModelCall, batch: Batch, key: jax.Array) -> tuple[TaskSums, ModelState]:
    """Compute the loss of a task that calls the model itself.

    Args:
        task: from `Task.calling`.
        call: the model as the loss gets it.
        batch: its rows.
        key: what the loss draws from.

    Returns:
        What `task_sums` returns, and the model_state after this batch.

    Raises:
        ConfigError: the loss returned something else, or in training no model_state although the model has one.
    """
    assert isinstance(task.loss, CallingLoss)
    batch = with_weights(batch)
    found = task.loss.function(call, batch, key)
    items = found if isinstance(found, (tuple, list)) else (found,)
    model_state = call.model_state
    # Metrics are the last entry of a loss without state, so that one after them is the state.
    after_metrics = [index for index, item in enumerate(items[:-1]) if isinstance(item, Mapping)]
    if after_metrics:
        found, model_state = tuple(items[:-1]), _checked_state(task, items[-1], call.model_state)
    elif call.train and jax.tree.leaves(call.model_state):
        raise ConfigError(
            f"the model of task {task.name!r} has a model_state (batch statistics), which its loss must return: write "
            "`outputs, state = apply.with_state(inputs, key=key)` and `return sum, weight, metrics, state`"
        )
    return _checked_sums(task, found, batch), model_state


def _checked_state(task: Task, state: Any, before: ModelState) -> ModelState:
    """The model_state that a loss returned, in the structure and the dtypes of the one before it."""
    if jax.tree.structure(state) != jax.tree.structure(before):
        raise ConfigError(
            f"the loss of task {task.name!r} must return the model_state of the model after the metrics, but it "
            f"returned {shown(state)}; write `outputs, state = apply.with_state(...)` and return that state"
        )
    return jax.tree.map(lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype), state, before)


def _checked_sums(task: Task, found: Any, batch: Batch) -> TaskSums:
    """What a loss returned, as sums; see `Task.loss` for the forms."""
    wanted = f"the loss of task {task.name!r} must return (sum, weight, metrics)"
    if (complex_one := next((leaf for leaf in jax.tree.leaves(found) if np.iscomplexobj(leaf)), None)) is not None:
        raise ConfigError(
            f"the loss of task {task.name!r} returned complex numbers ({shown(complex_one)}); return real ones, such "
            "as jnp.abs(errors) ** 2"
        )
    by_row = losses_by_row(found)
    if by_row is not None:
        return _weighted_sums(task, *by_row, batch)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        count = f"{len(found)} values" if isinstance(found, (tuple, list)) else shown(found)
        raise ConfigError(
            f"{wanted}, or losses per row and metrics, but it returned {count}; write `{_EXAMPLE}` or "
            "`return losses_B, {}`"
        )
    total, weight, metrics = found
    for name, value in (("sum", total), ("weight", weight)):
        if not _is_numeric(value) or jnp.shape(value) != ():
            raise ConfigError(f"{wanted}, two numbers and a dict, but its {name} is {shown(value)}; write `{_EXAMPLE}`")
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"{wanted}, but its metrics are {shown(metrics)}; write `{_EXAMPLE}`")
    pairs = {name: _metric(task, name, pair) for name, pair in metrics.items()}
    return jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32), pairs


def losses_by_row(found: Any) -> tuple[jax.Array, Mapping[str, Any]] | None:
    """Find losses [B, ...] and metrics, where a loss returned these; None: it returned something else."""
    if _is_numeric(found) and jnp.ndim(found):
        return jnp.asarray(found), {}
    if isinstance(found, (tuple, list)) and len(found) == 2 and isinstance(found[1], Mapping):
        losses, metrics = found
        if _is_numeric(losses) and jnp.ndim(losses):
            return jnp.asarray(losses), metrics
    return None


def _check_no_pairs(task: Task, found: Any, outputs: Any, batch: Batch) -> None:
    """Raise where losses [B, B] are of every row with every other: outputs [B, 1] against targets [B] broadcast so.

    Raises:
        ConfigError: says what to write.
    """
    by_row = losses_by_row(found)
    if by_row is None or by_row[0].ndim != 2:
        return
    rows, columns = by_row[0].shape
    compared = {"outputs": outputs, **{name: value for name, value in batch.items() if name != "inputs"}}
    shapes = {name: [jnp.shape(leaf) for leaf in jax.tree.leaves(value)] for name, value in compared.items()}
    # A dimension of them that happens to have the size of the batch is no row.
    if rows == 1 or columns != rows or any(rows in shape[1:] for several in shapes.values() for shape in several):
        return
    words = [f"{name} {list(shape)}" for name, several in shapes.items() for shape in several if shape]
    raise ConfigError(
        f"task {task.name!r} returns losses [{rows}, {rows}], of each row with every other, as arrays of two shapes "
        f"broadcast ({', '.join(words)}): write outputs[:, 0], or return jnp.mean(losses, axis=-1) where pairs are "
        "meant"
    )


def _weighted_sums(task: Task, losses: jax.Array, metrics: Mapping[str, Any], batch: Batch) -> TaskSums:
    """The sums of losses [B, ...] by the weights of their rows (or tokens), and of metrics of the same shape."""
    weights = _row_weights(task, losses.shape, batch)
    weight = jnp.sum(weights)

    def total(values: jax.Array) -> jax.Array:
        # A row that weighs 0 counts nothing, whatever its loss; 0 times NaN would. (Its gradient must be finite.)
        return jnp.sum(jnp.where(weights != 0, values.astype(jnp.float32), 0.0) * weights)

    sums: Sums = {}
    for name, value in metrics.items():
        is_by_row = _is_numeric(value) and jnp.shape(value) == losses.shape
        sums[name] = _metric(task, name, (total(jnp.asarray(value)), weight) if is_by_row else value)
    return total(losses), weight, sums


def _row_weights(task: Task, shape: tuple[int, ...], batch: Batch) -> jax.Array:
    """The weights of losses of this shape: float32 of the same shape."""
    targets = batch.get("targets")
    if isinstance(targets, (jax.Array, np.ndarray)) and targets.shape == shape:
        return target_weights(batch)
    weights = batch.get("weights")
    if weights is None:
        return jnp.ones(shape, jnp.float32)
    if weights.ndim > len(shape) and weights.shape[: len(shape)] == shape:
        # Weights per token beside losses per row: a row counts as its largest token does, and padding as nothing.
        return jnp.max(jnp.asarray(weights, jnp.float32), axis=tuple(range(len(shape), weights.ndim)))
    if weights.shape != shape[: weights.ndim]:
        raise ConfigError(
            f"task {task.name!r} returns losses {list(shape)}, which weights {list(weights.shape)} do not fit; return "
            "one loss per row, or per weight"
        )
    weights = jnp.asarray(weights, jnp.float32)
    return jnp.broadcast_to(weights.reshape(*weights.shape, *[1] * (len(shape) - weights.ndim)), shape)


def _metric(task: Task, name: Any, pair: Any) -> tuple[jax.Array, jax.Array | None]:
    """A metric as (sum, weight), or as (total, None)."""
    if not isinstance(name, str):
        raise ConfigError(f"task {task.name!r} reports a metric {name!r}, which is no text; name it")
    if name in _RESERVED or name.startswith("eval_"):
        why = "is reported already" if name in _RESERVED else "would be taken for one of an evaluation"
        raise ConfigError(f"task {task.name!r} reports a metric {name!r}, which {why}; rename it")
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not is_pair or not _is_numeric(pair[0]) or not (pair[1] is None or _is_numeric(pair[1])):
        raise ConfigError(
            f"metric {name!r} of task {task.name!r} must be a pair (sum, weight), or (total, None), not {shown(pair)}; "
            f"write {{{name!r}: (jnp.sum(values), jnp.float32(values.size))}}"
        )
    value, weight = pair
    return jnp.asarray(value, jnp.float32), None if weight is None else jnp.asarray(weight, jnp.float32)


def with_weights(batch: Batch) -> Batch:
    """Add `weights` of 1 to a batch without any, so that a loss finds them in training as in evaluation."""
    targets = batch.get("targets")
    if "weights" in batch or not isinstance(targets, (jax.Array, np.ndarray)) or not targets.ndim:
        return batch
    # As `data.Batches` has it: integer targets with more dimensions are one per token.
    shape = targets.shape if jnp.issubdtype(targets.dtype, jnp.integer) else targets.shape[:1]
    return {**batch, "weights": jnp.ones(shape, jnp.float32)}


def _is_numeric(value: Any) -> bool:
    return isinstance(value, (int, float, np.ndarray, np.generic, jax.Array))
