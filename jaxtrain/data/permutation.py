"""An endless training order computed from the position alone: each epoch is another permutation, and nothing is stored.

A Feistel network is a bijection of 2^bits numbers. Applying it again to every result that is not below the number of
rows makes it a bijection of the rows (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"). It is vectorised
over positions: grain's own shuffle takes 3 to 20 microseconds per row, and milliseconds where there are few rows.
"""

import numpy as np

from jaxtrain.errors import DataError

# With fewer rounds, data of fewer than ten rows has visibly unequal chances for each row and place.
_ROUNDS = 12

# Odd constants with mixed bits (Steele et al. 2014, SplitMix64).
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def permuted(positions: np.ndarray, *, num_rows: int, seed: int) -> np.ndarray:
    """Returns the row at each position of the endless order.

    Positions e * num_rows to (e + 1) * num_rows - 1 are epoch e, and hold every row once.

    Args:
        positions: int64 [B], counted from 0.
        num_rows: Rows per epoch.
        seed: Decides the order; an integer of any size.

    Returns:
        Row numbers, int64 [B].

    Raises:
        DataError: There are no rows.
    """
    if num_rows < 1:
        raise DataError(f"an order of {num_rows} rows does not exist; give data with at least one row")
    epochs, places = np.divmod(np.asarray(positions, np.int64), num_rows)
    key = np.random.SeedSequence(seed % 2**64).generate_state(1, np.uint64)
    keys_B = mix(epochs.astype(np.uint64) * _INCREMENT + key)
    bits = max(2, (num_rows - 1).bit_length())
    rows = _bijection(places.astype(np.uint64), keys_B, bits=bits)
    outside = np.flatnonzero(rows >= num_rows)
    while len(outside):
        rows[outside] = _bijection(rows[outside], keys_B[outside], bits=bits)
        outside = outside[rows[outside] >= num_rows]
    return rows.astype(np.int64)


def _bijection(values: np.ndarray, keys: np.ndarray, *, bits: int) -> np.ndarray:
    """Permutes the numbers below 2^bits: each half of the bits in turn is changed by a hash of the other half."""
    width = np.uint64(bits // 2)
    low_mask = (np.uint64(1) << width) - np.uint64(1)
    high_mask = (np.uint64(1) << np.uint64(bits - bits // 2)) - np.uint64(1)
    high, low = values >> width, values & low_mask
    for _ in range(_ROUNDS // 2):
        keys = keys + _INCREMENT
        high = high ^ (mix(low ^ keys) & high_mask)
        keys = keys + _INCREMENT
        low = low ^ (mix(high ^ keys) & low_mask)
    return (high << width) | low


def uniform_numbers(seed: int, stream: int, rows: np.ndarray, count: int) -> np.ndarray:
    """Returns numbers in [0, 1) that depend on nothing but the seed, the stream, and the row and place of each.

    Args:
        seed: An integer of any size.
        stream: Tells apart what is drawn for the same rows.
        rows: Row numbers, int64 [B], the epoch included where epochs draw other numbers.
        count: C, numbers per row.

    Returns:
        float64 [B, C].
    """
    key = np.random.SeedSequence([seed % 2**64, stream]).generate_state(1, np.uint64)
    rows_B1 = mix(mix(rows.astype(np.uint64) * _INCREMENT + key))[:, None]
    places_C = np.arange(1, count + 1, dtype=np.uint64) * _INCREMENT
    # The highest 53 bits are a float64 without rounding.
    return (mix(mix(rows_B1 + places_C)) >> np.uint64(11)) * 2.0**-53


def mix(values: np.ndarray) -> np.ndarray:
    """Returns a hash of each number, uint64 of the same shape."""
    for multiplier in _MULTIPLIERS:
        values = values * multiplier
        values = values ^ (values >> _SHIFT)
    return values
