"""Which rows: an endless training order computed from the position alone, random numbers of rows, splits.

A Feistel network is a bijection of 2^bits numbers. Applying it again to every result that is not below the number of
rows makes it a bijection of the rows (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"). It is vectorised
over positions: grain's own shuffle takes 3 to 20 microseconds per row, and milliseconds where there are few rows.
"""

import functools
from dataclasses import dataclass

import numpy as np

from jaxtrain.errors import ConfigError, DataError

# With fewer rounds, data of fewer than ten rows has visibly unequal chances for each row and place.
_ROUNDS = 12

# Odd constants with mixed bits (Steele et al. 2014, SplitMix64).
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
# 2^64 times the fractional part of the golden ratio, whose multiples lie evenly in 0 to 2^64 and have no period.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)

# Constant, so that every run keeps the same rows for evaluation, whatever its seed.
_SPLIT_SEED = 20240601


def permuted(positions: np.ndarray, *, num_rows: int, seed: int) -> np.ndarray:
    """Returns the index at each position (int64 [B], from 0) of the endless order: row + epoch * num_rows, int64 [B].

    Positions e * num_rows to (e + 1) * num_rows - 1 are epoch e, and hold every row once; the seed decides the order.
    """
    epochs, places = np.divmod(np.asarray(positions, np.int64), num_rows)
    key = np.random.SeedSequence(seed % 2**64).generate_state(1, np.uint64)
    keys_B = mix(epochs.astype(np.uint64) * _GOLDEN + key)
    bits = max(2, (num_rows - 1).bit_length())
    rows = _bijection(places.astype(np.uint64), keys_B, bits=bits)
    outside = np.flatnonzero(rows >= num_rows)
    while len(outside):
        rows[outside] = _bijection(rows[outside], keys_B[outside], bits=bits)
        outside = outside[rows[outside] >= num_rows]
    return rows.astype(np.int64) + epochs * num_rows


def _bijection(values: np.ndarray, keys: np.ndarray, *, bits: int) -> np.ndarray:
    """Permutes the numbers below 2^bits: each half of the bits in turn is changed by a hash of the other half."""
    width = np.uint64(bits // 2)
    low_mask = (np.uint64(1) << width) - np.uint64(1)
    high_mask = (np.uint64(1) << np.uint64(bits - bits // 2)) - np.uint64(1)
    high, low = values >> width, values & low_mask
    for _ in range(_ROUNDS // 2):
        keys = keys + _GOLDEN
        high = high ^ (mix(low ^ keys) & high_mask)
        keys = keys + _GOLDEN
        low = low ^ (mix(high ^ keys) & low_mask)
    return (high << width) | low


def uniform_numbers(seed: int, stream: int, rows: np.ndarray, count: int) -> np.ndarray:
    """Returns numbers in [0, 1), float64 [B, count], made of the seed, the stream, and the row and place of each.

    Row numbers (int64 [B]) include the epoch where epochs draw other numbers; the stream tells draws for a row apart.
    """
    key = np.random.SeedSequence([seed % 2**64, stream]).generate_state(1, np.uint64)
    rows_B1 = mix(mix(rows.astype(np.uint64) * _GOLDEN + key))[:, None]
    places_C = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    # The highest 53 bits are a float64 without rounding.
    return (mix(mix(rows_B1 + places_C)) >> np.uint64(11)) * 2.0**-53


def mix(values: np.ndarray) -> np.ndarray:
    """Returns a hash of each number, uint64 of the same shape."""
    for multiplier in _MULTIPLIERS:
        values = values * multiplier
        values = values ^ (values >> _SHIFT)
    return values


@dataclass(frozen=True)
class Span:
    """The tokens `start` to `stop - 1` of a stream."""

    start: int
    stop: int

    def num_rows(self, sequence_length: int) -> int:
        """Returns how many rows the span contains; the last one needs one token more, for its last target."""
        return max(0, (self.stop - self.start - 1) // sequence_length)


def num_held_out(total: int, fraction: float, *, least: int = 1) -> int:
    """Returns how many of so many rows (or tokens) a validation fraction takes; 0 where it is 0."""
    if fraction == 1:
        raise ConfigError(
            "data.validation_fraction=1 leaves no rows to train on; give less, or evaluate a run on all rows: jaxtrain "
            "eval RUN data.path=FILE data.validation_fraction=1"
        )
    return max(least, round(total * fraction)) if fraction else 0


def split_examples(num_rows: int, *, validation_fraction: float, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows at random, in every run alike: the numbers of training and validation rows, int64 each."""
    held_out = num_held_out(num_rows, validation_fraction)
    if num_rows <= held_out:
        raise DataError(
            f"{label} has too few rows ({num_rows}) for a training and a validation part; "
            "add rows or set data.validation_fraction=0 (or 1, to evaluate a trained run on all rows)"
        )
    order = np.random.default_rng(_SPLIT_SEED).permutation(num_rows)
    return order[held_out:], order[:held_out]


@functools.lru_cache(maxsize=2)
def evaluated_numbers(num_rows: int, most: int | None) -> np.ndarray:
    """Returns the numbers of the held-out rows that are evaluated, at most `most`: int64 [rows], rising.

    They are those whose multiples of the golden ratio, taken modulo 1, are the smallest: about as many of every stretch
    and of every residue, so that the classes of a sorted file and the sources of a mixture have their shares.
    """
    if most is None or most >= num_rows:
        return np.arange(num_rows)
    places = np.arange(num_rows, dtype=np.uint64) * _GOLDEN
    return np.sort(np.argpartition(places, most - 1)[:most])
