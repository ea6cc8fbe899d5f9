"""Spikes of loss and gradient norm, found inside the step: a comparison with the last steps that were accepted."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtrain.config.schema import SpikeRule

# The least deviation, as a share of the mean. That of losses that hardly vary is close to the rounding of float32, and
# any step could be above it.
_LEAST_DEVIATION = 1e-3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpikeHistory:
    """What steps are compared with to find spikes.

    Attributes:
        losses: those of the last accepted steps, float32 [window]; accepted step i is at i % window.
        grad_norms: their gradient norms, in the same form.
        accepted: number of accepted steps, int32 [].
        spikes: number of spikes, int32 [].
    """

    losses: jax.Array
    grad_norms: jax.Array
    accepted: jax.Array
    spikes: jax.Array

    def is_spike(self, loss: jax.Array, grad_norm: jax.Array, rule: SpikeRule) -> jax.Array:
        """Return whether a finite step with these numbers (float32 []) is a spike: bool []."""
        is_above = jnp.bool_(False)
        if rule.watch != "grad_norm":
            is_above |= loss > self._limit(self.losses, rule)
        if rule.watch != "loss":
            is_above |= grad_norm > self._limit(self.grad_norms, rule)
        has_enough_steps = self.accepted >= rule.window // 2
        return is_above & has_enough_steps

    def after(
        self,
        loss: jax.Array,
        grad_norm: jax.Array,
        *,
        accepted: jax.Array,
        spiked: jax.Array,
    ) -> "SpikeHistory":
        """Return the history after a step, which was accepted, a spike, or neither (bool [])."""
        index = self.accepted % self.losses.size
        loss = jnp.where(accepted, loss, self.losses[index])
        grad_norm = jnp.where(accepted, grad_norm, self.grad_norms[index])
        return SpikeHistory(
            losses=self.losses.at[index].set(loss),
            grad_norms=self.grad_norms.at[index].set(grad_norm),
            accepted=self.accepted + accepted.astype(jnp.int32),
            spikes=self.spikes + spiked.astype(jnp.int32),
        )

    def _limit(self, values: jax.Array, rule: SpikeRule) -> jax.Array:
        """Return the mean of the accepted values plus `rule.sigmas` of their deviations: float32 []."""
        is_filled = jnp.arange(values.size) < self.accepted
        count = jnp.clip(self.accepted, 2, values.size)
        count = count.astype(jnp.float32)
        mean = jnp.sum(values, where=is_filled) / count
        # The mean is subtracted first: the difference of two large sums of squares would be rounding.
        squares = jnp.square(values - mean)
        variance = jnp.sum(squares, where=is_filled) / (count - 1)
        least = _LEAST_DEVIATION * jnp.abs(mean)
        deviation = jnp.maximum(jnp.sqrt(variance), least)
        return mean + rule.sigmas * deviation


def first_history(rule: SpikeRule) -> SpikeHistory:
    """Return the history at step 0."""
    return SpikeHistory(
        losses=jnp.zeros(rule.window, jnp.float32),
        grad_norms=jnp.zeros(rule.window, jnp.float32),
        accepted=jnp.int32(0),
        spikes=jnp.int32(0),
    )
