"""What a task is: how a loss is computed. A task adds nothing to a model and knows no mesh.

A loss is a (weighted sum, weight) pair, normalised once by the global weight, so that accumulation, padding and
every mesh give the same number. `tasks.py` has the shipped ones.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.arguments import shown
from jaxtrain.config.schema import IGNORED
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import check_axes
from jaxtrain.models.model import Apply, ModelState, Params
from jaxtrain.ops.loss.cross_entropy import DeferredLogits, id_weights
from jaxtrain.runtime.tree import merge_leaves

Batch = Mapping[str, Any]
# name -> (sum, weight), or (total, None) for what is not divided. A sum [C] with weights [2, C] is a mean over
# classes (`sum_ratios`).
Sums = dict[str, tuple[jax.Array, jax.Array | None]]
# Weighted sum of the loss and its weight, float32 [], and metric sums.
TaskSums = tuple[jax.Array, jax.Array, Sums]
# A user's may return other forms, which `task_sums` brings into this one.
Loss = Callable[[Any, Batch], TaskSums]
Rows = Literal["separate", "global"]

RENAME = "write fit(columns={'inputs': 'image', 'targets': 'label'}), or rename the entries"
# Metrics of the step itself.
_RESERVED = ("loss", "grad_norm", "weight", "learning_rate")


class Reference(NamedTuple):
    """The model that training starts from, which a loss of `Task.calling(..., reference=True)` compares with.

    Attributes:
        params: trained parameters in the compute dtype, None in place of frozen ones, which are the same throughout.
        model_state: what the model changes without a gradient (batch statistics).
    """

    params: Params
    model_state: ModelState


@dataclass(frozen=True, eq=False)
class ModelCall:
    """The model as a loss of `Task.calling` gets it: `outputs = apply(inputs, key=key)`.

    It computes as the step does: in the compute dtype, sharded, with remat. Gradients flow to `params`; they stop where
    the loss says `jax.lax.stop_gradient`, at the moving average, and at the model that training starts from.

    Attributes:
        apply_model: what computes: `ShardedModel.apply`.
        params: the parameters that are trained, with the frozen ones, as the state stores them; in evaluation, those
            that are evaluated.
        model_state: what the model changes without a gradient (batch statistics), before this batch.
        train: True in a train step, False in evaluation.
        step: int32 [], steps done before this one.
        key: what calls without a key of their own draw from.
        apply_deferred: `ShardedModel.apply_deferred`; None: `apply_model`.

    Example:
        >>> def loss(apply, batch, key):  # apply is a ModelCall
        ...     clean, noisy = apply(batch["inputs"]), apply(batch["inputs"] + jax.random.normal(key, (8, 4)))
        ...     return jnp.sum(jnp.square(clean - noisy)), jnp.float32(8), {}
        >>> step = jt.make_train_step(model, jt.Task.calling("smooth", loss), optax.adamw(1e-3))
    """

    apply_model: Apply
    params: Params
    model_state: ModelState
    train: bool
    step: jax.Array
    key: jax.Array
    _average: tuple[Params, ModelState] | None = None
    apply_deferred: Apply | None = None
    _reference: Reference | None = None
    _calls: Iterator[int] = field(default_factory=itertools.count)

    @property
    def average(self) -> Params:
        """The moving average of the parameters, with the frozen ones; no gradient flows to it."""
        if self._average is None:
            raise ConfigError(
                "the loss reads the moving average of the parameters, but the step keeps none; give make_train_step, "
                "or the group optimizer, the decay of one"
            )
        return jax.lax.stop_gradient(self._average[0])

    @property
    def reference(self) -> "ModelCall":
        """The model that training starts from, to be called likewise: without dropout, and no gradient flows to it."""
        if self._reference is None:
            raise ConfigError(
                "the loss compares with the model that training starts from, which the state does not hold; make its "
                "task with Task.calling(..., reference=True), and evaluate the state of a step, or a run"
            )
        params = jax.lax.stop_gradient(merge_leaves(self._reference.params, self.params))
        return replace(self, params=params, model_state=self._reference.model_state, train=False)

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return the outputs of the model; arguments as for `with_state`."""
        return self.with_state(inputs, **options)[0]

    def with_state(
        self,
        inputs: Any,
        *,
        key: jax.Array | None = None,
        train: bool | None = None,
        params: Params | None = None,
        model_state: ModelState | None = None,
        deferred: bool = False,
    ) -> tuple[Any, ModelState]:
        """Return the outputs of the model, and its model_state after them.

        Args:
            inputs: array or tree [batch, ...]; floats are cast to the compute dtype.
            key: typed key of dropout and the like; None: in training a key of this call's own, in evaluation none.
            train: whether dropout and batch statistics behave as in training; None: as the loss is called.
            params, model_state: others of the same structure; None: those of this record.
            deferred: whether outputs hold `DeferredLogits` in place of logits, where the model has them.
        """
        train, number = self.train if train is None else train, next(self._calls)
        if key is None and train:
            key = jax.random.fold_in(self.key, number)
        params = self.params if params is None else params
        model_state = self.model_state if model_state is None else model_state
        apply = (self.apply_deferred if deferred else None) or self.apply_model
        return apply(params, model_state, inputs, key=key, train=train)

    def deferred(self, inputs: Any, **options: Any) -> Any:
        """Return the outputs with `DeferredLogits` in place of logits, which `cross_entropy` computes in blocks."""
        return self.with_state(inputs, deferred=True, **options)[0]


