"""The shipped tasks. Shapes: B batch, L sequence, V vocabulary, C classes, O targets."""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.arguments import shown
from jaxtrain.config.base import CalledTask
from jaxtrain.config.kinds import check_loss
from jaxtrain.config.schema import Config, LossConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout.manual import turn_of
from jaxtrain.layout.sharding import current_layout, sum_over_shards
from jaxtrain.models.metrics import ERRORS, check_metrics, class_metrics
from jaxtrain.models.preferences import dpo, reward
from jaxtrain.models.targets import broadcast_weights, checked_ids, num_classes
from jaxtrain.models.task import Batch, CallingLoss, LogitsLoss, Task, TaskSums, divisor
from jaxtrain.ops.loss.blocks import Logits
from jaxtrain.ops.loss.cross_entropy import cross_entropy, cross_entropy_sums
from jaxtrain.ops.loss.right import weight_of_right
from jaxtrain.runtime.call import call_function, described


def language_modeling(
    *,
    z_loss: float | None = None,
    logits: Literal["auto", "whole", "tokens", "vocabulary"] = "auto",
    block: int | None = None,
) -> Task:
    """Predict the next token: logits [B, L, V] or deferred, `targets` int32 [B, L], optional `weights` [B, L] or [B].

    Negative targets are ignored.

    A model with experts gives a dict: `logits`, in training also `router_loss` [B, L], whose mean is added to the loss,
    and numbers that are reported as they are. The mean is over the `router_tokens` (float32 []) of all devices that the
    router's loss is not 0 for, whatever their weights; without that entry it is by the weights.

    Args:
        z_loss: weight of the squared logsumexp, in training; None: without it.
        logits: how deferred logits are partitioned into blocks (`ops/loss/blocks.py`); auto: from their sizes.
        block: tokens or ids of a block; None: from the sizes.

    Returns:
        The task.

    Raises:
        ConfigError: a block size for logits that are not partitioned, or a weight that is no number.

    Example:
        >>> task = jt.language_modeling(z_loss=1e-4)
        >>> task.batch_axes["targets"]
        ('batch', 'sequence')
    """
    return _token_task("language_modeling", z_loss=z_loss, logits=logits, block=block, counts_right=False)


def masked_language_modeling(
    *,
    z_loss: float | None = None,
    logits: Literal["auto", "whole", "tokens", "vocabulary"] = "auto",
    block: int | None = None,
) -> Task:
    """Name the tokens that were hidden: logits [B, L, V] or deferred, `targets` int32 [B, L], -100 where none was.

    The model sees both sides of a token (`causal=False`). Evaluation reports the accuracy at the hidden tokens. Source:
    Devlin et al. 2019 (arXiv 1810.04805).

    Args:
        z_loss, logits, block: as for `language_modeling`.

    Returns:
        The task.

    Raises:
        ConfigError: as for `language_modeling`.

    Example:
        >>> jt.masked_language_modeling()
        Task 'masked_language_modeling'
    """
    return _token_task("masked_language_modeling", z_loss=z_loss, logits=logits, block=block, counts_right=True)


def sequence_to_sequence(
    *,
    z_loss: float | None = None,
    logits: Literal["auto", "whole", "tokens", "vocabulary"] = "auto",
    block: int | None = None,
) -> Task:
    """Write a text for a text: the decoder's logits [B, T, V] or deferred, `targets` int32 [B, T], optional `weights`.

    Targets of -100 are ignored, such as those after the end. Evaluation reports the accuracy of single tokens, each
    given the right ones before it.

    Args:
        z_loss, logits, block: as for `language_modeling`.

    Returns:
        The task.

    Raises:
        ConfigError: as for `language_modeling`.

    Example:
        >>> jt.sequence_to_sequence(z_loss=1e-4)
        Task 'sequence_to_sequence'
    """
    return _token_task("sequence_to_sequence", z_loss=z_loss, logits=logits, block=block, counts_right=True)


def _token_task(
    name: str, *, z_loss: float | None, logits: Literal["auto"] | Logits, block: int | None, counts_right: bool
) -> Task:
    """A task whose targets are tokens.

    Args:
        name: of the task.
        z_loss, logits, block: as for `language_modeling`.
        counts_right: whether evaluation reports the accuracy, for which the logits are computed once more.
    """
    LossConfig(z_loss=z_loss, logits=logits, block=block)

    def loss_with(z_loss: float | None, counts_right: bool, outputs: Any, batch: Batch) -> TaskSums:
        more = dict(outputs) if isinstance(outputs, Mapping) else {"logits": outputs}
        found = more.pop("logits", None)
        targets, weights = checked_ids(name, found, batch)
        weight = jnp.sum(weights)
        by = None if logits == "auto" else logits
        sums = cross_entropy_sums(found, targets, weights, z_loss=z_loss, by=by, size=block)
        total, metrics = sums.total, {}
        if z_loss is not None:
            metrics["z_loss"] = (sums.z_loss, weight)
        if "router_loss" in more:
            router_loss = _router_sum(more.pop("router_loss"), weights, tokens=more.pop("router_tokens", None))
            metrics["router_loss"] = (router_loss, weight)
            total = total + router_loss
        if metrics:
            metrics["cross_entropy"] = (sums.cross_entropy, weight)
        if counts_right:
            metrics["accuracy"] = (weight_of_right(found, targets, weights), weight)
        return total, weight, {**metrics, **{name: (value, jnp.float32(1)) for name, value in more.items()}}

    axes = {key: ("batch", "sequence") for key in ("inputs", "targets", "weights")}
    train = functools.partial(loss_with, z_loss, False)
    loss = LogitsLoss(train, functools.partial(loss_with, None, counts_right), has_separate_rows=True)
    return Task(name, loss, axes, reads_weights=True, num_classes=num_classes)


