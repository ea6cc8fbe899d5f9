"""The split of examples for evaluation."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import ConfigError, DataError

# Constant, so that every run keeps the same rows for evaluation, whatever its seed.
_SPLIT_SEED = 20240601


def matching_reading(reading: Mapping[str, Any] | None, *, kind: str) -> Mapping[str, Any] | None:
    """Returns a saved `Data.reading` if it belongs to a source of this kind, else None."""
    return reading if reading is not None and reading.get("kind") == kind else None


def check_leaves_rows(validation_fraction: float) -> None:
    """Raises a ConfigError where all rows would be held out; a run that is opened for evaluation splits nothing."""
    if validation_fraction == 1:
        raise ConfigError(
            "data.validation_fraction=1 leaves no rows to train on; give less, or evaluate a run on all rows: jaxtrain "
            "eval RUN data.path=FILE data.validation_fraction=1 (in Python: give 0, and run.evaluate(data.train))"
        )


def split_examples(num_rows: int, *, validation_fraction: float, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows into a training and a validation part, at random but the same in every run.

    Args:
        num_rows: Number of rows.
        validation_fraction: Fraction of the rows in the validation part; 0: no such part.
        label: Name of the data in the message.

    Returns:
        The row numbers of the training part and of the validation part, int64 each.

    Raises:
        ConfigError: The fraction is 1.
        DataError: There are too few rows for both parts.
    """
    check_leaves_rows(validation_fraction)
    held_out = max(1, round(num_rows * validation_fraction)) if validation_fraction else 0
    if num_rows <= held_out:
        raise DataError(
            f"{label} has too few rows ({num_rows}) for a training and a validation part; "
            "add rows or set data.validation_fraction=0 (or 1, to evaluate a trained run on all rows)"
        )
    order = np.random.default_rng(_SPLIT_SEED).permutation(num_rows)
    return order[held_out:], order[:held_out]