@dataclass(frozen=True)
class LogitsLoss:
    """A loss that takes `DeferredLogits` where outputs hold logits, and may differ in evaluation.

    A `Task.loss` that is a plain function gets computed logits, and training and evaluation both call it.

    Attributes:
        train: as `Task.loss`.
        evaluate: the same without terms that only training needs (z-loss).

    Example:
        >>> def loss(logits, batch, *, z_loss=1e-4):
        ...     weights = jt.target_weights(batch)
        ...     sums = jt.cross_entropy_sums(logits, batch["targets"], weights, z_loss=z_loss)
        ...     return sums.total, jnp.sum(weights), {}
        >>> plain = lambda logits, batch: loss(logits, batch, z_loss=None)
        >>> task = jt.Task("mine", jt.LogitsLoss(loss, plain), reads_weights=True)
    """

    train: Loss
    evaluate: Loss

    def __call__(self, outputs: Any, batch: Batch) -> TaskSums:
        return self.train(outputs, batch)


@dataclass(frozen=True)
class CallingLoss:
    """A loss that calls the model itself; made by `Task.calling`."""

    # (apply, batch, key) -> what `Task.loss` returns; `apply` is a `ModelCall`.
    function: Callable[[ModelCall, Batch, jax.Array], Any]
    reference: bool = False  # see `Task.calling`
    # entries of a batch that hold ids of the model's vocabulary; larger ones are refused when a batch is read.
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """How the outputs of a model are compared with a batch: the loss and its metrics.

    Attributes:
        name: for people and for `run.json`.
        loss: (outputs, batch) -> (weighted sum float32 [], weight float32 [], metrics), or (losses [B, ...], metrics),
            which the weights of the batch weigh. Each metric is name -> (sum, weight) of its own, both scalars or
            arrays; name -> (total, None), which is added up and not divided (counts, a confusion matrix); or, beside
            losses per row, an array of their shape. A batch with `targets` always has `weights`; rows without weights
            count 1. No gradient flows through the weight. If the loss is a `LogitsLoss`, it receives `DeferredLogits`
            in place of logits.
        batch_axes: batch key -> logical axes of its dims; keys left out have ("batch",) first and the rest replicated.
        reads_weights: whether the loss uses the batch's `weights`. If not, evaluation removes the padding rows of the
            last batch before it calls the loss.
        num_classes: outputs -> how many ids `targets` may hold; None: targets are not ids. A batch with a larger id is
            refused when it is read.
        rows: what the loss of a row depends on. separate: on that row alone. global: on all rows of the batch, such as
            contrastive losses; accumulation and pipelines are then refused.

    Example:
        >>> def brier(outputs, batch):
        ...     errors = jnp.square(jax.nn.softmax(outputs) - jax.nn.one_hot(batch["targets"], 3))
        ...     return jnp.sum(errors, axis=-1), {}
        >>> step = jt.make_train_step(model, jt.Task("brier", brier), optax.adamw(1e-3))
    """

    name: str
    loss: Loss | CallingLoss
    batch_axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    reads_weights: bool = False
    num_classes: Callable[[Any], int] | None = None
    rows: Rows = "separate"

    def __post_init__(self) -> None:
        if self.rows not in get_args(Rows):
            raise ConfigError(f"Task: rows={self.rows!r}; use separate or global")
        check_axes(self.batch_axes, what="Task: batch_axes", write="batch_axes={'inputs': ('batch', 'sequence')}")

    @classmethod
    def calling(
        cls,
        name: str,
        loss: Callable[[ModelCall, Batch, jax.Array], Any],
        *,
        batch_axes: Mapping[str, tuple[str | None, ...]] | None = None,
        reads_weights: bool = False,
        rows: Rows = "separate",
        reference: bool = False,
    ) -> "Task":
        """Make a task whose loss calls the model itself, as often as it likes, also with other parameters.

        Args:
            name: for people and for `run.json`.
            loss: (apply, batch, key) -> as `Task.loss`, or with the model_state as a further entry at the end where the
                model has one (batch statistics). `apply(inputs, *, key, train, params, model_state)` gives the model's
                outputs; see `ModelCall`, which also holds the parameters, their moving average and the step number.
                `batch` is any dict of arrays; it needs no entry `inputs`. `key` is of the step and the microbatch; in
                evaluation, of the batch's number. Its numbers are drawn for all rows at once, the same on every mesh.
            batch_axes, reads_weights, rows: as in `Task`.
            reference: whether the loss compares with the model that training starts from, which it then calls as
                `apply.reference(inputs)`. The state keeps a copy of the trained parameters for it.

        Returns:
            The task. It is refused on a mesh with `pipe` > 1, whose stages run a model once.

        Example:
            >>> def loss(apply, batch, key):
            ...     noise = jax.random.normal(key, batch["inputs"].shape)
            ...     return jnp.mean((apply(batch["inputs"] + noise) - noise) ** 2, axis=-1), {}
            >>> task = Task.calling("denoise", loss)
        """
        return cls(name, CallingLoss(loss, reference), batch_axes or {}, reads_weights, rows=rows)

    def __repr__(self) -> str:
        return f"Task {self.name!r}"

    @property
    def calls_model(self) -> bool:
        """Whether the loss calls the model itself."""
        return isinstance(self.loss, CallingLoss)

    @property
    def reads_reference(self) -> bool:
        """Whether the loss calls the model that training starts from."""
        return isinstance(self.loss, CallingLoss) and self.loss.reference

    @property
    def evaluation(self) -> Any:
        """The loss that evaluation computes."""
        return self.loss.evaluate if isinstance(self.loss, LogitsLoss) else self.loss

    @property
    def takes_deferred_logits(self) -> bool:
        """Whether the loss takes `DeferredLogits` where outputs hold logits."""
        return isinstance(self.loss, LogitsLoss)