def _router_sum(losses_BL: jax.Array, weights_BL: jax.Array, *, tokens: jax.Array | None) -> jax.Array:
    """The router's losses of the rows of this device, of which the quotient with the weights of all is their mean.

    A token without a weight (of a prompt) is routed as the others are, and its probabilities balance what the load
    counts; so the mean is over all tokens that are routed.
    """
    if tokens is None:
        return jnp.sum(losses_BL * weights_BL)
    # The sum over shards comes after those in the layers.
    total = jnp.sum(losses_BL)
    turn = turn_of(jax.lax.stop_gradient(total), current_layout())
    weight = jnp.sum(weights_BL) if turn is None else jnp.sum(weights_BL) + turn
    weight = jax.lax.stop_gradient(sum_over_shards(weight))
    return total * (weight / divisor(jax.lax.stop_gradient(tokens)))


def classification(
    *,
    metrics: Sequence[str] = ("accuracy",),
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
) -> Task:
    """Predict one class per row or position: logits [B, ..., C], `targets` int32 [B, ...], optional `weights`.

    Weights are of the shape of the targets, or [B]. Negative targets are ignored.

    Args:
        metrics: what is reported: accuracy, top_K ("top_5"), precision, recall, f1; the last three of class 1 where
            there are two, else as the mean over the classes that occur (`macro_f1`).
        label_smoothing: share of the probability that is spread over all classes, from 0 to below 1.
        class_weights: what a target of each class weighs in the loss, C numbers; None: 1. Metrics count rows alike.

    Returns:
        The task.

    Raises:
        ConfigError: an unknown metric, or a share out of range.

    Example:
        >>> task = jt.classification(metrics=["accuracy", "top_5", "f1"], label_smoothing=0.1)
        >>> step = jt.make_train_step(model, task, optax.adamw(1e-3))
    """
    if not 0 <= label_smoothing < 1:
        raise ConfigError(f"classification: label_smoothing={label_smoothing} is not from 0 to below 1, such as 0.1")
    of_classes = None if class_weights is None else tuple(map(float, class_weights))
    return _class_task("classification", {}, metrics, label_smoothing, of_classes)


def token_classification(*, metrics: Sequence[str] = ("accuracy",)) -> Task:
    """Predict one class per token: logits [B, L, C], `targets` int32 [B, L] (-100: ignored), optional `weights`.

    Args:
        metrics: as for `classification`, of the tokens that count.

    Returns:
        The task.

    Example:
        >>> step = jt.make_train_step(model, jt.token_classification(), optax.adamw(1e-3))  # targets [B, L]
    """
    axes = {key: ("batch", "sequence") for key in ("inputs", "targets", "weights")}
    return _class_task("token_classification", axes, metrics)


def _class_task(
    name: str,
    axes: Mapping[str, tuple[str | None, ...]],
    metrics: Sequence[str],
    label_smoothing: float = 0.0,
    class_weights: tuple[float, ...] | None = None,
) -> Task:
    named = check_metrics(metrics, of=name)
    loss = functools.partial(_class_loss, name, named, label_smoothing, class_weights)
    return Task(name, loss, axes, reads_weights=True, num_classes=num_classes)


def _class_loss(
    name: str,
    metrics: tuple[str, ...],
    label_smoothing: float,
    class_weights: tuple[float, ...] | None,
    outputs: Any,
    batch: Batch,
) -> TaskSums:
    targets, weights = checked_ids(name, outputs, batch)
    found = class_metrics(metrics, outputs, targets, weights)
    losses = cross_entropy(outputs, targets)
    if label_smoothing:
        spread = -jnp.mean(jax.nn.log_softmax(outputs.astype(jnp.float32)), axis=-1)
        losses = (1 - label_smoothing) * losses + label_smoothing * spread
    if class_weights is not None:
        if len(class_weights) != outputs.shape[-1]:
            raise ConfigError(
                f"{name}: {len(class_weights)} class_weights, but the model has {outputs.shape[-1]} classes"
            )
        weights = weights * jnp.asarray(class_weights, jnp.float32)[jnp.maximum(targets, 0)]
    return jnp.sum(losses * weights), jnp.sum(weights), found


