"""Optimizers as optax chains. A new one is a function of its config group and one line of the table.

Every chain is: direction, then decoupled weight decay of matrices, then minus the learning rate. Clipping, loss
scaling and the non-finite guard belong to the step, which needs the gradient norm anyway.
"""

from collections.abc import Callable, Mapping
from typing import Any

import optax

from jaxtrain.config.schema import AdafactorConfig, AdamWConfig, LionConfig, OptimizerConfig, SGDConfig
from jaxtrain.optim.masks import decay_mask


def _sgd(config: SGDConfig) -> list[optax.GradientTransformation]:
    return [optax.trace(config.momentum, nesterov=config.nesterov)] if config.momentum else []


def _adamw(config: AdamWConfig) -> list[optax.GradientTransformation]:
    """Two moments: 8 bytes of state a parameter in fp32 (Loshchilov and Hutter 2017)."""
    return [optax.scale_by_adam(config.b1, config.b2, config.epsilon)]


def _lion(config: LionConfig) -> list[optax.GradientTransformation]:
    """One momentum: 4 bytes of state a parameter in fp32 (Chen et al. 2023)."""
    return [optax.scale_by_lion(config.b1, config.b2)]


def _adafactor(config: AdafactorConfig) -> list[optax.GradientTransformation]:
    """Row and column sums instead of a second moment (Shazeer and Stern 2018), in the order optax.adafactor has."""
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=config.min_dim_size_to_factor)
    pieces = [factored, optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()]
    return pieces + ([optax.ema(config.b1, debias=False)] if config.b1 else [])


_DIRECTIONS: dict[str, Callable[[Any], list[optax.GradientTransformation]]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "lion": _lion,
    "adafactor": _adafactor,
}


def build_optimizer(
    config: OptimizerConfig,
    learning_rate: optax.Schedule,
    *,
    axes: Mapping[str, tuple[str | None, ...]],
) -> optax.GradientTransformation:
    """The chain that an optimizer group describes.

    Args:
        config: kind and its numbers.
        learning_rate: optimizer step -> learning rate.
        axes: the model's table, which tells layer dims from others for the decay mask.

    Returns:
        gradients (fp32, clipped) -> updates to add to the parameters.
    """
    decay = [optax.add_decayed_weights(config.weight_decay, decay_mask(axes))] if config.weight_decay else []
    return optax.chain(*_DIRECTIONS[config.kind](config), *decay, optax.scale_by_learning_rate(learning_rate))
