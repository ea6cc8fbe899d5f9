"""Optimizers as optax chains, learning rates over steps, and which parameters are decayed and trained.

Every chain is a direction, then decoupled weight decay of matrices, then a product with minus the learning rate. A new
optimizer is a function of its config group and one line of a table, and so is a new shape of learning rates. Clipping,
loss scaling and the guard against non-finite gradients belong to the step, which needs the gradient norm anyway.
"""

import fnmatch
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.optimizers import (
    AdafactorDirection,
    AdamWDirection,
    CalledOptimizer,
    DirectionConfig,
    LionDirection,
    MuonDirection,
    OptimizerConfig,
    ScheduleConfig,
    SGDDirection,
    check_schedule,
)
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import AxesTable, counting_dims
from jaxtrain.layout.sharding import path_name
from jaxtrain.optim.moments import store_moments
from jaxtrain.optim.muon import orthogonalize
from jaxtrain.optim.rules import (
    NEWTON_SCHULZ_STEPS,
    VECTORS,
    Matrix,
    as_matrix,
    check_patterns,
    directions,
    updates_elementwise,
)
from jaxtrain.optim.wrappers import by_group, elementwise
from jaxtrain.runtime.call import call_function, described


def _sgd(config: SGDDirection, axes: AxesTable) -> list[optax.GradientTransformation]:
    return [optax.trace(config.momentum, nesterov=config.nesterov)] if config.momentum else []


def _adamw(config: AdamWDirection, axes: AxesTable) -> list[optax.GradientTransformation]:
    """Make AdamW's direction: two moments, 8 bytes of state per parameter in fp32 (Loshchilov and Hutter 2017)."""
    adam = optax.scale_by_adam(config.b1, config.b2, config.epsilon)
    return [store_moments(adam, config.moments, nonnegative=("nu",))]


def _muon(config: MuonDirection, axes: AxesTable) -> list[optax.GradientTransformation]:
    """Make Muon's direction of matrices, 4 bytes of state per parameter (Jordan et al. 2024), and AdamW's of others."""

    def matrix(path: str, shape: tuple[int, ...]) -> Matrix | None:
        return as_matrix(path, shape, axes)

    def kinds(params: optax.Params) -> optax.Params:
        def kind(path: jax.tree_util.KeyPath, leaf: jax.Array) -> str:
            return "adamw" if matrix(path_name(path), leaf.shape) is None else "muon"

        return jax.tree_util.tree_map_with_path(kind, params)

    momentum = optax.trace(config.momentum, nesterov=True)
    muon = optax.chain(momentum, orthogonalize(matrix, NEWTON_SCHULZ_STEPS))
    return [optax.partition({"muon": muon, "adamw": optax.scale_by_adam(config.b1, config.b2, config.epsilon)}, kinds)]


def _lion(config: LionDirection, axes: AxesTable) -> list[optax.GradientTransformation]:
    """Make Lion's direction: one momentum, 4 bytes of state per parameter in fp32 (Chen et al. 2023)."""
    return [store_moments(optax.scale_by_lion(config.b1, config.b2), config.moments)]


def _adafactor(config: AdafactorDirection, axes: AxesTable) -> list[optax.GradientTransformation]:
    """Make Adafactor's direction: means of rows and columns instead of a second moment (Shazeer and Stern 2018)."""
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=config.min_dim_size_to_factor)
    return [factored, optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()]


def _called(config: CalledOptimizer, learning_rate: optax.Schedule | None) -> optax.GradientTransformation:
    """Call the function of `optimizer.call`, which gets the schedule of the config where it sets a learning rate."""
    offered = {} if learning_rate is None else {"learning_rate": learning_rate}
    made = call_function("optimizer", config.call, config.args, offered=offered, must_take=tuple(offered))
    if isinstance(made, optax.GradientTransformation):
        return made
    raise ConfigError(
        f"optimizer.call={config.call} returned {described(made)}, not an optax transformation; return what "
        "optax.adamw(learning_rate) or optax.chain(...) gives"
    )


_DIRECTIONS: dict[str, Callable[[Any, AxesTable], list[optax.GradientTransformation]]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "muon": _muon,
    "lion": _lion,
    "adafactor": _adafactor,
}


