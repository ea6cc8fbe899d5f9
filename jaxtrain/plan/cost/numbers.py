"""What a number of a cost may be. No jax here."""

import math

from jaxtrain.errors import ConfigError


def check_positive(name: str, value: float) -> None:
    """Raise where a number is not positive and finite."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value}; give a positive number")


def check_not_negative(name: str, value: float) -> None:
    """Raise where a number is negative or not finite."""
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {value}; give zero or a positive number")


def check_count(name: str, value: int) -> None:
    """Raise where a number is not a whole one of at least 1."""
    if not 1 <= value < math.inf or value != int(value):
        raise ConfigError(f"{name} is {value}; give a whole number, at least 1")
