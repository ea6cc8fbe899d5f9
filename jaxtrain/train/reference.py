"""The entry `reference` of rows: numbers of each row by the parameters that training starts from.

Shapes: B batch, N rows.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config.arguments import check_whole, shown
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.task import ModelCall, Task, with_weights
from jaxtrain.parallel.division import microbatches_by_name
from jaxtrain.train.batch import BatchFeed
from jaxtrain.train.state import EvaluationState, TrainState
from jaxtrain.train.step import TrainStep

if TYPE_CHECKING:
    import grain

    from jaxtrain.data import Data

ENTRY = "reference"


def lacks_reference(task: Task, entries: Mapping[str, Any]) -> bool:
    """Whether a task reads numbers by the first parameters that rows with these entries do not hold."""
    return task.reference is not None and ENTRY not in entries


def awaiting_reference(step: TrainStep, data: "Data", spec: Mapping[str, Any], *, value: float = math.nan) -> "Data":
    """Data whose rows hold one number as their entry `reference`, until the numbers are known.

    `spec` has the shapes of a batch without them; NaN, so that nobody trains on it.
    """
    from jaxtrain.data.stream import BatchStream

    if isinstance(data.train, BatchStream):
        raise ConfigError(
            f"task {step.task.name!r} computes numbers of each row before training, but an iterable of batches has no "
            "rows to return to; give rows with an index (jaxtrain.ArrayRows), or batches with an entry 'reference'"
        )
    model, arguments = step.sharded_model, functools.partial(_values, step)
    found = jax.eval_shape(arguments, model.abstract_params, model.abstract_model_state, dict(spec))
    train, held_out = (
        None if rows is None else np.broadcast_to(np.float32(value), (len(rows), *found.shape[1:]))
        for rows in (data.train, data.validation)
    )
    assert train is not None
    return with_reference(data, train, held_out)


def with_reference(data: "Data", train: np.ndarray, validation: np.ndarray | None) -> "Data":
    """Data with the entry `reference`: float32 [N, ...] of the training rows and of the held-out ones, if any."""
    from jaxtrain.data.rows import with_entry

    held_out = data.validation
    if held_out is not None and validation is not None:
        held_out = with_entry(held_out, ENTRY, validation)
    return dataclasses.replace(data, train=with_entry(data.train, ENTRY, train), validation=held_out)


def reference_rows(
    step: TrainStep, state: TrainState | EvaluationState, rows: "grain.MapDataset", *, batch_size: int = 32
) -> "grain.MapDataset":
    """Add to rows what a task compares with: numbers of each row by the parameters of a state.

    A run does this itself, with the state that it starts from; it is for a loop of your own.

    Args:
        step: of a task with a `reference` (`dpo`).
        state: that training starts from; it stays valid.
        rows: with an index, such as `ArrayRows`.
        batch_size: rows at once; the numbers do not depend on it, apart from rounding.

    Returns:
        The rows with an entry `reference`, float32.

    Raises:
        DataError: a number that is not finite.

    Example:
        >>> pairs = np.arange(64).reshape(4, 2, 8) % 7
        >>> rows = jt.ArrayRows({"inputs": pairs, "targets": pairs})
        >>> size = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "max_sequence_length": 8, "vocab_size": 7}
        >>> model = jt.build_model({"kind": "transformer", **size}, input_shape=(8,))
        >>> step = jt.make_train_step(model, jt.dpo(), optax.adamw(1e-3), mesh=jt.make_mesh(devices=jax.devices()[:1]))
        >>> jt.reference_rows(step, step.init(0), rows, batch_size=4)[0]["reference"].shape
        (2,)
    """
    from jaxtrain.data.batches import check_rows
    from jaxtrain.data.rows import with_entry

    check_rows(rows, what="reference_rows", write="reference_rows(step, state, jaxtrain.ArrayRows({...}))")
    batch_size = check_whole(batch_size, what="reference_rows: batch_size", least=1, write="batch_size=32")
    if isinstance(state, TrainState):
        state = EvaluationState(state.params, state.model_state)
    params, model_state = state.evaluation_params, state.evaluation_model_state
    return with_entry(rows, ENTRY, compute_reference(step, params, model_state, rows, batch_size, what="the rows"))


def compute_reference(
    step: TrainStep,
    params: Params,
    model_state: ModelState,
    rows: "grain.MapDataset",
    batch_size: int,
    *,
    workers: int | None = None,
    what: str,
) -> np.ndarray:
    """Compute the entry `reference` of N rows, float32 [N, ...]; with several processes all call this, and get all.

    `batch_size` is that over all devices, `workers` threads that read rows one by one (None: all cores),
    `what` the rows in messages. A number that is not finite is a `DataError`.
    """
    from jaxtrain.data import Batches

    batches = Batches(rows, batch_size, seed=0, shuffle=False, workers=workers)
    compute = jax.jit(
        functools.partial(_values, step),
        # Replicated, so that each process can read all of it.
        out_shardings=NamedSharding(step.mesh, PartitionSpec()),
        compiler_options={**step.compiler_options.used} or None,
    )
    # Without microbatches: nothing is kept for a backward pass.
    load = BatchFeed(step.sharded_model, step.task, microbatches_by_name(None, 1)).loader(batches)
    parts = [np.asarray(compute(params, model_state, load(k)).addressable_data(0)) for k in range(len(batches))]
    values = np.concatenate(parts)[: len(rows)]
    wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if wrong.size:
        raise DataError(
            f"row {wrong[0]} of {what} has a reference of {values[wrong[0]].tolist()}, which is not finite; look "
            "for ids outside the vocabulary, or for parameters that are not finite"
        )
    return values


def _values(step: TrainStep, params: Params, model_state: ModelState, batch: Mapping[str, Any]) -> jax.Array:
    """What `Task.reference` gives for a batch: float32 [B, ...]."""
    model, task = step.sharded_model, step.task
    assert task.reference is not None
    entries = {name: leaf for name, leaf in batch.items() if name != ENTRY}
    rows = next(leaf.shape[0] for leaf in jax.tree.leaves(entries) if leaf.ndim)
    with model.context():
        key, average = jax.random.key(0), (params, model_state)
        applied = model.apply_deferred
        call = ModelCall(model.apply, params, model_state, False, jnp.int32(0), key, average, applied)
        found = task.reference(call, with_weights(entries))
    shape = getattr(found, "shape", ())
    if not isinstance(found, jax.Array) or shape[:1] != (rows,) or not math.prod(shape):
        raise ConfigError(
            f"reference of task {task.name!r} must return numbers of each row, [{rows}, ...], but it returned "
            f"{shown(found)}"
        )
    return found.astype(jnp.float32)