def divisor(weight: jax.Array) -> jax.Array:
    """Choose what a sum is divided by to be a mean: float32 [], the weight (a negative one too), or 1 where it is 0."""
    return jnp.where(weight != 0, weight, 1)


def sum_ratios(total: Any, weight: Any) -> tuple[Any, Any]:
    """Return the sum and the weight of a mean over classes, and every other sum and weight as they are.

    Args:
        total: NumPy or jax array, [C] for a mean over classes.
        weight: array or None; [2, C] for a mean over classes: what the total of each class is divided by, where 0 makes
            the ratio 0, and what is not 0 for the classes that the mean is over.
    """
    if weight is None or total.ndim != 1 or weight.shape != (2, *total.shape):
        return total, weight
    ratios = total / (weight[0] + (weight[0] == 0))
    return ratios.sum(), (weight[1] != 0).sum()


def task_sums(task: Task, outputs: Any, batch: Batch, *, train: bool) -> TaskSums:
    """Compute the loss of a task, its weight and its metrics, in a train step or in evaluation.

    Raises:
        ConfigError: the loss returned something else than `Task.loss` says.
    """
    batch = with_weights(batch)
    loss: Any = task.loss if train else task.evaluation
    found = loss(outputs, batch)
    if by_row := _losses_by_row(found):
        _check_no_pairs(task, by_row[0], outputs, batch)
    return _as_sums(task, found, batch)


def calling_sums(task: Task, call: ModelCall, batch: Batch, key: jax.Array) -> tuple[TaskSums, ModelState]:
    """Compute what `task_sums` does for a task that calls the model itself, and the model_state after this batch."""
    assert isinstance(task.loss, CallingLoss)
    batch = with_weights(batch)
    found = task.loss.function(call, batch, key)
    # Metrics are the last entry of a loss without state, so that one after them is the state.
    if isinstance(found, tuple | list) and any(isinstance(item, Mapping) for item in found[:-1]):
        state = jax.tree.map(lambda new, old: new.astype(old.dtype), found[-1], call.model_state)
        return _as_sums(task, tuple(found[:-1]), batch), state
    if call.train and jax.tree.leaves(call.model_state):
        raise ConfigError(
            f"the model of task {task.name!r} has a model_state (batch statistics), which its loss must return: write "
            "`outputs, state = apply.with_state(inputs, key=key)` and `return sum, weight, metrics, state`"
        )
    return _as_sums(task, found, batch), call.model_state


