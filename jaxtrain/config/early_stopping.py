"""The config group `evaluation.early_stopping`, and which values of a metric are better. No jax here."""

import re
from typing import Literal

from jaxtrain.config.base import Group
from jaxtrain.config.numbers import NonNegative, PositiveInt

# Of the shipped tasks; metrics of other names are an accuracy or are taken for something that falls.
_HIGHER_IS_BETTER = ("eval_margin", "eval_chosen_reward", "eval_chosen_score")
_ACCURACY = re.compile("(?<!in)accuracy", re.IGNORECASE)


class EarlyStoppingConfig(Group):
    """When a run ends before its last step, because a metric of the evaluations gets no better."""

    metric: str = "eval_loss"
    """Metric of the evaluation, under its name in metrics.jsonl."""
    patience: PositiveInt = 3
    """Stop after this many evaluations in a row without a better value."""
    min_delta: NonNegative = 0.0
    """A value is better if it differs from the best one by more than this."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether lower (min) or higher (max) values are better; auto: higher ones of an accuracy, lower ones of others."""


def is_higher_better(metric: str, mode: str | None) -> bool:
    """Whether higher values of a metric are better.

    Args:
        metric: under its name in metrics.jsonl.
        mode: of early stopping: min, max or auto, which goes by the name; None as auto.
    """
    if mode in ("min", "max"):
        return mode == "max"
    return metric in _HIGHER_IS_BETTER or _ACCURACY.search(metric) is not None
