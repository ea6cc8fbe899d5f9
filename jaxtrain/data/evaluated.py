"""Which of the held-out rows are evaluated where a run evaluates no more than some of them."""

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import grain

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 times the fractional part of the golden ratio, whose multiples lie evenly in 0 to 1 and have no period."""


@functools.lru_cache(maxsize=2)
def evaluated_numbers(num_rows: int, most: int | None) -> np.ndarray:
    """Returns the numbers of the rows that are evaluated: int64 [rows], rising, a function of the arguments alone.

    Kept between the evaluations of a run, of which each asks for them again.

    Spread rows are those whose multiples of the golden ratio, taken modulo 1, are the smallest: about as many of every
    stretch and of every residue, so that the classes of a sorted file, those of a file that lists them in turn, and the
    sources of a mixture have their shares.

    Args:
        num_rows: how many rows are held out.
        most: how many of them are evaluated at most; None: all.
    """
    if most is None or most >= num_rows:
        numbers = np.arange(num_rows)
    else:
        places = np.arange(num_rows, dtype=np.uint64) * _GOLDEN
        numbers = np.sort(np.argpartition(places, most - 1)[:most])
    numbers.flags.writeable = False
    return numbers


def evaluated_rows(rows: "grain.MapDataset", most: int | None) -> "grain.MapDataset":
    """Returns the rows that are evaluated; see `evaluated_numbers`."""
    # Imported here because grain takes a quarter of a second.
    from jaxtrain.data.rows import selected_rows

    if most is None or most >= len(rows):
        return rows
    return selected_rows(rows, evaluated_numbers(len(rows), most))