def _losses_by_row(found: Any) -> tuple[jax.Array, Mapping[str, Any]] | None:
    """Return losses [B, ...] and metrics, where a loss returned these; None: it returned something else."""
    is_pair = isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[1], Mapping)
    losses: Any = found[0] if is_pair else found
    metrics = found[1] if is_pair else {}
    return (jnp.asarray(losses), metrics) if _is_numeric(losses) and jnp.ndim(losses) else None


def _check_no_pairs(task: Task, losses: jax.Array, outputs: Any, batch: Batch) -> None:
    """Raise where losses [B, B] are of every row with every other: outputs [B, 1] against targets [B] broadcast so."""
    rows = losses.shape[0]
    compared = [outputs, *(value for name, value in batch.items() if name != "inputs")]
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(compared)]
    # A dimension of them that happens to have the size of the batch is no row.
    if losses.shape == (rows, rows) and rows > 1 and not any(rows in shape[1:] for shape in shapes):
        words = ", ".join(str(list(shape)) for shape in shapes if shape)
        raise ConfigError(
            f"task {task.name!r} returns losses [{rows}, {rows}], of each row with every other, as arrays of two "
            f"shapes broadcast ({words}): write outputs[:, 0], or return jnp.mean(losses, axis=-1)"
        )


def _as_sums(task: Task, found: Any, batch: Batch) -> TaskSums:
    """Return what a loss returned, as sums; see `Task.loss` for the forms."""
    if by_row := _losses_by_row(found):
        losses, given = by_row
        weights = _row_weights(task, losses.shape, batch)
        weight = jnp.sum(weights)

        def total_of(values: jax.Array) -> jax.Array:
            # A row that weighs 0 counts nothing, whatever its loss; 0 times NaN would. (Its gradient must be finite.)
            return jnp.sum(jnp.where(weights != 0, values.astype(jnp.float32), 0.0) * weights)

        def is_by_row(value: Any) -> bool:
            return _is_numeric(value) and jnp.shape(value) == losses.shape

        metrics: Any = {
            name: (total_of(jnp.asarray(value)), weight) if is_by_row(value) else value for name, value in given.items()
        }
        found = (total_of(losses), weight, metrics)
    fits = isinstance(found, tuple | list) and len(found) == 3 and isinstance(found[2], Mapping)
    if not fits or not all(_is_numeric(value) and jnp.shape(value) == () for value in found[:2]):
        returned = f"({', '.join(map(shown, found))})" if isinstance(found, tuple | list) else shown(found)
        raise ConfigError(
            f"the loss of task {task.name!r} must return (sum, weight, metrics), two real numbers and a dict, or "
            f"losses per row and metrics, but it returned {returned}; write `return losses_B, {{}}`"
        )
    total, weight, metrics = found
    sums = {name: _metric(task, name, pair) for name, pair in metrics.items()}
    return jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32), sums


