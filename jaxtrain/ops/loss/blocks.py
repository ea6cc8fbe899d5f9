"""How the logits of a batch are partitioned for the loss: the rule of the step and of the planner. No jax here.

N tokens of a microbatch on one device, D width, V ids of the vocabulary on one device.

- whole: logits are an array of N x V. This takes three matmuls (forward, gradients of both factors).
- tokens: a block has some of the tokens; gradients are made in the forward pass. This takes three matmuls too, and a
  float32 sum of D x V for the gradient of the output layer, which each block reads and writes: blocks must be large to
  hide that.
- vocabulary: a block has some of the ids, and each block is computed twice: for the logsumexp, and for the gradients.
  This takes four matmuls, and nothing is larger than a block but a float32 sum of N x D.
"""

import math
from dataclasses import dataclass

from jaxtrain.config.schema import Logits

_FP32 = 4
# Logits up to this size (counted in float32) stay one array: nothing is as fast, and it is little beside a model.
_SMALL_BYTES = 2**30
# Bytes of a block of float32 logits by vocabulary. The sum of N x D is read and written once a block: 8 N D bytes to
# 6 N D FLOP per id, so that 1,024 ids are three times what an H100 or a TPU v5e needs to stay bound by its matmuls.
_BLOCK_BYTES = 128 * 2**20
_LEAST_IDS = 1024
# Widths of matmul tiles on every accelerator divide it.
_TILE = 128
# Tokens of a block: 8 D V bytes to 6 D V FLOP per token.
_TOKENS = 2048
# Blocks of tokens must divide the memory of all logits by this, or blocks are by vocabulary, which saves more and costs
# a matmul.
_LEAST_SAVING = 2


@dataclass(frozen=True)
class LossBlocks:
    """How logits are partitioned into blocks.

    Attributes:
        by: whole (one block), or the dimension that is partitioned.
        size: tokens or ids of a block.
        count: of blocks; the last one overlaps the one before where they do not divide.
    """

    by: Logits
    size: int
    count: int


def choose_blocks(
    tokens: int, width: int, vocabulary: int, *, itemsize: int, by: Logits | None = None, size: int | None = None
) -> LossBlocks:
    """Choose the blocks of N tokens of width D and V ids on one device.

    Args:
        tokens, width, vocabulary: N, D, V.
        itemsize: bytes of the compute dtype.
        by: the dimension to partition; None: whole where that is small, tokens where that saves enough, else
            vocabulary.
        size: tokens or ids of a block; None: from the sizes.
    """
    if by is None:
        by = _choose(tokens, width, vocabulary, itemsize)
    if by == "whole":
        return LossBlocks("whole", tokens, 1)
    total = tokens if by == "tokens" else vocabulary
    size = min(size or (_TOKENS if by == "tokens" else ids_at_once(tokens)), total)
    return LossBlocks(by, size, math.ceil(total / size))


def ids_at_once(tokens: int) -> int:
    """Ids of a block where the vocabulary is partitioned, for so many tokens on a device."""
    return max(_LEAST_IDS, _BLOCK_BYTES // (_FP32 * tokens) // _TILE * _TILE)


def block_bytes(blocks: LossBlocks, tokens: int, width: int, vocabulary: int, *, itemsize: int) -> int:
    """Count the bytes that the loss holds at its peak: one block's logits and the sums, without the gradients."""
    match blocks.by:
        case "whole":
            return itemsize * tokens * vocabulary
        case "tokens":
            return (_FP32 + itemsize) * blocks.size * vocabulary + _FP32 * width * vocabulary
        case "vocabulary":
            return (_FP32 + itemsize) * tokens * blocks.size + _FP32 * tokens * width


def _choose(tokens: int, width: int, vocabulary: int, itemsize: int) -> Logits:
    whole = _FP32 * tokens * vocabulary
    if whole <= _SMALL_BYTES:
        return "whole"
    by_tokens = LossBlocks("tokens", min(_TOKENS, tokens), 1)
    if (
        _LEAST_SAVING * block_bytes(by_tokens, tokens, width, vocabulary, itemsize=itemsize)
        <= itemsize * tokens * vocabulary
    ):
        return "tokens"
    return "vocabulary"
