"""How many optimizer steps train on so many tokens or epochs. No jax here."""

import math
from fractions import Fraction

from jaxtrain.errors import ConfigError


def steps_for(
    *,
    tokens: float | None = None,
    epochs: float | None = None,
    rows_per_epoch: int | None = None,
    tokens_per_step: int | None = None,
    rows_per_step: int,
) -> int:
    """Optimizer steps that train on so many tokens or epochs, rounded up to whole steps.

    Args:
        tokens: to train on, with `tokens_per_step`; or
        epochs: to train for, with `rows_per_epoch`.
        rows_per_epoch: rows of the data.
        tokens_per_step: tokens of a global batch.
        rows_per_step: rows of a global batch.

    Returns:
        Steps.

    Raises:
        ConfigError: not exactly one of tokens and epochs, what it takes is missing.
    """
    if tokens is not None and epochs is None:
        if tokens_per_step is None:
            raise ConfigError(f"tokens {tokens:g} without tokens_per_step; give the tokens of a global batch")
        return math.ceil(_exact(tokens) / tokens_per_step)
    if epochs is not None and tokens is None:
        if rows_per_epoch is None:
            raise ConfigError(f"epochs {epochs:g} without rows_per_epoch; give the number of rows of the data")
        return math.ceil(_exact(epochs) * rows_per_epoch / rows_per_step)
    raise ConfigError(f"tokens {tokens} and epochs {epochs}; give one of the two")


def _exact(number: float) -> Fraction:
    """The number as it is written: 0.1 times 30 is then 3, and not a little more, which would round up to 4."""
    return Fraction(str(number))
