"""How blockwise attention partitions a sequence: the rule of the kernel and of the planner. No jax here."""

import itertools
import math
from dataclasses import dataclass

# Queries of a block: (sequences up to this, block). Small ones skip more of the future, large ones make better
# products: on CPU a step of bench_cpu (256 tokens) takes 2.7 % less with 128 than with 64, one of quickstart (128) 10 %
# more. Accelerators want them larger.
_BLOCKS = {"cpu": ((128, 64), (math.inf, 128))}
_LARGE = ((math.inf, 256),)
# Groups of blocks, each with its own keys: 8 leave 1/16 of the products above the causal diagonal's half.
_MAX_GROUPS = 8
# Bytes of float32 scores, for each core of a CPU, that its caches keep from one operation to the next. Measured on 2
# cores with 1 MiB of second-level cache each, 16 rows of 6 heads, 256 tokens: 48 ms in parts of 0.8 MiB a core, 51 in
# parts of 0.4 or 1.6, 60 all at once.
_SCORES_IN_CACHE = 2**20
_FP32 = 4


@dataclass(frozen=True)
class QueryBlocks:
    """Blocks of `size` queries from `start` on, each of which meets `width` keys.

    Attributes:
        start: first query.
        size: queries of a block.
        blocks: how many.
        width: keys that a block meets: those from 0 on, or with a window those from `window - 1` before its first
            query on (moved inwards at the ends of the sequence).
        window: of the form, where the keys move with the block.
    """

    start: int
    size: int
    blocks: int
    width: int
    window: int | None


def block_size(platform: str, length: int) -> int:
    """Queries of a block on a platform (cpu, gpu, tpu) for sequences of a length."""
    return next(block for limit, block in _BLOCKS.get(platform, _LARGE) if length <= limit)


def cut_sequence(length: int, block: int, *, causal: bool, window: int | None) -> list[QueryBlocks]:
    """The blocks of a sequence, grouped by the keys that they meet; the last holds the rest of the queries."""
    block = min(block, length)
    rest = [(length - length % block, 1, length % block)] if length % block else []
    if window is not None:
        width = window - 1 + block + (0 if causal else window - 1)
        if width < length:
            return [
                QueryBlocks(start, size, count, width, window)
                for start, count, size in [(0, length // block, block), *rest]
            ]
    full = length // block
    num_groups = min(full, _MAX_GROUPS) if causal else 1
    bounds = [full * index // num_groups for index in range(num_groups + 1)]
    rows = [(low * block, high - low, block) for low, high in itertools.pairwise(bounds)] + rest
    return [
        QueryBlocks(start, size, count, start + count * size if causal else length, None) for start, count, size in rows
    ]


def computed_share(length: int, block: int, *, causal: bool, window: int | None) -> float:
    """Of all pairs of a query and a key, those that are multiplied."""
    groups = cut_sequence(length, block, causal=causal, window=window)
    return sum(group.blocks * group.size * group.width for group in groups) / length**2


def visible_pairs(length: int, *, causal: bool, window: int | None) -> float:
    """Pairs of a query and a key that see each other, as areas: half of all where order matters.

    Args:
        length: tokens of a sequence.
        causal: whether a query sees only keys at or before its own position.
        window: keys that a query sees on a side, its own included; None: all.
    """
    window = length if window is None else min(window, length)
    return (1 if causal else 2) * (window * length - window**2 / 2)


def pairs_at_once(length: int, block: int, *, causal: bool, window: int | None) -> int:
    """The most pairs of a query and a key, of one row and head, whose scores exist at once."""
    return max(group.size * group.width for group in cut_sequence(length, block, causal=causal, window=window))


def row_parts(rows: int, scores: int, cores: int) -> int:
    """In how many parts of equal size a CPU attends to its rows: the fewest whose scores stay in its caches.

    Args:
        rows: of the batch.
        scores: pairs of a query and a key, of all heads of one row, whose scores exist at once.
        cores: among which the scores are divided.

    Returns:
        A divisor of rows; as many as rows where not even those of one row stay.
    """
    for parts in range(1, rows):
        if rows % parts == 0 and rows // parts * scores * _FP32 <= _SCORES_IN_CACHE * cores:
            return parts
    return rows
