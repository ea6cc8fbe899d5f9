"""How an offloaded optimizer's arrays are cut for the update. No jax here: the planner counts with it."""

import math

# The largest slice of one moment, in bytes of float32 a device.
SLICE_BYTES = 128 * 2**20


def num_slices(shape: tuple[int, ...]) -> int:
    """Slices of the first dim that an array of a device passes in: the fewest that are small enough, else all."""
    least = math.ceil(4 * math.prod(shape) / SLICE_BYTES)
    if least <= 1 or not shape:
        return 1
    return next((n for n in range(least, shape[0]) if shape[0] % n == 0), shape[0])