def _metric(task: Task, name: str, pair: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return a metric as (sum, weight), or as (total, None)."""
    if name in _RESERVED:
        raise ConfigError(f"task {task.name!r} reports a metric {name!r}, which jaxtrain reports itself; rename it")
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2
    if not is_pair or not _is_numeric(pair[0]) or not (pair[1] is None or _is_numeric(pair[1])):
        raise ConfigError(
            f"metric {name!r} of task {task.name!r} must be a pair (sum, weight), or (total, None), not {shown(pair)}"
        )
    value, weight = pair
    return jnp.asarray(value, jnp.float32), None if weight is None else jnp.asarray(weight, jnp.float32)


def _is_numeric(value: Any) -> bool:
    return isinstance(value, int | float | np.ndarray | np.generic | jax.Array) and not np.iscomplexobj(value)


def with_weights(batch: Batch) -> Batch:
    """Add `weights` of 1 to a batch without any, so that a loss finds them in training as in evaluation."""
    targets = batch.get("targets")
    if "weights" in batch or not isinstance(targets, jax.Array | np.ndarray) or not targets.ndim:
        return batch
    # As `data.Batches` has it: integer targets with more dimensions are one per token.
    shape = targets.shape if jnp.issubdtype(targets.dtype, jnp.integer) else targets.shape[:1]
    return {**batch, "weights": jnp.ones(shape, jnp.float32)}


def _row_weights(task: Task, shape: tuple[int, ...], batch: Batch) -> jax.Array:
    """Return the weights of losses of this shape: float32 of the same shape."""
    targets, weights = batch.get("targets"), batch.get("weights")
    if getattr(targets, "shape", None) == shape:
        return target_weights(batch)
    if weights is not None and weights.ndim > len(shape) and weights.shape[: len(shape)] == shape:
        # Weights per token beside losses per row: a row counts as its largest token does, and padding as nothing.
        return jnp.max(jnp.asarray(weights, jnp.float32), axis=tuple(range(len(shape), weights.ndim)))
    return _broadcast(weights, shape, f"losses of task {task.name!r}")


def _broadcast(weights: Any, shape: tuple[int, ...], what: str) -> jax.Array:
    """Broadcast weights of the first dimensions of a shape (None: 1) to that shape, in float32."""
    if weights is None:
        return jnp.ones(shape, jnp.float32)
    if weights.shape != shape[: weights.ndim]:
        raise ConfigError(
            f"weights {list(weights.shape)} do not fit {what} {list(shape)}; give one weight per target, or per row"
        )
    weights = jnp.asarray(weights, jnp.float32)
    return jnp.broadcast_to(weights.reshape(*weights.shape, *[1] * (len(shape) - weights.ndim)), shape)


def target_weights(batch: Batch) -> jax.Array:
    """Weigh each target of a batch: by its `weights` or 1, and by 0 where the target is the integer -100.

    Args:
        batch: `targets` of any shape; other negative integers are targets like all others. Optional `weights` of the
            same shape, or of its first dimensions ([B] for targets [B, L]).

    Returns:
        float32, of the shape of the targets.

    Raises:
        ConfigError: no targets, or weights of another shape.

    Example:
        >>> jt.target_weights({"targets": jnp.array([2, -100, 0])}).tolist()
        [1.0, 0.0, 1.0]
    """
    weights = broadcast_weights(batch)
    targets = batch["targets"]
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        return weights
    # 8 bits without a sign hold no -100 to compare with.
    return jnp.where(targets.astype(jnp.int32) == IGNORED, 0.0, weights)


def broadcast_weights(batch: Batch) -> jax.Array:
    """Broadcast the batch's `weights`, or 1, to the shape of the targets: float32; errors as of `target_weights`."""
    if batch.get("targets") is None:
        held = ", ".join(name for name, leaf in batch.items() if leaf is not None)
        raise ConfigError(f"the task needs an entry 'targets', but the batch holds {held or 'nothing'}; {RENAME}")
    return _broadcast(batch.get("weights"), batch["targets"].shape, "targets")


def checked_ids(task: str, logits: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Check and prepare the targets and weights [...] of a loss over classes, for logits [..., V], also deferred.

    Returns:
        int32 ids that logits have, and float32 weights, NaN where a target is an id that no logit has; both [...].
    """
    shape: tuple[int, ...] = getattr(logits, "shape", ())
    if isinstance(logits, DeferredLogits):
        shape = (*logits.hidden.shape[:-1], logits.vocabulary)
    elif not shape or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ConfigError(f"{task} needs logits [B, ..., classes] from the model, which gives {shown(logits)}")
    weights, targets = broadcast_weights(batch), batch["targets"]
    if not jnp.issubdtype(targets.dtype, jnp.integer) or targets.shape != shape[:-1]:
        raise ConfigError(
            f"{task}: targets {targets.dtype.name}{list(targets.shape)} do not fit logits {list(shape)}; give class "
            f"numbers, int32 {list(shape[:-1])}, or use regression()"
        )
    # The number of classes may not fit into the 8 or 16 bits that ids are stored in.
    targets = targets.astype(jnp.int32)
    # Host arrays with such ids are refused when they are read. On the device a number cannot raise, but NaN is seen.
    return jnp.clip(targets, 0, shape[-1] - 1), id_weights(targets, weights, num_ids=shape[-1])


def num_classes(outputs: Any) -> int:
    """Read the number of classes off logits, alone or under the key "logits"."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
    if isinstance(logits, DeferredLogits):
        return logits.vocabulary
    if shape := getattr(logits, "shape", ()):
        return shape[-1]
    raise ConfigError(f"the task needs logits [B, ..., classes] from the model, which gives {shown(outputs)}")
