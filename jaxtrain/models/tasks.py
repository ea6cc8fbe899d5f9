"""The shipped tasks and their metrics. Shapes: B batch, L sequence, V vocabulary, C classes, O targets."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.arguments import shown
from jaxtrain.config.base import CalledTask
from jaxtrain.config.kinds import check_loss
from jaxtrain.config.schema import Config, LossConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.preferences import dpo, reward
from jaxtrain.models.task import (
    Batch,
    LogitsLoss,
    Sums,
    Task,
    TaskSums,
    broadcast_weights,
    checked_ids,
    num_classes,
    target_weights,
)
from jaxtrain.ops.loss.blocks import Logits
from jaxtrain.ops.loss.cross_entropy import cross_entropy, cross_entropy_sums, weight_of_right
from jaxtrain.runtime.call import call_function, described

# Losses of `regression`, each the name of its task; that of the first is "regression".
ERRORS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "mse": lambda outputs, targets: jnp.square(outputs - targets),
    "mae": lambda outputs, targets: jnp.abs(outputs - targets),
    "huber": optax.losses.huber_loss,
}
LogitsAs = Literal["auto", "whole", "tokens", "vocabulary"]


def language_modeling(*, z_loss: float | None = None, logits: LogitsAs = "auto", block: int | None = None) -> Task:
    """Predict the next token: logits [B, L, V] or deferred, `targets` int32 [B, L], optional `weights` [B, L] or [B].

    Targets of -100 are ignored.

    A model with experts gives a dict: `logits`, in training also `router_loss` [B, L], whose mean is added to the loss,
    and numbers that are reported as they are. In steps of a `Model` with `has_experts` the mean is over all tokens of
    the batch that are not padding (segment 0), whatever their weights; elsewhere it is by the weights.

    Args:
        z_loss: weight of the squared logsumexp, in training; None: without it.
        logits: how deferred logits are partitioned into blocks (`ops/loss/blocks.py`); auto: from their sizes.
        block: tokens or ids of a block; None: from the sizes.

    Raises:
        ConfigError: a block size for logits that are not partitioned, or a weight that is no number.

    Example:
        >>> task = jt.language_modeling(z_loss=1e-4)
        >>> task.batch_axes["targets"]
        ('batch', 'sequence')
    """
    return _token_task("language_modeling", z_loss, logits, block, counts_right=False)


def masked_language_modeling(
    *, z_loss: float | None = None, logits: LogitsAs = "auto", block: int | None = None
) -> Task:
    """Name the tokens that were hidden: logits [B, L, V] or deferred, `targets` int32 [B, L], -100 where none was.

    The model sees both sides of a token (`causal=False`). Evaluation reports the accuracy at the hidden tokens. Source:
    Devlin et al. 2019 (arXiv 1810.04805).

    Arguments and errors are those of `language_modeling`.

    Example:
        >>> jt.masked_language_modeling()
        Task 'masked_language_modeling'
    """
    return _token_task("masked_language_modeling", z_loss, logits, block, counts_right=True)


def sequence_to_sequence(*, z_loss: float | None = None, logits: LogitsAs = "auto", block: int | None = None) -> Task:
    """Write a text for a text: the decoder's logits [B, T, V] or deferred, `targets` int32 [B, T], optional `weights`.

    Targets of -100 are ignored, such as those after the end. Evaluation reports the accuracy of single tokens, each
    given the right ones before it.

    Arguments and errors are those of `language_modeling`.

    Example:
        >>> jt.sequence_to_sequence(z_loss=1e-4)
        Task 'sequence_to_sequence'
    """
    return _token_task("sequence_to_sequence", z_loss, logits, block, counts_right=True)


def _token_task(name: str, z_loss: float | None, logits: LogitsAs, block: int | None, *, counts_right: bool) -> Task:
    """A task whose targets are tokens; where evaluation reports the accuracy, it computes the logits once more."""
    LossConfig(z_loss=z_loss, logits=logits, block=block)
    by: Logits | None = None if logits == "auto" else logits

    def loss_with(z_loss: float | None, counts_right: bool, outputs: Any, batch: Batch) -> TaskSums:
        more = dict(outputs) if isinstance(outputs, Mapping) else {"logits": outputs}
        found = more.pop("logits", None)
        targets, weights = checked_ids(name, found, batch)
        weight = jnp.sum(weights)
        sums = cross_entropy_sums(found, targets, weights, z_loss=z_loss, by=by, size=block)
        total, metrics = sums.total, {}
        if z_loss is not None:
            metrics["z_loss"] = (sums.z_loss, weight)
        if "router_loss" in more:
            router_loss = more.pop("router_loss")
            if "weight_per_token" in batch:
                router_loss = jnp.sum(router_loss) * batch["weight_per_token"]
            else:
                router_loss = jnp.sum(router_loss * weights)
            metrics["router_loss"] = (router_loss, weight)
            total = total + router_loss
        if metrics:
            metrics["cross_entropy"] = (sums.cross_entropy, weight)
        if counts_right:
            metrics["accuracy"] = (weight_of_right(found, targets, weights), weight)
        return total, weight, {**metrics, **{name: (value, jnp.float32(1)) for name, value in more.items()}}

    axes = {key: ("batch", "sequence") for key in ("inputs", "targets", "weights")}
    train = functools.partial(loss_with, z_loss, False)
    loss = LogitsLoss(train, functools.partial(loss_with, None, counts_right))
    return Task(name, loss, axes, reads_weights=True, num_classes=num_classes)


def weight_per_token(batch: Batch) -> jax.Array:
    """Compute the weight of a batch over its number of tokens that are not padding: float32 [].

    What counts for every token, whatever its weight in the loss, is multiplied by it in each microbatch, and divided by
    the weight of the batch with the loss.
    """
    inputs = batch["inputs"]
    segments = inputs.get("segments") if isinstance(inputs, Mapping) else None
    num_tokens = batch["targets"].size if segments is None else jnp.sum(segments != 0)
    return jnp.sum(target_weights(batch)) / jnp.maximum(num_tokens, 1)


def classification(
    *,
    metrics: Sequence[str] = ("accuracy",),
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
) -> Task:
    """Predict one class per row or position: logits [B, ..., C], `targets` int32 [B, ...], optional `weights`.

    Weights are of the shape of the targets, or [B]. Targets of -100 are ignored.

    Args:
        metrics: what is reported: accuracy, top_K ("top_5"), precision, recall, f1; the last three of class 1 where
            there are two, else as the mean over the classes that occur in targets or predictions (`macro_f1`). A ratio
            of nothing is 0, as in scikit-learn.
        label_smoothing: share of the probability that is spread over all classes, from 0 to below 1.
        class_weights: what a target of each class weighs in the loss, C numbers; None: 1. Metrics count rows alike.

    Raises:
        ConfigError: an unknown metric, or a share out of range.

    Example:
        >>> task = jt.classification(metrics=["accuracy", "top_5", "f1"], label_smoothing=0.1)
        >>> step = jt.make_train_step(model, task, optax.adamw(1e-3))
    """
    if not 0 <= label_smoothing < 1:
        raise ConfigError(f"classification: label_smoothing={label_smoothing} is not from 0 to below 1, such as 0.1")
    return _class_task("classification", {}, metrics, label_smoothing, class_weights)


def token_classification(*, metrics: Sequence[str] = ("accuracy",)) -> Task:
    """Predict one class per token: logits [B, L, C], `targets` int32 [B, L] (-100: ignored), optional `weights`.

    Args:
        metrics: as for `classification`, of the tokens that count.

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
    class_weights: Sequence[float] | None = None,
) -> Task:
    metrics = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    for metric in metrics:
        if metric not in _CLASS_METRICS and not (metric[:4] == "top_" and metric[4:].isdigit()):
            raise ConfigError(f"{name}: there is no metric {metric!r}; use {', '.join(_CLASS_METRICS)} or top_5")

    def loss(outputs: Any, batch: Batch) -> TaskSums:
        targets, weights = checked_ids(name, outputs, batch)
        found: Sums = {}
        for metric in metrics:
            found |= _class_metric(metric, outputs, targets, weights)
        losses = cross_entropy(outputs, targets)
        if label_smoothing:
            spread = -jnp.mean(jax.nn.log_softmax(outputs.astype(jnp.float32)), axis=-1)
            losses = (1 - label_smoothing) * losses + label_smoothing * spread
        if class_weights is not None:
            if len(class_weights) != outputs.shape[-1]:
                raise ConfigError(f"{name}: {len(class_weights)} class_weights for {outputs.shape[-1]} classes")
            weights = weights * jnp.asarray(class_weights, jnp.float32)[jnp.maximum(targets, 0)]
        return jnp.sum(losses * weights), jnp.sum(weights), found

    return Task(name, loss, axes, reads_weights=True, num_classes=num_classes)


