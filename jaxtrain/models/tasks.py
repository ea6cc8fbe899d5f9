"""Tasks: how a loss is computed from outputs and batch. A task adds nothing to a model and knows no mesh.

A loss is a (weighted sum, weight) pair, normalised once by the global weight, so that accumulation, padding and
every mesh give the same number. Shapes: B batch, L sequence, V vocabulary, C classes, O targets.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.call import CalledTask
from jaxtrain.config.kinds import check_loss
from jaxtrain.config.loss import check_blocks
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.ops.loss.cross_entropy import DeferredLogits, cross_entropy, cross_entropy_sums
from jaxtrain.runtime.call import call_function, described

Batch = Mapping[str, Any]
Sums = dict[str, tuple[jax.Array, jax.Array]]
# Weighted sum of the loss and its weight, float32 [], and metric sums.
TaskSums = tuple[jax.Array, jax.Array, Sums]
Loss = Callable[[Any, Batch], TaskSums]


@dataclass(frozen=True)
class LogitsLoss:
    """A loss that takes `DeferredLogits` where outputs hold logits, and may differ in evaluation.

    A `Task.loss` that is a plain function gets computed logits, and training and evaluation both call it.

    Attributes:
        train: as `Task.loss`.
        evaluate: the same without terms that only training needs (z-loss).
    """

    train: Loss
    evaluate: Loss

    def __call__(self, outputs: Any, batch: Batch) -> TaskSums:
        return self.train(outputs, batch)


@dataclass(frozen=True)
class Task:
    """How the outputs of a model are compared with a batch: the loss and its metrics.

    Attributes:
        name: for people and for `run.json`.
        loss: (outputs, batch) -> (weighted sum float32 [], weight float32 [], metrics); each metric is name ->
            (sum, weight) of its own, both scalars or vectors. A batch with `targets` always has `weights`; rows without
            weights count 1. No gradient flows through the weight. If the loss is a `LogitsLoss`, it receives
            `DeferredLogits` in place of logits.
        batch_axes: batch key -> logical axes of its dims; keys left out have ("batch",) first and the rest replicated.
        reads_weights: whether the loss uses the batch's `weights`. If not, evaluation removes the padding rows of the
            last batch before it calls the loss.
        num_classes: outputs -> how many ids `targets` may hold; None: targets are not ids. A batch with a larger id is
            refused when it is read.
    """

    name: str
    loss: Loss
    batch_axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    reads_weights: bool = False
    num_classes: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not callable(self.loss):
            raise ConfigError(
                f"Task takes a name and a loss function, not {_shown(self.name)} and {_shown(self.loss)}; "
                "write Task('name', loss) with loss(outputs, batch) -> (sum, weight, metrics)"
            )

    @property
    def evaluation(self) -> Loss:
        """The loss that evaluation computes."""
        return self.loss.evaluate if isinstance(self.loss, LogitsLoss) else self.loss

    @property
    def takes_deferred_logits(self) -> bool:
        """Whether the loss takes `DeferredLogits` where outputs hold logits."""
        return isinstance(self.loss, LogitsLoss)


# What the step, a row of metrics.jsonl and the evaluator report by themselves.
_RESERVED = (
    *("loss", "grad_norm", "weight", "skipped_steps", "skipped_in_a_row", "learning_rate", "loss_scale"),
    *("step", "tokens", "examples", "tokens_per_second", "examples_per_second", "step_seconds", "data_wait_seconds"),
    *("model_flops_utilization", "device_memory_bytes", "perplexity"),
)


def task_sums(task: Task, outputs: Any, batch: Batch, *, train: bool) -> TaskSums:
    """Compute the loss of a task, its weight and its metrics, and check what the loss returned.

    Args:
        task: whose loss is computed.
        outputs: of the model.
        batch: its rows.
        train: True in a train step, False in evaluation.

    Returns:
        Sum float32 [], weight float32 [], and (sum, weight) pairs.

    Raises:
        ConfigError: the loss returned something else.
    """
    found = (task.loss if train else task.evaluation)(outputs, _with_weights(batch))
    wanted = f"the loss of task {task.name!r} must return (sum, weight, metrics)"
    example = "return jnp.sum(losses), jnp.float32(losses.size), {}"
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        count = f"{len(found)} values" if isinstance(found, (tuple, list)) else _shown(found)
        raise ConfigError(f"{wanted}, but it returned {count}; write `{example}`")
    total, weight, metrics = found
    for name, value in (("sum", total), ("weight", weight)):
        if not _is_numeric(value) or jnp.shape(value) != ():
            raise ConfigError(f"{wanted}, two numbers and a dict, but its {name} is {_shown(value)}; write `{example}`")
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"{wanted}, but its metrics are {_shown(metrics)}; write `{example}`")
    for name, pair in metrics.items():
        if name in _RESERVED:
            raise ConfigError(f"task {task.name!r} reports a metric {name!r}, which is reported already; rename it")
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(_is_numeric(value) for value in pair):
            raise ConfigError(
                f"metric {name!r} of task {task.name!r} must be a pair (sum, weight), not {_shown(pair)}; "
                f"write {{{name!r}: (jnp.sum(values), jnp.float32(values.size))}}"
            )
    pairs = {name: (_as_array(value), _as_array(by)) for name, (value, by) in metrics.items()}
    return jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32), pairs


def divisor(weight: jax.Array) -> jax.Array:
    """Choose what a sum is divided by to be a mean: float32 [], the weight (a negative one too), or 1 where it is 0."""
    return jnp.where(weight != 0, weight, 1)


def _with_weights(batch: Batch) -> Batch:
    """Add `weights` of 1 to a batch without any, so that a loss finds them in training as in evaluation."""
    targets = batch.get("targets")
    if "weights" in batch or not isinstance(targets, (jax.Array, np.ndarray)) or not targets.ndim:
        return batch
    # As `data.Batches` has it: integer targets with more dimensions are one per token.
    shape = targets.shape if jnp.issubdtype(targets.dtype, jnp.integer) else targets.shape[:1]
    return {**batch, "weights": jnp.ones(shape, jnp.float32)}


def _as_array(value: Any) -> jax.Array:
    return jnp.asarray(value, jnp.float32)


def _is_numeric(value: Any) -> bool:
    return isinstance(value, (int, float, np.ndarray, np.generic, jax.Array))


def _shown(value: Any) -> str:
    """Show a value in an error message: its type and shape, never its numbers."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array {value.dtype.name}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and isinstance(getattr(value, "__name__", None), str):
        return f"the function {value.__name__}"
    return f"a {type(value).__name__}"


