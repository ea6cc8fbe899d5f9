"""Spikes of loss and gradient norm, found inside the step: a comparison with the last steps that were accepted."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtrain.config.schema import SpikeRule

# Losses that hardly vary have a deviation near the rounding of float32, beside which nothing would be a spike or all.
_SMALLEST_DEVIATION = 1e-3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpikeHistory:
    """What steps are compared with to find spikes.

    Losses and gradient norms of the last accepted steps, float32 [window], step i of them at i % window; the numbers of
    accepted steps and of spikes, int32 [].
    """

    losses: jax.Array
    grad_norms: jax.Array
    accepted: jax.Array
    spikes: jax.Array

    def spiked(self, loss: jax.Array, grad_norm: jax.Array, rule: SpikeRule) -> jax.Array:
        """Return whether a finite step with these numbers (float32 []) is a spike: bool []."""
        is_high = jnp.bool_(False)
        if rule.watch != "grad_norm":
            is_high |= self._is_above(loss, self.losses, rule)
        if rule.watch != "loss":
            is_high |= self._is_above(grad_norm, self.grad_norms, rule)
        return is_high & (self.accepted >= rule.window // 2)

    def after(self, loss: jax.Array, grad_norm: jax.Array, *, accepted: jax.Array, spiked: jax.Array) -> "SpikeHistory":
        """Return the history after a step, which was accepted, a spike, or neither (bool [])."""
        index = self.accepted % self.losses.size
        loss = jnp.where(accepted, loss.astype(jnp.float32), self.losses[index])
        grad_norm = jnp.where(accepted, grad_norm.astype(jnp.float32), self.grad_norms[index])
        return SpikeHistory(
            losses=self.losses.at[index].set(loss),
            grad_norms=self.grad_norms.at[index].set(grad_norm),
            accepted=self.accepted + accepted.astype(jnp.int32),
            spikes=self.spikes + spiked.astype(jnp.int32),
        )

    def _is_above(self, value: jax.Array, values: jax.Array, rule: SpikeRule) -> jax.Array:
        is_filled = jnp.arange(values.size) < self.accepted
        count = jnp.clip(self.accepted, 2, values.size)
        count = count.astype(jnp.float32)
        mean = jnp.sum(values, where=is_filled) / count
        # The mean is subtracted first: the difference of two large sums of squares would be rounding.
        squares = jnp.square(values - mean)
        variance = jnp.sum(squares, where=is_filled) / (count - 1)
        smallest = _SMALLEST_DEVIATION * jnp.abs(mean)
        deviation = jnp.maximum(jnp.sqrt(variance), smallest)
        value = value.astype(jnp.float32)
        return value > mean + rule.sigmas * deviation


def first_history(rule: SpikeRule) -> SpikeHistory:
    """Return the history at step 0."""
    return SpikeHistory(
        losses=jnp.zeros(rule.window, jnp.float32),
        grad_norms=jnp.zeros(rule.window, jnp.float32),
        accepted=jnp.int32(0),
        spikes=jnp.int32(0),
    )
