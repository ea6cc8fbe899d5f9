"""Rows of one text each that say of each token whether it is padding. Shapes: B rows, L tokens of a row."""

import dataclasses

import numpy as np

from jaxtrain.data.rows import MappedRows, Row, Rows
from jaxtrain.data.sources.dataset import Data


def with_segments(data: Data) -> Data:
    """Returns data whose rows have `tokens` and `segments` in place of `inputs`.

    Args:
        data: Rows of one text each, or of a pair of texts, filled up at their end, with weights per token.
    """
    sides = {name: getattr(data, name) for name in ("train", "validation")}
    return dataclasses.replace(
        data, **{name: MappedRows(rows, _marked) if isinstance(rows, Rows) else rows for name, rows in sides.items()}
    )


def _marked(rows: Row, indices: np.ndarray) -> Row:
    places_L = np.arange(rows["weights"].shape[-1])
    # What follows the last target that counts changes nothing in a model that sees what is before a token alone.
    last = np.max(np.where(rows["weights"] != 0, places_L, -1), axis=-1, keepdims=True)
    return {**rows, "inputs": {"tokens": rows["inputs"], "segments": (places_L <= last).astype(np.int32)}}
