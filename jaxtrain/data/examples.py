"""What sources of examples (images, tables) have in common: the record they return, and the split."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.errors import DataError

if TYPE_CHECKING:
    import grain

# Constant, so that the rows kept for evaluation are the same in every run, whatever its seed.
_SPLIT_SEED = 20240601


@dataclass(frozen=True)
class Examples:
    """Rows of independent examples.

    Attributes:
        train: Finite rows.
        validation: The rows kept for evaluation, if any.
        num_outputs: Classes, or columns to predict.
        input_shape: Shape of one row's "inputs".
        identity: What identifies the rows, for the fingerprint.
        description: Lines for people.
        reading: See `Data.reading`.
    """

    train: "grain.MapDataset"
    validation: "grain.MapDataset | None"
    num_outputs: int
    input_shape: tuple[int, ...]
    identity: dict[str, Any]
    description: tuple[str, ...]
    reading: dict[str, Any] | None = None


def matching_reading(reading: Mapping[str, Any] | None, *, kind: str) -> Mapping[str, Any] | None:
    """Returns a saved `Data.reading` where it is that of a source of this kind."""
    return reading if reading is not None and reading.get("kind") == kind else None


def split_examples(num_rows: int, *, validation_fraction: float, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row numbers of the training and the validation part: a fixed random split.

    Raises:
        DataError: There are too few rows for both parts.
    """
    held_out = max(1, round(num_rows * validation_fraction)) if validation_fraction else 0
    if num_rows <= held_out:
        raise DataError(
            f"{label} has too few rows ({num_rows}) for a training and a validation part; "
            "add rows or set data.validation_fraction=0"
        )
    order = np.random.default_rng(_SPLIT_SEED).permutation(num_rows)
    return order[held_out:], order[:held_out]
