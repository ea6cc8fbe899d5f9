"""Whether the loss of a user's task mixes rows, found by trying: accumulation would change such a loss in silence."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError, UserError
from jaxtrain.models.model import Apply, ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.task import Batch, CallingLoss, LogitsLoss, ModelCall, Task, calling_sums, row_dims, task_sums
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
    and the batch of the other rows do. Nothing is said of a loss that cannot be computed on such numbers.

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
    is_known = isinstance(task.loss, LogitsLoss) or (isinstance(task.loss, CallingLoss) and bool(task.loss.ids))
    if count == 1 or task.rows != "separate" or is_known or not _mixes_rows(program, batch):
        return
    raise ConfigError(
        f"the loss of task {task.name!r} mixes rows, and with {count} microbatches a row would meet those of its "
        f"microbatch only; say which are meant: Task({task.name!r}, loss, rows='global') for all rows of the batch, or "
        "rows='microbatch'"
    )


def _mixes_rows(program: StepProgram, batch: Batch) -> bool:
    model, task = program.sharded_model, program.task
    sizes = [leaf.shape[0] for leaf in jax.tree.leaves(dict(batch)) if leaf.ndim]
    if not sizes:
        return False
    numbers = np.random.default_rng(0)
    rows = jax.tree.map(lambda leaf: _example(leaf, sizes[0], numbers), dict(batch))
    others = jax.tree.map(lambda leaf, like: _changed(leaf, like, sizes[0], numbers), rows, dict(batch))
    calls: list[_Drawn] = []

    def gradients(calls: list[_Drawn], rows: Batch) -> Any:
        differentiate = jax.grad(lambda floats: _loss(task, model, _replaying(floats, calls), rows))
        return jax.device_get(differentiate([call.floats for call in calls]))

    try:
        jax.eval_shape(lambda: _loss(task, model, _drawing(model.apply, numbers, calls), rows))
        if any("mixed" in call.dims for call in calls):
            return True
        if not calls or sum(leaf.size for call in calls for leaf in call.leaves) > _MOST_NUMBERS:
            return False
        before = gradients(calls, rows)
        # Of a loss that gives the model several inputs per row, one order of them shows rows apart, the other does not.
        orders = (False, True) if any(call.has_several_per_row for call in calls) else (False,)
        after = {
            by_row: gradients([call.with_other_rows(numbers, by_row=by_row) for call in calls], others)
            for by_row in orders
        }
    except UserError:
        raise
    except Exception:  # a loss may need more than random numbers: it shows its mistakes when the step is traced
        return False
    return all(_first_row_differs(calls, before, changed, by_row=by_row) for by_row, changed in after.items())


def _first_row_differs(calls: "list[_Drawn]", before: Any, after: Any, *, by_row: bool) -> bool:
    """Whether gradients of the outputs of the first row differ, in one order of the outputs (see `_Drawn.places`)."""
    return any(
        _differ(a[index], b[index])
        for call, first, second in zip(calls, before, after, strict=True)
        for index, a, b in zip(call.indices_of_first_row(by_row=by_row), first, second, strict=True)
        if index is not None
    )


def _differ(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether gradients differ by more than another order of sums explains; those that are not finite tell nothing."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return False
    return bool(np.abs(a - b).max(initial=0) > 1e-4 * max(np.abs(a).max(initial=0), np.abs(b).max(initial=0)))


def _example(leaf: Any, size: int, numbers: np.random.Generator) -> np.ndarray:
    """Four rows like those of a leaf: 0 and 1 for integers, positive floats; a leaf without rows keeps its shape."""
    shape = (_ROWS, *leaf.shape[1:]) if leaf.ndim and leaf.shape[0] == size else leaf.shape
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        # Positive, because weights and masks are among them.
        return numbers.uniform(0.5, 1.5, shape).astype(np.float32)
    return (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(leaf.dtype)


def _changed(rows: np.ndarray, like: Any, size: int, numbers: np.random.Generator) -> np.ndarray:
    """The same first row with others behind it; a leaf without rows as it is."""
    if not like.ndim or like.shape[0] != size:
        return rows
    rest = rows[1:]
    other = numbers.uniform(0.5, 1.5, rest.shape).astype(rows.dtype) if rows.dtype.kind == "f" else 1 - rest
    return np.concatenate([rows[:1], other.astype(rows.dtype)])


@dataclass(frozen=True)
class _Drawn:
    """Random outputs of one call of the model, leaf by leaf.

    Attributes:
        structure: of the outputs.
        leaves: NumPy arrays in the dtypes of the outputs; floats are float32.
        dims: see `row_dims`.
    """

    structure: Any
    leaves: list[np.ndarray]
    dims: list[Any]

    @property
    def floats(self) -> list[np.ndarray]:
        """The leaves that have a gradient."""
        return [leaf for leaf in self.leaves if leaf.dtype.kind == "f"]

    @property
    def has_several_per_row(self) -> bool:
        """Whether the model was given several inputs for each row."""
        return any(
            dim is not None and leaf.shape[dim] > _ROWS for leaf, dim in zip(self.leaves, self.dims, strict=True)
        )

    @staticmethod
    def places(count: int, *, by_row: bool) -> np.ndarray:
        """Which of `count` outputs are of the first row: bool [count].

        Args:
            count: of the outputs, which may be several times the rows.
            by_row: whether the outputs of a row are one behind the other (the answers of a pair); if not, those of all
                rows are (a clean and a noisy batch).
        """
        return np.arange(count) < count // _ROWS if by_row else np.arange(count) % _ROWS == 0

    def indices_of_first_row(self, *, by_row: bool) -> list[tuple[Any, ...] | None]:
        """Where the first row is in each of `floats`; None: the leaf has no rows."""
        pairs = zip(self.leaves, self.dims, strict=True)
        return [
            None if dim is None else (*[slice(None)] * dim, self.places(leaf.shape[dim], by_row=by_row))
            for leaf, dim in pairs
            if leaf.dtype.kind == "f"
        ]

    def with_other_rows(self, numbers: np.random.Generator, *, by_row: bool) -> "_Drawn":
        """The same first row with others behind it."""
        changed = []
        for leaf, dim in zip(self.leaves, self.dims, strict=True):
            if dim is None:
                changed.append(leaf)
                continue
            kept = self.places(leaf.shape[dim], by_row=by_row)
            kept = kept.reshape([-1 if d == dim else 1 for d in range(leaf.ndim)])
            changed.append(np.where(kept, leaf, _random(leaf, numbers)))
        return _Drawn(self.structure, changed, self.dims)


def _random(like: Any, numbers: np.random.Generator) -> np.ndarray:
    if jnp.issubdtype(like.dtype, jnp.inexact):
        return numbers.standard_normal(like.shape).astype(np.float32)
    return numbers.integers(0, 2, like.shape).astype(like.dtype)


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


def _drawing(apply: Apply, numbers: np.random.Generator, calls: list[_Drawn]) -> Apply:
    """An `apply` that gives random outputs and adds them to `calls`."""

    def draw(params: Params, model_state: ModelState, inputs: Any, *, key: Any, train: bool) -> tuple[Any, ModelState]:
        def outputs(inputs: Any) -> Any:
            return apply(params, model_state, inputs, key=key, train=train)[0]

        count = next(leaf.shape[0] for leaf in jax.tree.leaves(inputs) if jnp.ndim(leaf))
        dims, shapes = row_dims(outputs, inputs, count)
        leaves = [_random(leaf, numbers) for leaf in jax.tree.leaves(shapes)]
        calls.append(_Drawn(jax.tree.structure(shapes), leaves, dims))
        return jax.tree.unflatten(calls[-1].structure, [jnp.asarray(leaf) for leaf in leaves]), model_state

    return draw


def _replaying(floats: list[Any], calls: list[_Drawn]) -> Apply:
    """An `apply` that gives these outputs, call by call: floats in place of those that were drawn."""
    found = iter(zip(floats, calls, strict=True))

    def replay(
        params: Params, model_state: ModelState, inputs: Any, *, key: Any, train: bool
    ) -> tuple[Any, ModelState]:
        own, call = next(found)
        values = iter(own)
        leaves = [next(values) if leaf.dtype.kind == "f" else jnp.asarray(leaf) for leaf in call.leaves]
        return jax.tree.unflatten(call.structure, leaves), model_state

    return replay
