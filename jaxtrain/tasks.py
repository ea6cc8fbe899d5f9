"""Tasks: how outputs and batch become a loss. A task adds nothing to a model and knows no mesh.

A loss is a (weighted sum, weight) pair, normalised once by the global weight, so that accumulation, padding and
every mesh give the same number. Shapes: B batch, L sequence, V vocabulary, C classes, O targets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Batch = Mapping[str, Any]
Sums = dict[str, tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Task:
    """What outputs are compared with.

    Attributes:
        name: for people and for `run.json`.
        loss: (outputs, batch) -> (weighted sum float32 [], weight float32 [], metrics); metrics are name -> (sum,
            weight) pairs of their own.
        batch_axes: batch key -> logical axes of its dims; keys left out have ("batch",) first and the rest whole.
    """

    name: str
    loss: Callable[[Any, Batch], tuple[jax.Array, jax.Array, Sums]]
    batch_axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)


def _weights(batch: Batch, shape: tuple[int, ...]) -> jax.Array:
    weights = batch.get("weights")
    return jnp.ones(shape, jnp.float32) if weights is None else weights.astype(jnp.float32)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood in float32: logits [..., V], int targets [...] -> [...]."""
    logits = logits.astype(jnp.float32)
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    # A masked sum instead of a gather: the compiler keeps it sharded when the vocabulary is.
    chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
    target_logits = jnp.sum(jnp.where(chosen, shifted, 0.0), axis=-1)
    return jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)) - target_logits


def language_modeling() -> Task:
    """Next-token prediction: logits [B, L, V], `targets` int32 [B, L], optional `weights` [B, L].

    A model with experts gives a dict: `logits`, `router_loss` [B, L] (added to the loss of each token, in training) and
    numbers that are reported as they are.
    """

    def loss(outputs: Any, batch: Batch) -> tuple[jax.Array, jax.Array, Sums]:
        more = dict(outputs) if isinstance(outputs, Mapping) else {"logits": outputs}
        weights = _weights(batch, batch["targets"].shape)
        weight = jnp.sum(weights)
        total = jnp.sum(cross_entropy(more.pop("logits"), batch["targets"]) * weights)
        metrics: Sums = {}
        if "router_loss" in more:
            router_loss = jnp.sum(more.pop("router_loss") * weights)
            metrics = {"cross_entropy": (total, weight), "router_loss": (router_loss, weight)}
            total = total + router_loss
        return total, weight, {**metrics, **{name: (value, jnp.float32(1)) for name, value in more.items()}}

    axes = {key: ("batch", "sequence") for key in ("inputs", "targets", "weights")}
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


TASKS: Mapping[str, Callable[[], Task]] = {
    "language_modeling": language_modeling,
    "classification": classification,
    "regression": regression,
}
