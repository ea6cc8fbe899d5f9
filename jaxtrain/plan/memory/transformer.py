"""Activations of a model of transformer blocks on one device: what is kept, and what one block and the head need.

The constants count what XLA keeps; they were fitted to what compilers said, see `step.py`.
"""

import math

from jaxtrain.config.schema import Config
from jaxtrain.metrics.flops import structure_block
from jaxtrain.models.shipped.shapes import Stack, Structure, mlp_shapes
from jaxtrain.ops.loss.blocks import block_bytes
from jaxtrain.parallel.schedules import Schedule
from jaxtrain.plan.memory.record import Work
from jaxtrain.plan.work.block import DeviceBatch
from jaxtrain.plan.work.transformer import logit_blocks_of
from jaxtrain.precision.dtypes import POLICY_DTYPES
from jaxtrain.remat.segments import segment_layers

_FP32 = 4
# Bytes for each score (a pair of a query and a key of one head) beside its weight in the compute dtype: float32 scores
# and gradients in the backward pass of a block, and what remat "none" keeps of them from the forward pass. The TPU's
# compiler fuses more.
_SCORE_WORK = {"gpu": 9, "tpu": 4, "cpu": 9}
_SCORE_KEPT = {"gpu": 9, "tpu": 6, "cpu": 9}
# More of the same where queries share keys: XLA for GPUs keeps copies with the dims of a group in another order.
_GROUPED_SCORE_WORK = {"gpu": 3, "tpu": 0, "cpu": 0}
# Tensors of the width of the residual stream that the backward pass of a block works on beside matmul results.
_STREAMS = 6
# The same of a forward pass alone, whose results of matmuls live as long as the next one.
_FORWARD_STREAMS = 3
# And those that remat "none" keeps of each norm and the sum beside it. The two norms of a parallel block begin alike,
# and count as one.
_NORM_STREAMS = 4
# Float32 arrays of whole logits that XLA for CPUs has at once, whatever the compute dtype: those, their exponentials
# and their gradient. Other compilers fuse them into one of the compute dtype.
_LOGITS_OF_CPU = 3
_NORMS = {"sandwich": 4, "parallel": 1}


def transformer_work(
    structure: Structure, config: Config, batch: DeviceBatch, schedule: Schedule | None, kind: str, lowest: int = 0
) -> Work:
    """The activations of a step.

    Args:
        structure: of the model.
        config: the run.
        batch: what a device works on.
        schedule: of the pipeline, whose stages keep their inputs whatever is trained.
        kind: of the hardware: cpu, gpu or tpu.
        lowest: number of the first block that is trained (`metrics/flops.py`); a stack below it runs forward alone.
    """
    works, forward = [], 0.0
    for index, stack in enumerate(structure.stacks):
        if schedule is None and structure_block(stack.path) < lowest:
            forward = max(forward, _forward_block(stack, index, config, batch, kind))
        else:
            works.append(_stack(stack, index, config, batch, schedule, kind))
    kept, moved = sum(one.kept for one in works), sum(one.moved for one in works)
    last, degrees = structure.stacks[-1], batch.degrees
    size, width = POLICY_DTYPES[config.precision.policy].compute_bytes, last.blocks.embed_dim
    t = batch.rows * last.length / degrees["context"]
    if not works:
        # The output of the stacks, for the head; and for a norm before it.
        kept = (_NORM_STREAMS if lowest <= structure_block("output_norm") else 1) * size * t * width
    # What runs forward alone is done before anything is kept.
    block = max([*(one.block for one in works), forward - kept])
    if structure.vocabulary is None:
        return Work(kept, block, 0.0, moved)
    vocabulary = structure.vocabulary / degrees["tensor"]
    logit_blocks = logit_blocks_of(config, t, width, vocabulary)
    head = block_bytes(logit_blocks, math.ceil(t), width, math.ceil(vocabulary), itemsize=size)
    if kind == "cpu" and logit_blocks.by == "whole":
        head = _LOGITS_OF_CPU * _FP32 * t * vocabulary
    return Work(kept, block, head, moved)


def whole_logits(structure: Structure, config: Config, batch: DeviceBatch) -> bool:
    """Whether the logits of a device are computed at once, if there are any; arguments as `transformer_work` takes."""
    last, degrees = structure.stacks[-1], batch.degrees
    tokens = batch.rows * last.length / degrees["context"]
    vocabulary = (structure.vocabulary or 0) / degrees["tensor"]
    return vocabulary == 0 or logit_blocks_of(config, tokens, last.blocks.embed_dim, vocabulary).by == "whole"


