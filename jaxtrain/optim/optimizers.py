"""Optimizers as optax chains. A new one is a function of its config group and one line of the table.

Every chain is a direction, then decoupled weight decay of matrices, then a product with minus the learning rate.
Clipping, loss scaling and the guard against non-finite gradients belong to the step, which needs the gradient norm
anyway.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

from jaxtrain.config.optimizers import (
    AdafactorDirection,
    AdamWDirection,
    CalledOptimizer,
    DirectionConfig,
    LionDirection,
    MuonDirection,
    OptimizerConfig,
    SGDDirection,
)
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import AxesTable
from jaxtrain.layout.sharding import path_name
from jaxtrain.layout.state_entries import counting_dims
from jaxtrain.optim import adafactor
from jaxtrain.optim.elementwise import elementwise
from jaxtrain.optim.groups import by_group
from jaxtrain.optim.masks import decay_mask
from jaxtrain.optim.moments import store_moments
from jaxtrain.optim.muon import orthogonalize
from jaxtrain.optim.rules import NEWTON_SCHULZ_STEPS, Matrix, as_matrix, directions, updates_elementwise
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
        return as_matrix(path, shape, axes, exclude=config.adamw)

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
    counting = partial(counting_dims, axes=axes)
    factored = adafactor.scale_by_factored_rms(counting, config.min_dim_size_to_factor)
    return [factored, adafactor.clip_and_scale(counting)]


def _called(config: CalledOptimizer, learning_rate: optax.Schedule | None) -> optax.GradientTransformation:
    """Call the function of `optimizer.call`, which gets the schedule of the config where it sets a learning rate."""
    must_take = () if learning_rate is None else ("learning_rate",)
    offered = {"learning_rate": learning_rate} if must_take else {}
    made = call_function("optimizer", config.call, config.args, offered=offered, must_take=must_take)
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
    """Build the optimizer that a config group describes, as an optax chain.

    Args:
        config: the kind of optimizer and its settings.
        learning_rate: optimizer step -> learning rate; None where a function of your own has one itself.
        axes: row of each parameter (`complete_axes`). It says which dims count layers and experts, and which parameters
            are matrices for Muon.

    Returns:
        gradients (float32, clipped) -> updates to add to the parameters; declared `elementwise` where it is.

    Raises:
        ConfigError: a function of `optimizer.call` that cannot be called or returns something else.
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
