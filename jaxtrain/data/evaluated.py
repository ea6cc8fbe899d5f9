"""Which of the held-out rows are evaluated where a run evaluates no more than some of them."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import grain

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 times the fractional part of the golden ratio, whose multiples lie evenly in 0 to 1 and have no period."""


def evaluated_numbers(num_rows: int, most: int | None, *, spread: bool = True) -> np.ndarray:
    """Returns the numbers of the rows that are evaluated: int64 [rows], rising, a function of the arguments alone.

    Spread rows are one of each of `most` equal stretches, so that the classes of a sorted file and the sources of a
    mixture have their shares. Its place in the stretch moves from one to the next by the golden ratio: always the first
    would be one class of a file that lists its classes in turn.

    Args:
        num_rows: how many rows are held out.
        most: how many of them are evaluated at most; None: all.
        spread: whether they are spread over all rows; otherwise they are the first ones.
    """
    if most is None or most >= num_rows:
        return np.arange(num_rows)
    if not spread:
        return np.arange(most)
    starts = np.arange(most + 1) * num_rows // most
    # 16 bits of the fraction: a product with the length of a stretch stays within 64 bits.
    shares = (np.arange(most, dtype=np.uint64) * _GOLDEN >> np.uint64(48)).astype(np.int64)
    return starts[:-1] + (np.diff(starts) * shares >> 16)


def evaluated_rows(rows: "grain.MapDataset", most: int | None, *, spread: bool) -> "grain.MapDataset":
    """Returns the rows that are evaluated; see `evaluated_numbers`."""
    # Imported here because grain takes a quarter of a second.
    from jaxtrain.data.rows import selected_rows

    if most is None or most >= len(rows):
        return rows
    return selected_rows(rows, evaluated_numbers(len(rows), most, spread=spread))