_CLASS_METRICS = ("accuracy", "precision", "recall", "f1")


def _class_metric(name: str, logits: jax.Array, targets: jax.Array, weights: jax.Array) -> Sums:
    """The sums of a metric of classes; precision, recall and f1 are of class 1 of two, else means over all."""
    if name == "accuracy":
        return {name: (weight_of_right(logits, targets, weights), jnp.sum(weights))}
    if name not in _CLASS_METRICS:
        _, best = jax.lax.top_k(logits, int(name[4:]))
        right = jnp.any(best == targets[..., None], axis=-1)
        return {name: (jnp.sum(jnp.where(right, weights, 0.0)), jnp.sum(weights))}
    classes = logits.shape[-1]
    said, meant = (jax.nn.one_hot(ids, classes) for ids in (jnp.argmax(logits, axis=-1), targets))
    right, named, there = (jnp.einsum("...c,...->c", one, weights) for one in (said * meant, said, meant))
    occurs = named + there
    ratios = {"precision": (right, named), "recall": (right, there), "f1": (2 * right, occurs)}
    total, weight = ratios[name]
    if classes == 2:
        # Of two classes, people mean the second one.
        return {name: (total[1:], jnp.stack([weight[1:], jnp.sum(occurs, keepdims=True)]))}
    return {f"macro_{name}": (total, jnp.stack([weight, occurs]))}


