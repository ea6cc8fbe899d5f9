"""What follows from the lengths of a model with longrope. No jax here."""

import math


def longrope_factor(original_length: int, max_length: int) -> float:
    """The factor of cos and sin that a model has whose longrope scaling gives none: sqrt(1 + ln(s) / ln(o)).

    Args:
        original_length: o.
        max_length: positions of the model, s times o.
    """
    extension = max_length / original_length
    return math.sqrt(1 + math.log(extension) / math.log(original_length)) if extension > 1 else 1.0
