"""The blocks of a step of a model of transformer blocks: its stacks, and the layers around them. No jax here.

t tokens of one microbatch on one device, d width, h query and g key-value heads of width k, f MLP width, V vocabulary,
L sequence; c bytes of the compute dtype.
"""

import math

from jaxtrain.config.schema import Config, RematConfig
from jaxtrain.models.shipped.shapes import OuterLayer, Stack, Structure, mlp_shapes
from jaxtrain.ops.loss.blocks import LossBlocks, choose_blocks
from jaxtrain.plan.work.block import BACKWARD, BlockWork, DeviceBatch, recomputed_share
from jaxtrain.precision.dtypes import POLICY_DTYPES

# Of each number: read in 16 bits for the largest magnitude, read again, written in 8 bits.
_ROUNDING_BYTES = 5


def transformer_blocks(structure: Structure, config: Config, batch: DeviceBatch) -> list[BlockWork]:
    """The blocks of the stacks of a model and of the layers around them."""
    blocks: list[BlockWork] = []
    for index, stack in enumerate(structure.stacks):
        blocks += _stack_blocks(stack, index, config, batch)
    size, context = POLICY_DTYPES[config.precision.policy].compute_bytes, batch.degrees["context"]
    streams = [(batch.rows * one.length / context * one.blocks.embed_dim, one.blocks) for one in structure.stacks]
    # A look-up reads and writes, and so does a norm.
    looked_up = sum(numbers * (1 + blocks.embedding_norm) for numbers, blocks in streams)
    entry = [_outer_layer(one, batch, size) for one in structure.entry]
    embed = BlockWork(
        "embedding",
        batch.microbatches,
        sum(flops for flops, _ in entry),
        2 * size * looked_up + sum(moved for _, moved in entry),
    )
    return [*blocks, embed, _output(structure, config, batch)]


def _outer_layer(layer: OuterLayer, batch: DeviceBatch, size: int) -> tuple[float, float]:
    """FLOPs and bytes of a layer around the stacks, which is not sharded over `tensor`."""
    positions, context = layer.positions, batch.degrees["context"]
    rows = batch.rows * (positions / context if positions > 1 else 1)
    weights = layer.inputs * layer.outputs
    return 2 * rows * weights, size * (weights + rows * (layer.inputs + layer.outputs))


def _stack_blocks(stack: Stack, index: int, config: Config, batch: DeviceBatch) -> list[BlockWork]:
    """The blocks of one stack, the `index`-th of the model."""
    model, length, label = stack.blocks, stack.length, stack.label
    degrees, size = batch.degrees, POLICY_DTYPES[config.precision.policy].compute_bytes
    tensor, context = degrees["tensor"], degrees["context"]
    t, d = batch.rows * length / context, model.embed_dim
    heads, groups = model.num_heads, model.kv_heads
    k = model.head_width
    f = model.mlp_width
    count = model.num_layers // degrees["pipe"] * batch.microbatches
    # A stage keeps its inputs only and runs forward once more before its backward.
    again = 1.0 if degrees["pipe"] > 1 else 0.0
    remat = config.remat
    attention = batch.attention[index]

    weights = d * (2 * heads + 2 * groups) * k / tensor
    streams = t * (2 * d + (2 * heads + 2 * groups) * k / tensor)
    matrices = len(mlp_shapes(model))
    projected = recomputed_share(remat, matmul=True, names=("query", "key", "value", "attention_projection")) + again
    projections = BlockWork(
        f"{label}attention projections",
        count,
        2 * t * weights,
        size * (weights + streams),
        projected,
        stage=True,
        linear=True,
    )
    computed = t * length * heads / tensor * attention.computed
    score_bytes = size * t * (2 * heads + 2 * groups) * k / tensor + attention.score_bytes * computed
    # Scores have batch dims, so that policy dots recomputes them too where their result is not kept.
    kept = attention.keeps_output
    recomputed = attention.again + recomputed_share(remat, matmul=kept, names=("attention_output",))
    scores = BlockWork(
        f"{label}attention scores",
        count,
        4 * computed * k,
        score_bytes,
        recomputed + again,
        stage=True,
    )
    cross: list[BlockWork] = []
    if stack.memory_length is not None:
        s, of_memory = batch.rows * stack.memory_length / context, batch.attention[index + 1]
        moved = weights + t * (2 * d + 2 * heads * k / tensor) + s * (2 * d + 2 * groups * k / tensor)
        crossed = t * stack.memory_length * heads / tensor * of_memory.computed
        cross = [
            BlockWork(
                f"{label}cross-attention projections",
                count,
                2 * d * k / tensor * (2 * heads * t + 2 * groups * s),
                size * moved,
                projected,
                stage=True,
                linear=True,
            ),
            BlockWork(
                f"{label}cross-attention scores",
                count,
                4 * crossed * k,
                size * (2 * heads * t + 2 * groups * s) * k / tensor + of_memory.score_bytes * crossed,
                recomputed_share(remat, matmul=False, names=("attention_output",)) + again,
                stage=True,
            ),
        ]
    experts, work = model.experts, batch.experts
    assert (experts is None) == (work is None)
    rows, multiplied, stored, router = 1.0, 1.0, 1.0, 0.0
    if experts is not None and work is not None:
        rows, multiplied, stored = work.rows, work.multiplied, experts.num_experts / degrees["expert"]
        router = 2 * t * d * experts.num_experts
    mlp_weights = matrices * d * f / tensor
    mlp_flops = 2 * t * mlp_weights * multiplied
    # What a manual region runs again is the experts, not the router before it.
    experts_again = 0.0 if work is None else work.again * mlp_flops / (mlp_flops + router)
    mlp_recomputed = recomputed_share(remat, matmul=True, names=("mlp_hidden", "mlp_output"))
    mlp = BlockWork(
        f"{label}MLP" if experts is None else "experts",
        count,
        mlp_flops + router,
        size * (mlp_weights * stored + rows * t * (2 * d + matrices * f / tensor)),
        max(mlp_recomputed, experts_again) + again,
        stage=True,
        linear=experts is None,
    )
    residual = tensor if config.parallel.sequence_parallel else 1
    # A norm reads and writes the residual stream, a sum of two reads both and writes: 10 passes with norms of inputs or
    # of sums, 14 with those of outputs too, 5 more with cross-attention. Then the rotation of queries and keys, their
    # norms, and the nonlinearity.
    passes = ((14 if model.block == "sandwich" else 10) + 5 * bool(cross)) * d / residual
    rotated = (6 if model.qk_norm else 4) * (heads + groups) * k / tensor
    elementwise = BlockWork(
        f"{label}norms, residual, activation",
        count,
        0.0,
        size * t * (passes + rotated + 3 * rows * f / tensor),
        recomputed_share(remat, matmul=False) + again,
        stage=True,
    )
    blocks = [projections, scores, *cross, mlp]
    if batch.scaled:
        numbers = _rounded_numbers(remat, weights, d + heads * k / tensor, d + (heads + 2 * groups) * k / tensor, t)
        if cross:
            numbers *= 2
        if experts is None:
            numbers += _rounded_numbers(remat, mlp_weights, d + f / tensor, d + (matrices - 1) * f / tensor, t)
        # A block's backward pass counts twice its forward pass, which is all that there is here.
        moved = _ROUNDING_BYTES * numbers / (1 + BACKWARD)
        blocks.append(BlockWork(f"{label}rounding to 8 bits", count, 0.0, moved, stage=True))
    return [*blocks, elementwise]


