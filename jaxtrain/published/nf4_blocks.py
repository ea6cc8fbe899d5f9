"""4-bit normal floats (Dettmers et al. 2023, arXiv 2305.14314) in NumPy, equal to bitsandbytes. No jax here.

A row of weights is divided into blocks of 64. A block is stored as its largest magnitude (`absmax`) and a code of 4
bits per weight: the nearest of 16 levels between -1 and 1, which are quantiles of a normal distribution. Two codes
share a byte, the first in its high half. Double quantization stores the magnitudes in 8 bits too: less their mean
(`offset`), in blocks of 256, each a code of the dynamic 8-bit map times the block's own largest magnitude
(`nested_absmax`).

Shapes: R rows (outputs), I inputs, B = ceil(I / 64) blocks of a row, N = ceil(R B / 256) blocks of blocks.

Codes and magnitudes equal those of bitsandbytes 0.50.2 on CPU to the last bit wherever I divides by 64; elsewhere
bitsandbytes lets blocks run on into the next row, and ours end with theirs. The mean is the exact one, rounded; that of
torch depends on the CPU and its threads in the last bit. Magnitudes below 2**-126 count as 0.
"""

from functools import cache

import numpy as np

from jaxtrain.errors import ConfigError

BLOCK = 64
NESTED_BLOCK = 256
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 levels, as the paper's code publishes them."""
SMALLEST = np.finfo(np.float32).smallest_normal
# More blocks would overflow the exact sum of `mean_magnitude`, here and in its counterpart on devices.
MOST_BLOCKS = 2**24 - 1
# Weights quantized or dequantized at once: bounds what a large tensor takes beside its result.
_PIECE = 2**22


@cache
def level_bounds() -> np.ndarray:
    """Returns the middles of neighbouring levels: float32 [15]; a weight above a middle takes the upper level."""
    levels = np.array(LEVELS, np.float32)
    return (levels[:-1] + levels[1:]) / 2


