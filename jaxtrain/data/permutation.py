"""An endless training order by arithmetic: position -> row, each epoch another permutation, nothing stored.

A Feistel network is a bijection of 2^bits numbers; walking its cycle until it lands below the number of rows makes it
one of the rows (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"). It is vectorised over positions:
grain's own shuffle takes 3 to 20 microseconds per row, and milliseconds where there are few rows.
"""

import numpy as np

from jaxtrain.errors import DataError

# Fewer leave a visible preference of place where there are fewer than ten rows.
_ROUNDS = 12

# Odd constants with mixed bits (Steele et al. 2014, SplitMix64).
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def permuted(positions: np.ndarray, *, num_rows: int, seed: int) -> np.ndarray:
    """Returns the row at each position of the endless order.

    Positions e * num_rows to (e + 1) * num_rows - 1 are epoch e, and hold every row once.

    Args:
        positions: int64 [B], from 0.
        num_rows: Rows of an epoch.
        seed: Decides the order; of any size.

    Returns:
        Row numbers, int64 [B].

    Raises:
        DataError: There are no rows.
    """
    if num_rows < 1:
        raise DataError(f"an order of {num_rows} rows does not exist; give data with at least one row")
    epochs, places = np.divmod(np.asarray(positions, np.int64), num_rows)
    key = np.random.SeedSequence(seed % 2**64).generate_state(1, np.uint64)
    keys_B = _mix(epochs.astype(np.uint64) * _INCREMENT + key)
    bits = max(2, (num_rows - 1).bit_length())
    rows = _bijection(places.astype(np.uint64), keys_B, bits=bits)
    outside = np.flatnonzero(rows >= num_rows)
    while len(outside):
        rows[outside] = _bijection(rows[outside], keys_B[outside], bits=bits)
        outside = outside[rows[outside] >= num_rows]
    return rows.astype(np.int64)


def _bijection(values: np.ndarray, keys: np.ndarray, *, bits: int) -> np.ndarray:
    """Permutes the numbers below 2^bits: the two halves in turn are changed by a hash of the other."""
    width = np.uint64(bits // 2)
    low_mask = (np.uint64(1) << width) - np.uint64(1)
    high_mask = (np.uint64(1) << np.uint64(bits - bits // 2)) - np.uint64(1)
    high, low = values >> width, values & low_mask
    for _ in range(_ROUNDS // 2):
        keys = keys + _INCREMENT
        high = high ^ (_mix(low ^ keys) & high_mask)
        keys = keys + _INCREMENT
        low = low ^ (_mix(high ^ keys) & low_mask)
    return (high << width) | low


def _mix(values: np.ndarray) -> np.ndarray:
    for multiplier in _MULTIPLIERS:
        values = values * multiplier
        values = values ^ (values >> _SHIFT)
    return values
