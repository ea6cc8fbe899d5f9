"""Spikes of loss and gradient norm, found inside the step: a comparison with the last steps that were accepted."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jaxtrain.config.schema import SpikesConfig

# Losses that hardly vary have a deviation near the rounding of float32, beside which nothing would be a spike or all.
_SMALLEST_DEVIATION = 1e-3


@dataclass(frozen=True)
class SpikeRule:
    """When a finite step counts as a spike, which leaves parameters and optimizer state as they were.

    A step is a spike if its loss or its gradient norm (before clipping) is more than `sigmas` standard deviations above
    the mean of the last `window` accepted steps. A deviation below a thousandth of the mean counts as a thousandth.
    The first `window // 2` steps are always accepted. The history is part of the train state, in float32, so that a
    run that is resumed judges every step as one that was not interrupted.

    Attributes:
        window: accepted steps that are compared with, at least 4.
        sigmas: above 0.
        watch: "loss", "grad_norm" or "both".

    Example:
        >>> rule = jt.SpikeRule(window=128, sigmas=6.0)
        >>> step = jt.make_train_step(model, jt.classification(), optax.adamw(1e-3), spikes=rule)
        >>> state, metrics = step(step.init(0), step.loader(batches)(0))
        >>> int(metrics["spikes"])
        0

    Source: the rolling window of 128 steps and 6 deviations is that of OLMo 2 (Team OLMo, arXiv 2501.00656).
    """

    window: int = 128
    sigmas: float = 6.0
    watch: Literal["loss", "grad_norm", "both"] = "both"

    def __post_init__(self) -> None:
        SpikesConfig(**vars(self))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpikeHistory:
    """What spikes are told by.

    Losses and gradient norms of the last accepted steps, float32 [window], step i of them at i % window; the numbers of
    accepted steps and of spikes, int32 [].
    """

    losses: jax.Array
    grad_norms: jax.Array
    accepted: jax.Array
    spikes: jax.Array

    def spiked(self, loss: jax.Array, grad_norm: jax.Array, rule: SpikeRule) -> jax.Array:
        """Whether a finite step with these numbers (float32 []) is a spike: bool []."""
        found = jnp.bool_(False)
        if rule.watch != "grad_norm":
            found |= self._is_above(loss, self.losses, rule)
        if rule.watch != "loss":
            found |= self._is_above(grad_norm, self.grad_norms, rule)
        return found & (self.accepted >= rule.window // 2)

    def after(self, loss: jax.Array, grad_norm: jax.Array, *, accepted: jax.Array, spiked: jax.Array) -> "SpikeHistory":
        """The history after a step, which was accepted, a spike, or neither (bool [])."""
        place = self.accepted % self.losses.size

        def put(values: jax.Array, value: jax.Array) -> jax.Array:
            return values.at[place].set(jnp.where(accepted, value.astype(jnp.float32), values[place]))

        return SpikeHistory(
            put(self.losses, loss),
            put(self.grad_norms, grad_norm),
            self.accepted + accepted.astype(jnp.int32),
            self.spikes + spiked.astype(jnp.int32),
        )

    def _is_above(self, value: jax.Array, values: jax.Array, rule: SpikeRule) -> jax.Array:
        known = jnp.arange(values.size) < self.accepted
        count = jnp.maximum(jnp.minimum(self.accepted, values.size), 2).astype(jnp.float32)
        mean = jnp.sum(jnp.where(known, values, 0)) / count
        # The mean is subtracted first: the difference of two large sums of squares would be rounding.
        variance = jnp.sum(jnp.where(known, jnp.square(values - mean), 0)) / (count - 1)
        deviation = jnp.maximum(jnp.sqrt(variance), _SMALLEST_DEVIATION * jnp.abs(mean))
        return value.astype(jnp.float32) > mean + rule.sigmas * deviation


def first_history(rule: SpikeRule) -> SpikeHistory:
    """The history at step 0."""
    losses, grad_norms = (jnp.zeros(rule.window, jnp.float32) for _ in range(2))
    return SpikeHistory(losses, grad_norms, jnp.int32(0), jnp.int32(0))
