"""Tasks: how outputs and batch become a loss. A task adds nothing to a model and knows no mesh.

A loss is a (weighted sum, weight) pair, normalised once by the global weight, so that accumulation, padding and
every mesh give the same number. Shapes: B batch, L sequence, V vocabulary, C classes, O targets.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxtrain.config.kinds import check_loss
from jaxtrain.config.schema import Config
from jaxtrain.loss_blocks import check_blocks
from jaxtrain.ops.cross_entropy import cross_entropy, cross_entropy_sums

Batch = Mapping[str, Any]
Sums = dict[str, tuple[jax.Array, jax.Array]]
Loss = Callable[[Any, Batch], tuple[jax.Array, jax.Array, Sums]]


@dataclass(frozen=True)
class LogitsLoss:
    """A loss that takes `DeferredLogits` where outputs hold logits, and may differ in evaluation.

    A `Task.loss` that is a plain function gets whole logits and is the same in both.

    Attributes:
        train: as `Task.loss`.
        evaluate: without what training adds and measures no quality (z-loss).
    """

    train: Loss
    evaluate: Loss

    def __call__(self, outputs: Any, batch: Batch) -> tuple[jax.Array, jax.Array, Sums]:
        return self.train(outputs, batch)


@dataclass(frozen=True)
class Task:
    """What outputs are compared with.

    Attributes:
        name: for people and for `run.json`.
        loss: (outputs, batch) -> (weighted sum float32 [], weight float32 [], metrics); metrics are name -> (sum,
            weight) pairs of their own. A `LogitsLoss` is spared whole logits.
        batch_axes: batch key -> logical axes of its dims; keys left out have ("batch",) first and the rest whole.
    """

    name: str
    loss: Loss
    batch_axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)

    @property
    def evaluation(self) -> Loss:
        """What evaluation computes."""
        return self.loss.evaluate if isinstance(self.loss, LogitsLoss) else self.loss

    @property
    def takes_deferred_logits(self) -> bool:
        """Whether the loss takes `DeferredLogits` where outputs hold logits."""
        return isinstance(self.loss, LogitsLoss)


def _weights(batch: Batch, shape: tuple[int, ...]) -> jax.Array:
    weights = batch.get("weights")
    return jnp.ones(shape, jnp.float32) if weights is None else weights.astype(jnp.float32)


def language_modeling(
    *,
    z_loss: float | None = None,
    logits: Literal["auto", "whole", "tokens", "vocabulary"] = "auto",
    block: int | None = None,
) -> Task:
    """Next-token prediction: logits [B, L, V] or deferred, `targets` int32 [B, L], optional `weights` [B, L].

    A model with experts gives a dict: `logits`, `router_loss` [B, L] (added to the loss of each token, in training) and
    numbers that are reported as they are.

    Args:
        z_loss: weight of the squared logsumexp, in training; None: none.
        logits: how deferred logits are cut (`loss_blocks.py`); auto: by their sizes.
        block: tokens or ids at once; None: from the sizes.

    Raises:
        ConfigError: a block of whole logits.
    """
    check_blocks(logits, block)

    def loss_with(z_loss: float | None, outputs: Any, batch: Batch) -> tuple[jax.Array, jax.Array, Sums]:
        more = dict(outputs) if isinstance(outputs, Mapping) else {"logits": outputs}
        weights = _weights(batch, batch["targets"].shape)
        weight = jnp.sum(weights)
        by = None if logits == "auto" else logits
        sums = cross_entropy_sums(more.pop("logits"), batch["targets"], weights, z_loss=z_loss, by=by, size=block)
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
    return Task("language_modeling", loss, axes)


def classification() -> Task:
    """One class a row: logits [B, C], `targets` int32 [B], optional `weights` [B]; reports accuracy."""

    def loss(outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, Sums]:
        weights = _weights(batch, batch["targets"].shape)
        weight = jnp.sum(weights)
        right = jnp.argmax(outputs, axis=-1) == batch["targets"]
        accuracy = jnp.sum(jnp.where(right, weights, 0.0))
        return jnp.sum(cross_entropy(outputs, batch["targets"]) * weights), weight, {"accuracy": (accuracy, weight)}

    return Task("classification", loss)


def regression() -> Task:
    """Mean squared error: outputs [B, O], `targets` float [B, O] or [B], optional `weights` [B]."""

    def loss(outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, Sums]:
        targets = batch["targets"].astype(jnp.float32)
        targets = targets.reshape(targets.shape[0], -1)
        outputs = outputs.astype(jnp.float32).reshape(targets.shape)
        weights = _weights(batch, targets.shape[:1])
        return jnp.sum(jnp.mean(jnp.square(outputs - targets), axis=-1) * weights), jnp.sum(weights), {}

    return Task("regression", loss)


def build_task(config: Config) -> Task:
    """The task that a config describes.

    Raises:
        ConfigError: options of a loss that the task does not have.
    """
    if config.task == "language_modeling":
        return language_modeling(z_loss=config.loss.z_loss, logits=config.loss.logits, block=config.loss.block)
    check_loss(config)
    return TASKS[config.task]()


TASKS: Mapping[str, Callable[[], Task]] = {
    "language_modeling": language_modeling,
    "classification": classification,
    "regression": regression,
}