def target_weights(batch: Batch) -> jax.Array:
    """Weigh each target of a batch: by its `weights` or 1, and by 0 where the target is negative.

    Args:
        batch: `targets` of any shape; integers below 0 (-100, say) are ignored, as everywhere in the field. Optional
            `weights` of the same shape, or of its first dimensions ([B] for targets [B, L]).

    Returns:
        float32, of the shape of the targets.

    Raises:
        ConfigError: no targets, or weights of another shape.
    """
    weights, targets = _weights(batch), batch["targets"]
    return jnp.where(targets < 0, 0.0, weights) if jnp.issubdtype(targets.dtype, jnp.integer) else weights


def _weights(batch: Batch) -> jax.Array:
    """The batch's `weights`, or 1, broadcast to the shape of the targets: float32."""
    if "targets" not in batch:
        raise ConfigError(f"the task needs an entry 'targets', but the batch holds {', '.join(batch) or 'nothing'}")
    shape, weights = batch["targets"].shape, batch.get("weights")
    if weights is None:
        return jnp.ones(shape, jnp.float32)
    if weights.shape != shape[: weights.ndim]:
        raise ConfigError(
            f"weights {list(weights.shape)} do not fit targets {list(shape)}; give one weight per target, or per row"
        )
    weights = jnp.asarray(weights, jnp.float32)
    return jnp.broadcast_to(weights.reshape(*weights.shape, *[1] * (len(shape) - weights.ndim)), shape)