def _forward_block(stack: Stack, index: int, config: Config, batch: DeviceBatch, kind: str) -> float:
    """Bytes that a block of a stack works on at once in its forward pass alone; arguments as `_stack` takes."""
    model, degrees = stack.blocks, batch.degrees
    size, tensor = POLICY_DTYPES[config.precision.policy].compute_bytes, degrees["tensor"]
    t, k = batch.rows * stack.length / degrees["context"], model.head_width
    stream = size * t * model.embed_dim / (tensor if config.parallel.sequence_parallel else 1)
    scores = batch.rows * batch.attention[index].pairs_at_once * model.num_heads / tensor
    if stack.memory_length is not None:
        crossed = batch.rows * batch.attention[index + 1].pairs_at_once * model.num_heads / tensor
        scores = max(scores, crossed)
    rows = 1.0 if batch.experts is None else batch.experts.rows
    matrices = len(mlp_shapes(model))
    columns, score_bytes, streams = 2 * model.num_heads + 2 * model.kv_heads, _FP32 + size, _FORWARD_STREAMS
    if kind == "tpu":  # whose compiler fuses what stands between two matmuls into one of them
        columns, score_bytes, streams, matrices = 2 * model.num_heads, size, 1, 1
    attention = size * t * columns * k / tensor + score_bytes * scores
    mlp = size * t * rows * matrices * model.mlp_width / tensor
    # Rows on their way to experts and back.
    mlp += 0.0 if batch.experts is None else 2 * size * t * rows * model.embed_dim
    return streams * stream + max(attention, mlp)


def _stack(stack: Stack, index: int, config: Config, batch: DeviceBatch, schedule: Schedule | None, kind: str) -> Work:
    """The activations of one stack, the `index`-th of the model, without those of a head."""
    model = stack.blocks
    degrees, size = batch.degrees, POLICY_DTYPES[config.precision.policy].compute_bytes
    tensor, context = degrees["tensor"], degrees["context"]
    t, d = batch.rows * stack.length / context, model.embed_dim
    heads, groups = model.num_heads, model.kv_heads
    k = model.head_width
    rows = 1.0 if batch.experts is None else batch.experts.rows
    hidden = rows * model.mlp_width / tensor
    matrices = len(mlp_shapes(model)) - 1
    norms = _NORMS.get(model.block, 2) + (stack.memory_length is not None)
    residual = tensor if config.parallel.sequence_parallel else 1
    layers = model.num_layers // degrees["pipe"]

    stream = size * t * d / residual
    queries = size * t * (heads + 2 * groups) * k / tensor
    attention = batch.attention[index]
    scores = batch.rows * attention.pairs_at_once * heads / tensor
    kernel = attention.name not in ("reference", "context")
    # A kernel keeps row statistics of its softmax in place of scores; "dots" keeps the result beside them where a
    # kernel names both.
    statistics = _FP32 * t * heads / tensor if kernel else 0.0
    named = size * t * heads * k / tensor + statistics if attention.keeps_output else 0.0
    outputs = queries + size * t * (2 * d / residual + matrices * hidden)  # results of weight matmuls
    inner = size * t * (heads * k / tensor + 2 * hidden)
    crossed = 0.0
    if stack.memory_length is not None:
        of_memory = batch.attention[index + 1]
        crossed = batch.rows * of_memory.pairs_at_once * heads / tensor
        memory = size * batch.rows * stack.memory_length / context
        outputs += size * t * (heads * k / tensor + d / residual) + memory * 2 * groups * k / tensor
        inner += size * t * heads * k / tensor
    sizes = {"query": heads * k, "key": groups * k, "value": groups * k, "attention_output": heads * k}
    widths = {name: width / tensor for name, width in sizes.items()}
    widths |= {"attention_projection": d / residual, "mlp_hidden": hidden, "mlp_output": d / residual}
    widths["block_input"] = d / residual
    remat = config.remat
    moved = size * t * sum(widths[name] for name in remat.offload)
    match remat.policy:
        case "full" | "sqrt":
            kept = 0.0 if "block_input" in remat.offload else stream
        case "dots":
            kept = stream + outputs + named
        case "names":
            kept = (0.0 if "block_input" in remat.offload else stream) + size * t * sum(widths[n] for n in remat.names)
        case _:
            kept = (
                _NORM_STREAMS * norms * stream
                + outputs
                + inner
                + (statistics if kernel else (_SCORE_KEPT[kind] + size) * scores)
                + (_SCORE_KEPT[kind] + size) * crossed
            )
    # What is not kept is computed again, all of one block at once.
    again = 0.0 if remat.policy == "none" else outputs + inner if remat.policy in ("full", "sqrt") else inner
    # Of what is offloaded, that of one layer is on its way. More norms than two work on as much again each.
    streams = _STREAMS + 2 * max(0, norms - 2)
    score_work = _SCORE_WORK[kind] + size + (_GROUPED_SCORE_WORK[kind] if groups < heads else 0)
    block = again + moved + streams * stream + score_work * max(scores, crossed)
    if batch.experts is not None and model.experts is not None:
        block += size * t * 4 * rows * d
        if batch.experts.sums_gradients:
            here = model.experts.num_experts / degrees["expert"]
            block += _FP32 * here * (matrices + 1) * d * model.mlp_width / tensor
    if attention.name == "blockwise":
        block += 2 * _FP32 * t * groups * k / tensor  # sums of the gradients of keys and values
    chunk = layers // (1 if schedule is None else schedule.num_chunks)
    moved *= chunk
    kept *= segment_layers(chunk).live if remat.policy == "sqrt" else chunk
    if schedule is not None:
        # Stage inputs of the microbatches under way, beside all that one stage keeps while it runs backward.
        kept += schedule.peak_live() * stream
    return Work(kept, block, 0.0, moved)
