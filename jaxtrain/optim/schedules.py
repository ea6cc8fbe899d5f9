"""Learning rates over steps: a linear warmup, then a shape. A new shape is one function and one line of the table."""

from collections.abc import Callable

import jax.numpy as jnp
import optax

from jaxtrain.config.optimizers import ScheduleConfig, check_schedule


def _constant(peak: float, final: float, start: int, end: int) -> optax.Schedule:
    return optax.constant_schedule(peak)


def _linear(peak: float, final: float, start: int, end: int) -> optax.Schedule:
    return optax.linear_schedule(peak, final, end - start)


def _cosine(peak: float, final: float, start: int, end: int) -> optax.Schedule:
    """Make half a period of a cosine (Loshchilov and Hutter 2016)."""
    return optax.cosine_decay_schedule(peak, end - start, alpha=final / peak)


def _inverse_sqrt(peak: float, final: float, start: int, end: int) -> optax.Schedule:
    """Make peak * sqrt(warmup / step) (Vaswani et al. 2017, section 5.3), with a warmup of at least 1."""
    return lambda count: peak * jnp.sqrt(max(start, 1) / (jnp.asarray(count, jnp.float32) + max(start, 1)))


# name -> (peak, final value, first step after warmup, step at which decay ends) -> schedule counted from `start`
_SHAPES: dict[str, Callable[[float, float, int, int], optax.Schedule]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
}


def build_schedule(config: ScheduleConfig, *, peak: float, steps: int) -> optax.Schedule:
    """Build the learning rate as a function of the optimizer step, of which the first is 0.

    A run that is shorter than its warmup is allowed, because users try a config with a few steps first; it ends while
    the learning rate still rises.

    Args:
        config: shape, warmup and end.
        peak: learning rate after warmup.
        steps: steps of the run.

    Returns:
        count int32 [] -> learning rate float32 []. It reaches its final value one step after the last step of the run
        and stays there; inverse_sqrt continues to fall.

    Raises:
        ConfigError: `decay_steps` does not fit between the warmup and the end of the run.
    """
    check_schedule(config, steps)
    warmup = config.warmup_steps
    final = peak * config.final_fraction
    # Step `warmup` is the first at the peak; the learning rate of step 0 is above 0.
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup) if warmup else None
    if config.kind == "wsd":
        # Warmup, stable, decay (Hu et al. 2024, MiniCPM): the decay ends with the run.
        decay = config.decay_steps or max(min(steps // 10, steps - warmup), 1)
        pieces = [optax.constant_schedule(peak), optax.linear_schedule(peak, final, decay)]
        boundaries = [max(steps - decay, warmup)]
    else:
        end = config.decay_steps or max(steps, warmup + 1)
        pieces, boundaries = [_SHAPES[config.kind](peak, final, warmup, end)], []
    if ramp is not None:
        pieces, boundaries = [ramp, *pieces], [warmup, *boundaries]
    return optax.join_schedules(pieces, boundaries)
