"""Rows of the experts' grouped matmuls and of their exchange: the rule of the step and of the planner. No jax here.

No token is dropped: shapes hold what an even routing needs with room to spare, and loops run again for the rest.
"""

import math

# A block of rows meets the kernel of one expert, whose last block is filled up. Kernels for TPU take tiles of 128 rows
# (jax 0.10.2, compiled for v5e); on CPU a matmul of 128 rows runs at the rate of a large one.
_TILE = 128
_SMALLEST, _LARGEST = 16, 256
# Of an expert's rows at most one block in eight is filled up where the rows are many.
_BLOCKS_PER_EXPERT = 8
# Room of a round of the exchange over an even routing, and in rows for batches so small that chance rules.
_ROOM, _SPARE_ROWS = 1.25, 8


def block_rows(platform: str, num_rows: float, num_experts: int) -> int:
    """Count the rows of a block of a grouped matmul.

    It is a power of two, or `num_rows` of the grouped matmul where those are fewer; experts are those of one device.
    """
    if platform != "cpu":
        return _TILE
    wanted = max(num_rows / (_BLOCKS_PER_EXPERT * num_experts), 1)
    block = min(max(2 ** round(math.log2(wanted)), _SMALLEST), _LARGEST)
    return max(min(block, int(num_rows)), 1)


def multiplied_rows(platform: str, num_rows: float, filled: float, num_experts: int) -> float:
    """Count the rows that a backend multiplies with the kernel of one expert each, if the routing is even.

    Of `num_rows` of the grouped matmul, `filled` hold a token; experts are those of one device.
    """
    block = block_rows(platform, num_rows, num_experts)
    return num_experts * math.ceil(filled / num_experts / block) * block


def round_rows(num_tokens: float, experts_per_token: int, num_experts: int, shards: int) -> int:
    """Count the rows that a device sends to each shard of experts in one round of the exchange.

    A row is a pair of a token, of one device, and an expert, of all shards. A routing that sends more of them to some
    shard takes more rounds.
    """
    most = num_tokens * min(experts_per_token, num_experts // shards)
    even = num_tokens * experts_per_token / shards
    return math.ceil(min(_ROOM * even + _SPARE_ROWS, most))


def is_one_round(num_tokens: float, experts_per_token: int, num_experts: int, shards: int) -> bool:
    """Whether a round of the exchange holds every routing."""
    rows = round_rows(num_tokens, experts_per_token, num_experts, shards)
    return rows >= num_tokens * min(experts_per_token, num_experts // shards)
