"""How the logits of a batch are cut for the loss: the one rule of the step and of the planner. No jax here.

N tokens of a microbatch on one device, D width, V ids of the vocabulary on one device.

- whole: logits are an array of N x V. Three matmuls (forward, gradients of both factors).
- tokens: some tokens at once; gradients are made in the forward pass. Three matmuls too, and a float32 sum of D x V for
  the gradient of the output layer, which each block reads and writes: blocks must be large to hide that.
- vocabulary: some ids at once, twice: for the logsumexp, and for the gradients. Four matmuls, and nothing larger than a
  block but a float32 sum of N x D.
"""

import math
from dataclasses import dataclass

from jaxtrain.config.loss import Logits

_FP32 = 4
# Whole logits up to here (counted in float32) are left whole: nothing is as fast, and it is little beside a model.
_SMALL_BYTES = 2**30
# Of a block of float32 logits, where ids are cut. The sum of N x D is read and written once a block: 8 N D bytes to
# 6 N D FLOP an id, so that 1,024 ids are three times what an H100 or a TPU v5e needs to stay bound by its matmuls.
_BLOCK_BYTES = 128 * 2**20
_LEAST_IDS = 1024
# Widths of matmul tiles on every accelerator divide it.
_TILE = 128
# Tokens of a block: 8 D V bytes to 6 D V FLOP a token.
_TOKENS = 2048
# Cutting tokens must save this much of whole logits, or ids are cut, which saves more and costs a matmul.
_LEAST_SAVING = 2


@dataclass(frozen=True)
class LossBlocks:
    """How logits are cut.

    Attributes:
        by: whole, or what is cut.
        size: tokens or ids of a block.
        count: of blocks; the last one overlaps the one before where they do not divide.
    """

    by: Logits
    size: int
    count: int


def choose_blocks(
    tokens: int, width: int, vocabulary: int, *, itemsize: int, by: Logits | None = None, size: int | None = None
) -> LossBlocks:
    """The cut for these sizes on one device.

    Args:
        tokens, width, vocabulary: N, D, V.
        itemsize: bytes of the compute dtype.
        by: the cut to make; None: whole where that is small, by tokens where that saves enough, else by vocabulary.
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
    """Ids of a block where the vocabulary is cut."""
    return max(_LEAST_IDS, _BLOCK_BYTES // (_FP32 * tokens) // _TILE * _TILE)


def block_bytes(blocks: LossBlocks, tokens: int, width: int, vocabulary: int, *, itemsize: int) -> int:
    """What the loss holds at its peak beside the gradients that it gives: one block's logits and the sums."""
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