def logit_blocks_of(config: Config, tokens: float, width: int, vocabulary: float) -> LossBlocks:
    """How the step's loss computes the logits of one device in blocks, by the rule of `ops/loss/blocks.py`."""
    loss, size = config.loss, POLICY_DTYPES[config.precision.policy].compute_bytes
    by = None if loss.logits == "auto" else loss.logits
    return choose_blocks(math.ceil(tokens), width, math.ceil(vocabulary), itemsize=size, by=by, size=loss.block)


def _output(structure: Structure, config: Config, batch: DeviceBatch) -> BlockWork:
    """The head and the loss."""
    size = POLICY_DTYPES[config.precision.policy].compute_bytes
    if structure.vocabulary is None:
        layers = [_outer_layer(one, batch, size) for one in structure.head]
        flops, moved = sum(flops for flops, _ in layers), sum(moved for _, moved in layers)
        return BlockWork("output and loss", batch.microbatches, flops, moved)
    last = structure.stacks[-1]
    t, d = batch.rows * last.length / batch.degrees["context"], last.blocks.embed_dim
    vocabulary = structure.vocabulary / batch.degrees["tensor"]
    block = _logits(logit_blocks_of(config, t, d, vocabulary), batch.microbatches, t, d, vocabulary, size)
    before = [_outer_layer(one, batch, size) for one in structure.head[:-1]]
    if not before:
        return block
    flops, moved = block.flops + sum(f for f, _ in before), block.bytes + sum(b for _, b in before)
    return BlockWork(block.name, block.count, flops, moved, block.recomputed)


def _logits(logit_blocks: LossBlocks, count: int, t: float, d: int, vocabulary: float, size: int) -> BlockWork:
    """Output layer and loss; bytes are a share of the step's, as if backward were twice forward."""
    flops, logits, factors = 2 * t * d * vocabulary, t * vocabulary, size * (d * vocabulary + t * d)
    if logit_blocks.by == "whole":
        # Logits are written, read for the loss in float32 and once more for its gradient.
        return BlockWork("output and loss", count, flops, factors + 3 * size * logits)
    # A block of logits is written and read in float32, its gradient written and read by two matmuls.
    gradients = 3 * size * logits
    if logit_blocks.by == "tokens":
        sums = 8 * d * vocabulary * logit_blocks.count
        return BlockWork("output and loss", count, flops, factors + (8 * logits + gradients + sums) / (1 + BACKWARD))
    sums = 8 * t * d * logit_blocks.count
    # Logits are computed twice.
    return BlockWork("output and loss", count, flops, factors + (16 * logits + gradients + sums) / (2 + BACKWARD), 1.0)


def _rounded_numbers(remat: RematConfig, weights: float, inputs: float, outputs: float, tokens: float) -> float:
    """Numbers that a step rounds: weights and inputs for each forward pass, gradients of outputs once."""
    forwards = 1 if remat.policy == "none" else 2
    return forwards * (weights + tokens * inputs) + tokens * outputs
