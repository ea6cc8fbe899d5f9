"""Which blocks of scores each device of a ring computes: the rule of the step and of the planner. No jax here.

The order is the zig-zag of `ring.py`: of 2n chunks device i works on chunks i and 2n-1-i. The tests run it with ints.
"""

from typing import Any

# A block of scores as (query half, key half): 0 or 1, or bool [] where it depends on the device.
ScoreBlock = tuple[Any, Any]


def home(chunk: int, size: int) -> int:
    """The device that works on a chunk of 2 * size in zig-zag order."""
    return min(chunk, 2 * size - 1 - chunk)


def own_blocks(*, causal: bool) -> tuple[ScoreBlock, ...]:
    """Blocks of a device's queries and its own keys; the equal pairs come first and are triangles if causal."""
    return ((0, 0), (1, 1), (1, 0)) if causal else ((0, 0),)


def passing_blocks(own: Any, source: Any, *, causal: bool) -> tuple[ScoreBlock, ...]:
    """Blocks of a device's queries and the keys of another device, all of them fully visible.

    Chunks in zig-zag order: the late half of any device sees the early half of every device. Apart from that, keys
    of an earlier device show their early half to our early half, keys of a later one their late half to our late one.

    Args:
        own, source: indices of the two devices, ints or int32 [].
        causal: whether order matters.
    """
    later = source > own
    return ((1, 0), (later, later)) if causal else ((0, 0),)


def score_elements(own: int, *, size: int, length: int, causal: bool) -> int:
    """Products of a query and a key that device `own` computes per head, masked ones included.

    Args:
        own: index on the ring.
        size: devices of the ring.
        length: positions of the full sequence.
        causal: whether order matters.
    """
    others = (passing_blocks(own, source, causal=causal) for source in range(size) if source != own)
    count = len(own_blocks(causal=causal)) + sum(len(blocks) for blocks in others)
    return count * (length // (size * (2 if causal else 1))) ** 2