def _checked_ids(task: str, logits: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Check and prepare the targets and weights of a loss over classes.

    Args:
        task: its name, for error messages.
        logits: [..., V], computed or deferred.
        batch: `targets` [...] and optional `weights`.

    Returns:
        int32 ids from 0 on, and float32 weights, NaN for an id that no logit has; both [...].

    Raises:
        ConfigError: logits, targets or weights of the wrong shape or dtype.
    """
    if isinstance(logits, DeferredLogits):
        shape, dtype = (*logits.hidden.shape[:-1], logits.vocabulary), logits.hidden.dtype
    elif isinstance(logits, (jax.Array, np.ndarray)):
        shape, dtype = logits.shape, logits.dtype
    else:
        raise ConfigError(f"{task} needs logits [B, ..., classes] from the model, which gives {_shown(logits)}")
    weights = target_weights(batch)
    targets = batch["targets"]
    if jnp.issubdtype(targets.dtype, jnp.integer):
        # The number of classes may not fit into the 8 or 16 bits that ids are stored in.
        targets = targets.astype(jnp.int32)
    if not shape or not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(f"{task} needs logits [B, ..., classes], but the model gives {dtype.name}{list(shape)}")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ConfigError(
            f"{task} needs integer targets, but they are {targets.dtype.name}{list(targets.shape)}; "
            "give class numbers (int32), or use regression()"
        )
    if targets.shape != shape[:-1]:
        if targets.shape[-1:] == (1,) and targets.shape[:-1] == shape[:-1]:
            hint = "drop the last dimension: targets[..., 0]"
        else:
            hint = f"give integer targets {list(shape[:-1])}"
        raise ConfigError(f"{task}: targets {list(targets.shape)} do not fit logits {list(shape)}; {hint}")
    # Host arrays with such ids are refused when they are read. On the device a number cannot raise, but NaN is seen.
    weights = jnp.where((targets >= shape[-1]) & (weights != 0), jnp.nan, weights)
    return jnp.maximum(targets, 0), weights


def _num_classes(outputs: Any) -> int:
    """Read the number of classes off logits, alone or under the key "logits"."""
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs
    return logits.vocabulary if isinstance(logits, DeferredLogits) else logits.shape[-1]


def language_modeling(
    *,
    z_loss: float | None = None,
    logits: Literal["auto", "whole", "tokens", "vocabulary"] = "auto",
    block: int | None = None,
) -> Task:
    """Predict the next token: logits [B, L, V] or deferred, `targets` int32 [B, L], optional `weights` [B, L] or [B].

    Negative targets are ignored.

    A model with experts gives a dict: `logits`, `router_loss` [B, L] (added to the loss of each token, in training) and
    numbers that are reported as they are.

    Args:
        z_loss: weight of the squared logsumexp, in training; None: without it.
        logits: how deferred logits are partitioned into blocks (`ops/loss/blocks.py`); auto: from their sizes.
        block: tokens or ids of a block; None: from the sizes.

    Returns:
        The task.

    Raises:
        ConfigError: a block size for logits that are not partitioned.
    """
    check_blocks(logits, block)

    def loss_with(z_loss: float | None, outputs: Any, batch: Batch) -> TaskSums:
        more = dict(outputs) if isinstance(outputs, Mapping) else {"logits": outputs}
        found = more.pop("logits", None)
        targets, weights = _checked_ids("language_modeling", found, batch)
        weight = jnp.sum(weights)
        by = None if logits == "auto" else logits
        sums = cross_entropy_sums(found, targets, weights, z_loss=z_loss, by=by, size=block)
        total, metrics = sums.total, {}
        if z_loss is not None:
            metrics["z_loss"] = (sums.z_loss, weight)
        if "router_loss" in more:
            router_loss = jnp.sum(more.pop("router_loss") * weights)
            metrics["router_loss"] = (router_loss, weight)
            total = total + router_loss
        if metrics:
            metrics["cross_entropy"] = (sums.cross_entropy, weight)
        return total, weight, {**metrics, **{name: (value, jnp.float32(1)) for name, value in more.items()}}

    axes = {key: ("batch", "sequence") for key in ("inputs", "targets", "weights")}
    loss = LogitsLoss(functools.partial(loss_with, z_loss), functools.partial(loss_with, None))
    return Task("language_modeling", loss, axes, reads_weights=True, num_classes=_num_classes)


def classification() -> Task:
    """Predict one class per row or position: logits [B, ..., C], `targets` int32 [B, ...], optional `weights`.

    Weights are of the shape of the targets, or [B]. Negative targets are ignored. The accuracy is reported.

    Returns:
        The task.
    """

    def loss(outputs: Any, batch: Batch) -> TaskSums:
        targets, weights = _checked_ids("classification", outputs, batch)
        weight = jnp.sum(weights)
        right = jnp.argmax(outputs, axis=-1) == targets
        accuracy = jnp.sum(jnp.where(right, weights, 0.0))
        return jnp.sum(cross_entropy(outputs, targets) * weights), weight, {"accuracy": (accuracy, weight)}

    return Task("classification", loss, reads_weights=True, num_classes=_num_classes)


def regression() -> Task:
    """Predict numbers: outputs [B, O], `targets` [B, O] or [B] of any real dtype, optional `weights` [B, O] or [B].

    The loss is the squared error; that of a row is its mean over O, and without weights every row counts 1.

    Returns:
        The task.
    """

    def loss(outputs: Any, batch: Batch) -> TaskSums:
        if not isinstance(outputs, (jax.Array, np.ndarray)):
            raise ConfigError(f"regression needs outputs [B, O] from the model, which gives {_shown(outputs)}")
        weights, targets = _weights(batch), batch["targets"]
        if not jnp.issubdtype(targets.dtype, jnp.integer) and not jnp.issubdtype(targets.dtype, jnp.floating):
            raise ConfigError(f"regression needs real targets, but they are {targets.dtype.name}; give float32")
        if _without_last_one(outputs.shape) != _without_last_one(targets.shape):
            raise ConfigError(
                f"regression: targets {list(targets.shape)} do not fit outputs {list(outputs.shape)}; "
                "give the model as many outputs as a row has targets"
            )
        # A target that is missing (NaN) and weighs 0 counts nothing; 0 times NaN would.
        known = jnp.where(weights != 0, targets.astype(jnp.float32), 0.0)
        errors = jnp.square(outputs.astype(jnp.float32).reshape(targets.shape) - known)
        rows = targets.shape[0]
        by_row = (jnp.mean((x * weights).reshape(rows, -1), axis=-1) for x in (errors, jnp.ones_like(errors)))
        total, weight = map(jnp.sum, by_row)
        return total, weight, {}

    return Task("regression", loss, reads_weights=True)


def _without_last_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:-1] if len(shape) == 2 and shape[-1] == 1 else shape


def build_task(config: Config) -> Task:
    """Build the task that a config describes.

    Args:
        config: its `task` and `loss`.

    Raises:
        ConfigError: options of a loss that the task does not have, or a function of `task.call` that cannot be called
            or returns something else.
    """
    if config.task == "language_modeling":
        return language_modeling(z_loss=config.loss.z_loss, logits=config.loss.logits, block=config.loss.block)
    check_loss(config)
    if isinstance(config.task, CalledTask):
        made = call_function("task", config.task.call, config.task.args)
        if isinstance(made, Task):
            return made
        raise ConfigError(
            f"task.call={config.task.call} returned {described(made)}, not a jaxtrain.Task; return "
            "jaxtrain.Task('name', loss) with loss(outputs, batch) -> (sum, weight, metrics)"
        )
    return TASKS[config.task]()


TASKS: Mapping[str, Callable[[], Task]] = {
    "language_modeling": language_modeling,
    "classification": classification,
    "regression": regression,
}
