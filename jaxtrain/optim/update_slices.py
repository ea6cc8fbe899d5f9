"""In how many slices an offloaded optimizer updates its arrays. No jax here: the planner counts with it."""

import math

# The largest slice of one moment, in bytes of float32 per device.
SLICE_BYTES = 128 * 2**20


def num_slices(shape: tuple[int, ...]) -> int:
    """Return in how many slices of its first dim an array is updated.

    Args:
        shape: shape of the array on one device.

    Returns:
        The smallest number that divides the first dim and keeps a slice within `SLICE_BYTES`; where there is none, the
        size of the first dim.
    """
    least = math.ceil(4 * math.prod(shape) / SLICE_BYTES)
    if least <= 1 or not shape:
        return 1
    return next((n for n in range(least, shape[0]) if shape[0] % n == 0), shape[0])
