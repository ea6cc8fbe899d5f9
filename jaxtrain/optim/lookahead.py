"""Lookahead: slow weights that follow the weights of any optimizer (Zhang et al. 2019)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import ConfigError
from jaxtrain.optim.elementwise import ElementwiseTransformation, elementwise


class LookaheadState(NamedTuple):
    """State of `lookahead`.

    Attributes:
        count: int32 [], updates since the last synchronization.
        slow: the slow weights, a tree like the trained parameters, float32.
        inner: state of the optimizer of the fast weights.
    """

    count: jax.Array
    slow: optax.Params
    inner: optax.OptState


def lookahead(
    optimizer: optax.GradientTransformation, *, sync_period: int = 6, slow_step_size: float = 0.5
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer in Lookahead: every `sync_period` updates the parameters go back towards slow weights.

    The parameters of a train state are the fast weights, of which gradients are taken. The slow weights are optimizer
    state: they are sharded, saved and restored like a moment. After `sync_period` updates
    slow += slow_step_size * (fast - slow), and fast = slow. `TrainState.evaluation_params`, and with it evaluation,
    uses the slow weights, unless the step keeps a moving average (`ema_decay`), which has precedence.

    Args:
        optimizer: any optax transformation; its updates are those of the fast weights.
        sync_period: updates between two synchronizations, 1 or more.
        slow_step_size: how far the slow weights go, above 0 and at most 1.

    Returns:
        A plain transformation; declared `elementwise` where `optimizer` is.

    Raises:
        ConfigError: `optimizer` is no optax transformation, or a number is out of its range.

    Example:
        >>> optimizer = jt.lookahead(optax.adamw(1e-3), sync_period=6, slow_step_size=0.5)
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            f"lookahead takes an optax transformation, not {type(optimizer).__name__}; write "
            "jaxtrain.lookahead(optax.adamw(1e-3))"
        )
    if not isinstance(sync_period, int) or isinstance(sync_period, bool) or sync_period < 1:
        raise ConfigError(f"sync_period={sync_period!r} of lookahead; use a whole number from 1, such as 6")
    if isinstance(slow_step_size, bool) or not isinstance(slow_step_size, int | float) or not 0 < slow_step_size <= 1:
        raise ConfigError(f"slow_step_size={slow_step_size!r} of lookahead; use a number above 0, at most 1")
    fast = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> LookaheadState:
        # A copy: two places of a state that share one buffer could not be donated.
        return LookaheadState(jnp.int32(0), jax.tree.map(jnp.copy, params), fast.init(params))

    # As any wrapper of optax, it hands on whatever the step gives to the one that it wraps.
    def update(
        updates: optax.Updates, state: LookaheadState, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, LookaheadState]:
        updates, inner = fast.update(updates, state.inner, params, **extra)
        count = (state.count + 1) % sync_period
        synchronizes = count == 0

        def move(slow: jax.Array, param: jax.Array, step: jax.Array) -> jax.Array:
            return jnp.where(synchronizes, slow + slow_step_size * (param + step - slow), slow)

        slow = jax.tree.map(move, state.slow, params, updates)
        updates = jax.tree.map(
            lambda step, new, param: jnp.where(synchronizes, new - param, step), updates, slow, params
        )
        return updates, LookaheadState(count, slow, inner)

    made = optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
    return elementwise(made) if isinstance(optimizer, ElementwiseTransformation) else made