def regression(loss: Literal["mse", "mae", "huber"] = "mse", *, metrics: Sequence[str] = ()) -> Task:
    """Predict numbers: outputs [B, O], `targets` [B, O] or [B] of any real dtype, optional `weights` [B, O] or [B].

    The loss of a row is its mean over O, and without weights every row counts 1.

    Args:
        loss: the squared error, the absolute one, or optax's Huber loss, which is squared up to an error of 1.
        metrics: what is reported beside it, of the same names.

    Returns:
        The task.

    Raises:
        ConfigError: an unknown name.

    Example:
        >>> step = jt.make_train_step(model, jt.regression("huber", metrics=["mae"]), optax.adamw(1e-3))
    """
    (main,) = check_metrics(loss, of="regression")
    named = check_metrics(metrics, of="regression")
    return Task("regression", functools.partial(_number_loss, main, named), reads_weights=True)


def _number_loss(loss: str, metrics: tuple[str, ...], outputs: Any, batch: Batch) -> TaskSums:
    if not isinstance(outputs, (jax.Array, np.ndarray)):
        raise ConfigError(f"regression needs outputs [B, O] from the model, which gives {shown(outputs)}")
    weights, targets = broadcast_weights(batch), batch["targets"]
    if not jnp.issubdtype(targets.dtype, jnp.integer) and not jnp.issubdtype(targets.dtype, jnp.floating):
        raise ConfigError(f"regression needs real targets, but they are {targets.dtype.name}; give float32")
    if _without_last_one(outputs.shape) != _without_last_one(targets.shape):
        raise ConfigError(
            f"regression: targets {list(targets.shape)} do not fit outputs {list(outputs.shape)}; "
            "give the model as many outputs as a row has targets"
        )
    # A target that is missing (NaN) and weighs 0 counts nothing; 0 times NaN would.
    known = jnp.where(weights != 0, targets.astype(jnp.float32), 0.0)
    outputs, rows = outputs.astype(jnp.float32).reshape(targets.shape), targets.shape[0]

    def summed(errors: jax.Array) -> jax.Array:
        return jnp.sum(jnp.mean((errors * weights).reshape(rows, -1), axis=-1))

    weight = summed(jnp.ones_like(outputs))
    sums = {name: summed(ERRORS[name](outputs, known)) for name in (loss, *metrics)}
    return sums[loss], weight, {name: (sums[name], weight) for name in metrics}


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
    if isinstance(config.task, str) and config.task in _TOKEN_TASKS:
        make = _TOKEN_TASKS[config.task]
        check_loss(config)
        return make(z_loss=config.loss.z_loss, logits=config.loss.logits, block=config.loss.block)
    check_loss(config)
    if config.task == "dpo":
        loss = config.loss
        return dpo(loss.beta, label_smoothing=loss.label_smoothing, logits=loss.logits, block=loss.block)
    if isinstance(config.task, CalledTask):
        made = call_function("task", config.task.call, config.task.args)
        if isinstance(made, Task):
            return made
        raise ConfigError(
            f"task.call={config.task.call} returned {described(made)}, not a jaxtrain.Task; return "
            "jaxtrain.Task('name', loss) with loss(outputs, batch) -> (sum, weight, metrics)"
        )
    if config.task == "classification":
        return classification(label_smoothing=config.loss.label_smoothing)
    return TASKS[config.task]()


def is_shipped(task: Task) -> bool:
    """Whether a task evaluates as the one of its name in `TASKS`, whose options matter in training alone."""
    make = TASKS.get(task.name)
    return make is not None and _evaluated(task) == _evaluated(make())


def _evaluated(task: Task) -> Any:
    """The code of the loss in evaluation: each call of `classification` makes another function of the same code.

    A loss of preferences is evaluated with its settings, so that they are part of what is compared.
    """
    match task.loss:
        case LogitsLoss(evaluate=loss) | CallingLoss(function=loss) | loss:
            loss, settings = (loss.func, loss.args) if isinstance(loss, functools.partial) else (loss, ())
    return (loss.__code__ if isinstance(loss, types.FunctionType) else loss, settings)


def named_task(task: Task | str) -> Task:
    """The task of a name: one of `TASKS`, or a loss of `regression` ("mae"); anything else as it is.

    Raises:
        ConfigError: an unknown name.
    """
    if not isinstance(task, str):
        return task
    if task in ERRORS:
        return regression(cast(Any, task))
    if task not in TASKS:
        raise ConfigError(f"there is no task {task!r}; use one of {', '.join([*TASKS, *ERRORS])}, or a jaxtrain.Task")
    return TASKS[task]()


_TOKEN_TASKS = {
    "language_modeling": language_modeling,
    "masked_language_modeling": masked_language_modeling,
    "sequence_to_sequence": sequence_to_sequence,
}
TASKS: Mapping[str, Callable[[], Task]] = {
    **_TOKEN_TASKS,
    "classification": classification,
    "token_classification": token_classification,
    "regression": regression,
    "dpo": dpo,
    "reward": reward,
}
