"""How an offloaded optimizer's arrays are sliced for the update. No jax here: the planner counts with it."""

import math

# The largest slice of one moment, in bytes of float32 per device.
SLICE_BYTES = 128 * 2**20


def num_slices(shape: tuple[int, ...]) -> int:
    """Count the equal slices of the first dim in which an array of this local shape is updated.

    Args:
        shape: of the array on one device.

    Returns:
        The fewest slices of at most `SLICE_BYTES`; where none are that small, one per entry of the first dim.
    """
    least = math.ceil(4 * math.prod(shape) / SLICE_BYTES)
    if least <= 1 or not shape:
        return 1
    return next((n for n in range(least, shape[0]) if shape[0] % n == 0), shape[0])