@cache
def dynamic_map() -> np.ndarray:
    """Returns the signed dynamic 8-bit map (Dettmers 2015, arXiv 1511.04561): float32 [256], increasing.

    For each of seven decades, 10**-6 to 1, it holds the middles of 2**i equal parts of the interval from 0.1 to 1, i
    the number of the decade, with both signs; and 0 and 1.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        # In float32, as torch's linspace has it: an edge is reckoned from the nearer end and rounded once.
        count = 2**decade
        tenth, place = np.float32(0.1), np.arange(count + 1)
        step = np.float64((np.float32(1) - tenth) / np.float32(count))
        edges = np.where(place < (count + 1) // 2, tenth + step * place, 1 - step * (count - place)).astype(np.float32)
        middles = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        found += [*middles.tolist(), *(-middles).tolist()]
    return np.sort(np.array(found, np.float32))


@cache
def dynamic_bounds() -> np.ndarray:
    """Returns the smallest number that gets each code of `dynamic_map` but the first: float32 [255], not decreasing.

    bitsandbytes rounds a number from -1 to 1 to a grid of 2**16 points first and takes the nearest value of the map
    then, so that some values near 0 are never taken. The bounds are found by bisection over float32.
    """
    grid = np.arange(2**16) / 32767.5 - 1
    values = dynamic_map().astype(np.float64)
    right = np.clip(np.searchsorted(values, grid), 1, 255)
    nearest = np.where(values[right] - grid < grid - values[right - 1], right, right - 1)

    def code(numbers: np.ndarray) -> np.ndarray:
        point = (numbers + np.float32(1)) * np.float32(32767.5) + np.float32(0.5)
        return nearest[np.clip(point.astype(np.int64), 0, 2**16 - 1)]

    wanted = np.arange(1, 256)
    low, high = np.full(255, _order(np.float32(-1))), np.full(255, _order(np.float32(1)))
    while np.any(high - low > 1):
        middle = (low + high) // 2
        reached = code(_number(middle)) >= wanted
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    return _number(high)


def _order(number: np.float32) -> int:
    """The place of a float32 among all of them."""
    bits = int(number.view(np.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def _number(order: np.ndarray) -> np.ndarray:
    """The float32 of each place."""
    return np.where(order < 0, -order + 2**31, order).astype(np.uint32).view(np.float32)


def check_inputs(num_inputs: int, *, what: str) -> None:
    """Raises where a kernel cannot be stored in 4 bits.

    Args:
        num_inputs: I.
        what: Path or name of the kernel, for the message.

    Raises:
        ConfigError: I is odd.
    """
    if num_inputs % 2:
        raise ConfigError(
            f"nf4 stores two weights per byte, and {what} has {num_inputs} inputs, an odd number; use int8, or a "
            "model with an even width"
        )


def quantize_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes rows of weights.

    Args:
        rows: [R, I] of any float dtype, I even: a weight of torch's Linear.

    Returns:
        The packed codes, uint8 [R, I / 2], and the magnitudes, float32 [R, B].
    """
    count, inputs = rows.shape
    blocks = -(-inputs // BLOCK)
    codes, absmax = np.empty((count, inputs // 2), np.uint8), np.empty((count, blocks), np.float32)
    step = max(1, _PIECE // inputs)
    for start in range(0, count, step):
        part = np.zeros((len(rows[start : start + step]), blocks * BLOCK), np.float32)
        part[:, :inputs] = rows[start : start + step]
        part = part.reshape(-1, blocks, BLOCK)
        largest = np.abs(part).max(-1)
        absmax[start : start + step] = largest
        # The product with the reciprocal, not the quotient: they differ in the last bit.
        inverse = np.float32(1) / np.where(largest < SMALLEST, np.float32(1), largest)
        part *= inverse[..., None]
        found = np.zeros(part.shape, np.uint8)
        for bound in level_bounds():
            found += part > bound
        found = found.reshape(len(part), -1)[:, :inputs]
        codes[start : start + step] = found[:, ::2] << 4 | found[:, 1::2]
    return codes, absmax


def mean_magnitude(absmax: np.ndarray) -> np.float32:
    """Returns the mean of magnitudes, computed exactly from their first 32 bits below the largest one.

    The result does not depend on the order of the sum, so that every mesh of devices finds the same.
    """
    largest = absmax.max()
    if not np.isfinite(largest) or largest < SMALLEST:
        return np.float32(np.nan) if not np.isfinite(largest) else np.float32(0)
    bits = absmax.reshape(-1).view(np.uint32)
    exponent = bits >> 23
    top = int(exponent.max())
    # The leading 1 of a float32, and its 23 bits, moved to the place that they have below the largest.
    mantissa = np.where(exponent > 0, (bits & 0x7FFFFF | 0x800000) << 8, 0).astype(np.uint64)
    fixed = mantissa >> np.minimum(top - exponent, 63).astype(np.uint64)
    mean = int(fixed.sum()) // fixed.size
    return np.float32(np.ldexp(np.float32(np.uint32(mean)), top - 127 - 31))


def quantize_magnitudes(absmax: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Quantizes magnitudes to 8 bits: double quantization.

    Args:
        absmax: float32 [R, B].

    Returns:
        Codes, uint8 [R, B]; nested magnitudes, float32 [N]; and the offset.
    """
    offset = mean_magnitude(absmax)
    flat = (absmax - offset).reshape(-1)
    count = -(-flat.size // NESTED_BLOCK)
    part = np.zeros(count * NESTED_BLOCK, np.float32)
    part[: flat.size] = flat
    part = part.reshape(count, NESTED_BLOCK)
    nested = np.abs(part).max(1)
    inverse = np.float32(1) / np.where(nested < SMALLEST, np.float32(1), nested)
    codes = np.searchsorted(dynamic_bounds(), part * inverse[:, None], side="right").astype(np.uint8)
    # Of a block that has no spread the code does not matter; bitsandbytes writes 0.
    codes[nested < SMALLEST] = 0
    return codes.reshape(-1)[: flat.size].reshape(absmax.shape), nested, offset


def dequantize_magnitudes(
    codes: np.ndarray, nested_absmax: np.ndarray, offset: float, values: np.ndarray | None = None
) -> np.ndarray:
    """Returns the magnitudes that double quantization stands for.

    Args:
        codes: uint8 [R, B].
        nested_absmax: float32 [N].
        offset: What was taken off.
        values: The 8-bit map, float32 [256]; None: `dynamic_map`.

    Returns:
        float32 [R, B].
    """
    values = dynamic_map() if values is None else values
    scales = np.repeat(nested_absmax, NESTED_BLOCK)[: codes.size].reshape(codes.shape)
    return values[codes] * scales + np.float32(offset)


def dequantize_rows(codes: np.ndarray, absmax: np.ndarray, inputs: slice = slice(None)) -> np.ndarray:
    """Returns the weights that rows of codes stand for.

    Args:
        codes: Packed codes, uint8 [R, I / 2].
        absmax: Magnitudes, float32 [R, B].
        inputs: The inputs that are wanted.

    Returns:
        float32 [R, number of wanted inputs].
    """
    start, stop, _ = inputs.indices(2 * codes.shape[1])
    first, last = start // 2, -(-stop // 2)
    levels = np.array(LEVELS, np.float32)
    pairs = np.stack([np.repeat(levels, 16), np.tile(levels, 16)], axis=1)
    rows = pairs[codes[:, first:last]].reshape(len(codes), -1)[:, start - 2 * first : stop - 2 * first]
    return rows * absmax[:, np.arange(start, stop) // BLOCK]