def regression(loss: Literal["mse", "mae", "huber"] = "mse", *, metrics: Sequence[str] = ()) -> Task:
    """Predict numbers: outputs [B, O], `targets` [B, O] or [B] of any real dtype, optional `weights` [B, O] or [B].

    The loss of a row is its mean over O, and without weights every row counts 1.

    Args:
        loss: the squared error, the absolute one, or optax's Huber loss, which is squared up to an error of 1.
        metrics: what is reported beside it, of the same names.

    Raises:
        ConfigError: an unknown name.

    Example:
        >>> step = jt.make_train_step(model, jt.regression("huber", metrics=["mae"]), optax.adamw(1e-3))
    """
    metrics = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    for name in (loss, *metrics):
        if name not in ERRORS:
            raise ConfigError(f"regression: there is no metric {name!r}; use {', '.join(ERRORS)}")
    name = "regression" if loss == "mse" else loss
    return Task(name, functools.partial(_number_loss, loss, metrics), reads_weights=True)


def _number_loss(loss: str, metrics: tuple[str, ...], outputs: Any, batch: Batch) -> TaskSums:
    weights, targets = broadcast_weights(batch), batch["targets"]
    sizes = [shape[:-1] if len(shape) == 2 and shape[-1] == 1 else shape for shape in (outputs.shape, targets.shape)]
    if sizes[0] != sizes[1]:
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


def contrastive() -> Task:
    """Find the text of each image, and the image of each text, among those of the whole batch (CLIP).

    The model gives a dict of `image` and `text`, embeddings [B, P], and of `scale` [], what multiplies their
    similarities, at most 100. The loss of a row is the mean of two cross-entropies over B candidates. Accumulation and
    pipelines are refused. Evaluation compares the rows of each of its batches. Source: Radford et al. 2021 (arXiv
    2103.00020), figure 3.

    Example:
        >>> jt.contrastive()
        Task 'contrastive'
    """
    return Task("contrastive", _contrastive_loss, rows="global")


def _contrastive_loss(outputs: Any, batch: Batch) -> Any:
    """Losses and accuracy of each row."""
    names = ("image", "text", "scale")
    if not isinstance(outputs, Mapping) or not {*names} <= {*outputs}:
        raise ConfigError(
            f"contrastive needs image [B, P], text [B, P] and scale [] from the model, which gives {shown(outputs)}; "
            "set model.kind=clip"
        )
    image_BP, text_BP, scale = (outputs[name].astype(jnp.float32) for name in names)
    similarity_BB = jnp.minimum(scale, 100.0) * jnp.matmul(image_BP, text_BP.T, precision="highest")
    pairs_B = jnp.arange(len(similarity_BB))
    both = (similarity_BB, similarity_BB.T)
    losses = [optax.losses.softmax_cross_entropy_with_integer_labels(one, pairs_B) for one in both]
    right = [(jnp.argmax(one, axis=-1) == pairs_B).astype(jnp.float32) for one in both]
    return (losses[0] + losses[1]) / 2, {"accuracy": (right[0] + right[1]) / 2}


def build_task(config: Config) -> Task:
    """Build the task that a config describes."""
    check_loss(config)
    loss = config.loss
    if isinstance(config.task, CalledTask):
        made = call_function("task", config.task.call, config.task.args)
        if isinstance(made, Task):
            return made
        raise ConfigError(
            f"task.call={config.task.call} returned {described(made)}, not a jaxtrain.Task; return "
            "jaxtrain.Task('name', loss) with loss(outputs, batch) -> (sum, weight, metrics)"
        )
    if config.task in _TOKEN_TASKS:
        return _TOKEN_TASKS[config.task](z_loss=loss.z_loss, logits=loss.logits, block=loss.block)
    if config.task == "dpo":
        return dpo(loss.beta, label_smoothing=loss.label_smoothing, logits=loss.logits, block=loss.block)
    if config.task == "classification":
        return classification(label_smoothing=loss.label_smoothing)
    return TASKS[config.task]()


def named_task(task: Task | str) -> Task:
    """The task of a name: one of `TASKS`, or a loss of `regression` ("mae"); anything else as it is."""
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
    "contrastive": contrastive,
}
