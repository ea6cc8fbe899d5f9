"""Whether the loss of a user's task mixes rows, found by trying: accumulation would change such a loss in silence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError, UserError
from jaxtrain.models.model import Apply, ModelState, Params
from jaxtrain.models.model_call import ModelCall
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Batch, LogitsLoss, Task
from jaxtrain.models.task_sums import calling_sums, task_sums
from jaxtrain.train.program import StepProgram

# Rows that are tried, and numbers of the model's outputs from which nothing is tried: they would take too long.
_ROWS = 4
_MOST_NUMBERS = 2**24


def check_rows_of(task: Task, accumulation_steps: int) -> None:
    """Raise where all rows are wanted of a loss that calls the model itself, in microbatches.

    Raises:
        ConfigError: says what to write instead.
    """
    if task.calls_model and task.rows == "global" and accumulation_steps > 1:
        raise ConfigError(
            f"task {task.name!r} is a Task.calling with rows='global', whose calls cannot be repeated per microbatch; "
            "write Task(name, loss, rows='global') with loss(outputs, batch), or use accumulation_steps=1"
        )


def check_separate_rows(program: StepProgram, batch: Batch) -> None:
    """Raise where a loss that says that its rows are separate mixes them, and the step has microbatches.

    The loss is computed on random outputs of four rows: the gradient of the first row must not change when the outputs
    of the other rows do. Nothing is said of a loss that cannot be computed on such numbers.

    Args:
        program: of the step.
        batch: arrays or shapes of all rows.

    Raises:
        ConfigError: the loss mixes rows.
    """
    task = program.task
    count = program.settings.accumulation_steps
    if program.pipeline is not None:
        count = program.pipeline.schedule.num_microbatches
    if count == 1 or task.rows != "separate" or isinstance(task.loss, LogitsLoss) or not _mixes_rows(program, batch):
        return
    raise ConfigError(
        f"the loss of task {task.name!r} mixes rows, and with {count} microbatches a row would meet those of its "
        f"microbatch only; say which are meant: Task({task.name!r}, loss, rows='global') for all rows of the batch, or "
        "rows='microbatch'"
    )


def _mixes_rows(program: StepProgram, batch: Batch) -> bool:
    model, task = program.sharded_model, program.task
    sizes = [leaf.shape[0] for leaf in jax.tree.leaves(dict(batch)) if leaf.ndim]
    if not sizes or min(sizes) < _ROWS:
        return False
    numbers = np.random.default_rng(0)
    rows = jax.tree.map(lambda leaf: _example(leaf, sizes[0], numbers), dict(batch))
    drawn: list[Any] = []

    def loss(given: list[Any]) -> jax.Array:
        return _loss(task, model, _replaying(given), rows)

    try:
        jax.eval_shape(lambda: _loss(task, model, _drawing(model.apply, numbers, drawn), rows))
        if not drawn or sum(leaf.size for leaf in jax.tree.leaves(drawn)) > _MOST_NUMBERS:
            return False
        changed = jax.tree.map(lambda leaf: np.concatenate([leaf[:1], _like(leaf[1:], numbers)]), drawn)
        differentiate = jax.jit(jax.grad(loss))
        before, after = (jax.device_get(differentiate(given)) for given in (drawn, changed))
    except UserError:
        raise
    except Exception:  # a loss may need more than random numbers: it shows its mistakes when the step is traced
        return False
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return any(_differ(a[0], b[0]) for a, b in pairs)


def _differ(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether gradients differ by more than another order of sums explains; those that are not finite tell nothing."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return False
    return bool(np.abs(a - b).max(initial=0) > 1e-4 * max(np.abs(a).max(initial=0), np.abs(b).max(initial=0)))


def _example(leaf: Any, size: int, numbers: np.random.Generator) -> np.ndarray:
    """Four rows like those of a leaf: 0 and 1 for integers, random floats; a leaf without rows keeps its shape."""
    shape = (_ROWS, *leaf.shape[1:]) if leaf.ndim and leaf.shape[0] == size else leaf.shape
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return numbers.standard_normal(shape).astype(np.float32)
    return (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(leaf.dtype)


def _like(leaf: np.ndarray, numbers: np.random.Generator) -> np.ndarray:
    return numbers.standard_normal(leaf.shape).astype(leaf.dtype)


def _loss(task: Task, model: ShardedModel, apply: Apply, rows: Batch) -> jax.Array:
    """The sum of losses with other outputs than the model's."""
    key = jax.random.key(0)
    # Zeros that nothing reads: the outputs do not come from parameters.
    params, state = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (model.abstract_params, model.abstract_model_state)
    )
    if not task.calls_model:
        return task_sums(task, apply(params, state, rows["inputs"], key=key, train=True)[0], rows, train=True)[0]
    call = ModelCall(apply, params, state, True, jnp.int32(0), key, (params, state))
    (total, _, _), _ = calling_sums(task, call, rows, key)
    return total


def _drawing(apply: Apply, numbers: np.random.Generator, drawn: list[Any]) -> Apply:
    """An `apply` that gives random outputs and adds them to `drawn`."""

    def draw(params: Params, model_state: ModelState, inputs: Any, *, key: Any, train: bool) -> tuple[Any, ModelState]:
        def outputs(params: Params, state: ModelState, inputs: Any, key: Any) -> Any:
            return apply(params, state, inputs, key=key, train=train)[0]

        shapes = jax.eval_shape(outputs, params, model_state, inputs, key)
        drawn.append(jax.tree.map(lambda x: numbers.standard_normal(x.shape).astype(np.float32), shapes))
        return jax.tree.map(jnp.asarray, drawn[-1]), model_state

    return draw


def _replaying(given: list[Any]) -> Apply:
    """An `apply` that gives these outputs, one after the other."""
    outputs = iter(given)

    def replay(
        params: Params, model_state: ModelState, inputs: Any, *, key: Any, train: bool
    ) -> tuple[Any, ModelState]:
        return next(outputs), model_state

    return replay
