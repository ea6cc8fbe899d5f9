"""Which blocks of scores each device of a ring computes: the rule of the step and of the planner. No jax here.

Chunks are in the zig-zag order of `ring.py`: of 2n chunks, device i computes chunks i and 2n-1-i. The tests call these
functions with ints.
"""

from typing import Any

# A block of scores as (query half, key half): 0 or 1, or bool [] where it depends on the device.
ScoreBlock = tuple[Any, Any]


def home(chunk: int, size: int) -> int:
    """Return the device of the ring that computes a chunk.

    Args:
        chunk: index of the chunk, of 2 * size chunks in the order of the sequence.
        size: devices of the ring.
    """
    return min(chunk, 2 * size - 1 - chunk)


def own_blocks(*, causal: bool) -> tuple[ScoreBlock, ...]:
    """Return the blocks of a device's queries and its own keys.

    Pairs of equal halves come first; in a causal model their upper triangles are masked.

    Args:
        causal: whether a query sees only keys at or before its own position.
    """
    return ((0, 0), (1, 1), (1, 0)) if causal else ((0, 0),)


def passing_blocks(own: Any, source: Any, *, causal: bool) -> tuple[ScoreBlock, ...]:
    """Return the blocks of a device's queries and the keys of another device; nothing in them is masked.

    In zig-zag order the late half of each device's queries sees the early half of every device's keys. Besides, its
    early half sees the early half of an earlier device's keys, and its late half the late half of a later device's.

    Args:
        own: index of the device with the queries, int or int32 [].
        source: index of the device with the keys, int or int32 [].
        causal: whether a query sees only keys at or before its own position.
    """
    later = source > own
    return ((1, 0), (later, later)) if causal else ((0, 0),)


def score_elements(own: int, *, size: int, length: int, causal: bool) -> int:
    """Count the products of a query and a key that a device computes per head, masked ones included.

    Args:
        own: index of the device on the ring.
        size: devices of the ring.
        length: positions of the sequence, over all devices.
        causal: whether a query sees only keys at or before its own position.
    """
    others = (passing_blocks(own, source, causal=causal) for source in range(size) if source != own)
    count = len(own_blocks(causal=causal)) + sum(len(blocks) for blocks in others)
    return count * (length // (size * (2 if causal else 1))) ** 2