def build_optimizer(
    config: OptimizerConfig, learning_rate: optax.Schedule | None, *, axes: AxesTable
) -> optax.GradientTransformation:
    """Build the optimizer that a config group describes, as an optax chain; declared `elementwise` where it is.

    Args:
        config: the kind of optimizer and its settings.
        learning_rate: optimizer step -> learning rate; None where a function of your own has one itself.
        axes: row of each parameter (`complete_axes`): which dims count layers, and what are matrices for Muon.
    """
    if isinstance(config, CalledOptimizer):
        return _called(config, learning_rate)
    assert learning_rate is not None, "the config of every kind has one"
    rest = _chain(config, learning_rate, config.weight_decay, axes)
    if not config.groups:
        return elementwise(rest) if updates_elementwise(config) else rest
    chains = []
    for group, direction in zip(config.groups, directions(config), strict=False):
        decay = config.weight_decay if group.weight_decay is None else group.weight_decay
        chains.append(_chain(direction, _times(learning_rate, group.learning_rate_factor), decay, axes))
    matches = [group.match for group in config.groups]
    grouped = by_group([*chains, rest], matches, key="optimizer.groups.{}.match")
    return elementwise(grouped) if updates_elementwise(config) else grouped


def _chain(
    config: DirectionConfig, learning_rate: optax.Schedule, weight_decay: float, axes: AxesTable
) -> optax.GradientTransformation:
    """Make a direction, the decay of matrices and the learning rate, in this order.

    The average of Adafactor (`b1`) is one of updates times their learning rates, as in `optax.adafactor`.
    """
    mask, pieces = decay_mask(axes), _DIRECTIONS[config.kind](config, axes)
    if isinstance(config, AdafactorDirection) and config.b1:
        rate, average = optax.scale_by_learning_rate(learning_rate, flip_sign=False), optax.ema(config.b1, debias=False)
        decay = optax.add_decayed_weights(lambda count: weight_decay * learning_rate(count), mask)
        return optax.chain(*pieces, rate, average, decay, optax.scale(-1.0))
    # The decay has a place in the chain even where it is 0: state is saved by its place in the chain, and a resumed run
    # may change the setting.
    decay = optax.add_decayed_weights(weight_decay, mask) if weight_decay else optax.identity()
    return optax.chain(*pieces, decay, optax.scale_by_learning_rate(learning_rate))


def _times(learning_rate: optax.Schedule, factor: float) -> optax.Schedule:
    return lambda count: factor * learning_rate(count)


# --- Which parameters are decayed, and which are trained. ---


def decay_mask(axes: AxesTable) -> Callable[[optax.Params], optax.Params]:
    """Make the mask of weight decay: params -> tree of bool, True for matrices and kernels.

    A parameter is decayed where it has two dims or more besides those that count layers and experts (`axes`, see
    `complete_axes`), unless it is named `bias` or `scale`, as attention biases [heads, head_dim] are.
    """

    def mask(params: optax.Params) -> optax.Params:
        def decays(path: jax.tree_util.KeyPath, leaf: jax.Array) -> bool:
            name = path_name(path)
            dims = leaf.ndim - len(counting_dims(name, leaf.shape, axes))
            return dims >= 2 and name.rsplit("/", 1)[-1] not in VECTORS

        return jax.tree_util.tree_map_with_path(decays, params)

    return mask


def trainable_predicate(freeze: tuple[str, ...], paths: list[str]) -> Callable[[str], bool] | None:
    """Make the predicate of the trained ones of these paths, by patterns of frozen ones; None: nothing is frozen.

    Raises a `ConfigError` where a pattern matches no parameter, or the patterns match all of them.
    """
    if not freeze:
        return None
    check_patterns("optimizer.freeze", freeze, paths)

    def trainable(path: str) -> bool:
        return not any(fnmatch.fnmatchcase(path, pattern) for pattern in freeze)

    if not any(map(trainable, paths)):
        raise ConfigError("optimizer.freeze matches every parameter; leave one to train")
    return trainable


# --- Learning rates: a linear warmup, then a shape. ---


def _inverse_sqrt(peak: float, final: float, start: int, end: int) -> optax.Schedule:
    """peak * sqrt(warmup / step) (Vaswani et al. 2017, section 5.3), with a warmup of at least 1."""
    return lambda count: peak * jnp.sqrt(max(start, 1) / (jnp.asarray(count, jnp.float32) + max(start, 1)))


# name -> (peak, final value, first step after warmup, step at which decay ends) -> schedule counted from `start`
_SHAPES: dict[str, Callable[[float, float, int, int], optax.Schedule]] = {
    "constant": lambda peak, final, start, end: optax.constant_schedule(peak),
    "linear": lambda peak, final, start, end: optax.linear_schedule(peak, final, end - start),
    # Half a period (Loshchilov and Hutter 2016).
    "cosine": lambda peak, final, start, end: optax.cosine_decay_schedule(peak, end - start, alpha=final / peak),
    "inverse_sqrt": _inverse_sqrt,
}


def build_schedule(config: ScheduleConfig, *, peak: float, steps: int) -> optax.Schedule:
    """Build the learning rate as a function of the optimizer step, of which the first is 0: int32 [] -> float32 [].

    It reaches `peak` after warmup and its final value one step after the last of a run of so many `steps`, and stays
    there; inverse_sqrt continues to fall. A run that is shorter than its warmup ends while the rate still rises.
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
