"""What a run says of integer targets that its losses per row leave out because they are negative."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data.rows import ArrayRows, Rows
from jaxtrain.data.stream import BatchStream
from jaxtrain.models.model_call import ModelCall
from jaxtrain.models.task import Batch, CallingLoss, Task
from jaxtrain.models.task_sums import losses_by_row, with_weights
from jaxtrain.models.tasks import is_shipped
from jaxtrain.train.assemble import Run

# Rows that are looked at where targets are not an array of their own: at least the first, at most the second number,
# as far as they are so many bytes. Reading may be decoding.
_FEWEST_ROWS, _MOST_ROWS, _BYTES = 32, 256, 2**20
# The mark of a target that is no id; -1 where no other negative number is there.
_MARKS = ({-100}, {-1})


def left_out_notes(run: Run) -> list[str]:
    """A line where a loss of the user's own leaves out rows of negative integers that look like numbers.

    Numbers such as temperatures in whole degrees are integers too, and a loss per row would be computed without those
    below 0. The targets are looked at on the host, and the loss is traced only where there is something to say.

    Args:
        run: assembled.
    """
    task, spec = run.step.task, run.batches.spec()
    targets = spec.get("targets")
    if is_shipped(task) or not isinstance(targets, jax.ShapeDtypeStruct):
        return []
    if not jnp.issubdtype(targets.dtype, jnp.signedinteger):
        return []
    try:
        values, shown = _seen_targets(run)
    except Exception:  # rows that cannot be read are reported where they are trained on
        return []
    negative = values[values < 0]
    if not negative.size or set(np.unique(negative).tolist()) in _MARKS or not _weighs_targets(run, task, spec):
        return []
    return [
        f"{negative.size:,} of {shown} are integers below 0, which losses per row leave out (task {task.name!r}); give "
        "floats to count them: targets.astype(np.float32)"
    ]


def _seen_targets(run: Run) -> tuple[np.ndarray, str]:
    """Targets on the host, and how many they are in words."""
    rows = run.data.train
    if isinstance(rows, BatchStream):
        values = np.asarray((rows.first or {}).get("targets", ()))
        return values, f"{values.size:,} targets in the first batch"
    if isinstance(rows, ArrayRows):
        values = rows.columns["targets"]
        return values, f"{values.size:,} targets"
    row_bytes = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(rows[0]))
    numbers = np.arange(min(len(rows), _MOST_ROWS, max(_FEWEST_ROWS, _BYTES // max(1, row_bytes))))
    if isinstance(rows, Rows):
        values = np.asarray(rows.gather(numbers)["targets"])
    else:
        read: list[Any] = [rows[int(number)] for number in numbers]
        values = np.asarray([row["targets"] for row in read])
    return values, f"{'' if len(numbers) == len(rows) else 'the first '}{values.size:,} targets"


def _weighs_targets(run: Run, task: Task, spec: Batch) -> bool:
    """Whether the loss gives one number per target, which their signs weigh then."""
    model, found = run.step.sharded_model, []

    def loss(params: Any, model_state: Any, batch: Batch, key: jax.Array) -> jax.Array:
        batch = with_weights(batch)
        with model.context():
            if isinstance(task.loss, CallingLoss):
                average = (params, model_state)
                call = ModelCall(
                    model.apply, params, model_state, True, jnp.int32(0), key, average, model.apply_deferred
                )
                returned = task.loss.function(call, batch, key)
                # The state that the model is left in comes last.
                returned = returned[:2] if isinstance(returned, tuple) and len(returned) == 3 else returned
            else:
                apply = model.apply_deferred if task.takes_deferred_logits else model.apply
                outputs, _ = apply(params, model_state, batch["inputs"], key=key, train=True)
                returned = task.loss(outputs, batch)
        by_row = losses_by_row(returned)
        found.append(by_row is not None and by_row[0].shape == batch["targets"].shape)
        return jnp.int32(0)

    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        jax.eval_shape(loss, model.abstract_params, model.abstract_model_state, dict(spec), key)
    except Exception:  # the trace of the step says what is wrong, and where
        return False
    return found[0]
