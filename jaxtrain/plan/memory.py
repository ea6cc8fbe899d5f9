"""Memory of a step on one device by part, without compiling: state exactly, the rest by what compilers keep.

The constants count bytes that XLA keeps for each element of a tensor. They were fitted to what compilers said of the
layouts in `tests/plan/compiled.json`, which the model meets within 15 % (one it misses by 17 %). No jax here.
"""

import math
from dataclasses import dataclass, field, replace

from jaxtrain.config.model import MLPConfig, ResNetConfig, TransformerConfig, ViTConfig
from jaxtrain.layout.rules import stage_over_data
from jaxtrain.metrics.flops import structure_block
from jaxtrain.models.shipped.shapes import Stack, Structure, inner_width, latent_width, mlp_shapes, norm_names
from jaxtrain.ops.loss.blocks import block_bytes
from jaxtrain.optim import rules as update_slices
from jaxtrain.optim.rules import num_slices, updates_elementwise
from jaxtrain.plan.state import StateBytes, local_size
from jaxtrain.plan.step import DeviceStep
from jaxtrain.plan.targets import Target
from jaxtrain.plan.work import logit_blocks_of
from jaxtrain.precision.dtypes import POLICY_DTYPES
from jaxtrain.remat.segments import segment_layers
from jaxtrain.runtime.distributed import GPU_MEMORY_FRACTION

_FP32 = 4
# Of the capacity: what jax leaves to CUDA's context, cuBLAS and NCCL. libtpu's capacity is what programs get.
_RESERVED = {"gpu": 1 - GPU_MEMORY_FRACTION}


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by part, at the moment of the step when most is allocated.

    Attributes:
        parts: name -> bytes, in the order to show: parameters, optimizer state, moving average, model state, reference
            model, gradients, parameters in compute dtype, activations, working set, logits, communication, batch.
        state_bytes: of the parts, what lives between steps.
        capacity_bytes: of the device; None: not known.
        reserved_bytes: of the capacity, what the runtime, the compiler's fragmentation and libraries take.
        host_parts: name -> bytes in the host's memory for one device: what is offloaded.
        is_complete: whether the parts are all there is; of functions of the user's own only some are known.
    """

    parts: dict[str, int]
    state_bytes: int
    capacity_bytes: int | None
    reserved_bytes: int = 0
    host_parts: dict[str, int] = field(default_factory=dict)
    is_complete: bool = True

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return sum(self.parts.values())

    @property
    def usable_bytes(self) -> int | None:
        """What is left of the capacity for a step; None where that is not known."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.reserved_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within what is left of the capacity; None where that is not known."""
        if self.usable_bytes is None:
            return None
        if self.total_bytes > self.usable_bytes:
            return False
        return True if self.is_complete else None


def reserved_bytes(target: Target) -> int:
    """Bytes of a device's memory that a program does not get."""
    return round(_RESERVED.get(target.hardware.kind, 0.0) * (target.hardware.memory_bytes or 0))


def step_memory(step: DeviceStep, state: StateBytes, target: Target) -> Memory:
    """The peak of one device."""
    config, work = step.config, step_work(step, target.hardware.kind)
    gradients, cast, gathered = _parameters(step)
    in_head = work.head > work.block
    offload = config.optimizer.offload
    # The update comes when activations are gone.
    on_its_way = _state_on_its_way(step, state) if offload else 0
    parts = {
        "parameters": state.params,
        "optimizer state": 0 if offload else state.optimizer,
        "optimizer state being updated": max(0, round(on_its_way - work.kept - max(work.block, work.head))),
        "moving average": state.average,
        "model state": state.model_state,
        "reference model": state.reference,
        "gradients": round(gradients),
        "parameters in compute dtype": round(cast),
        "gathered parameters": round(gathered),
        "dequantized kernel": round(_dequantized(step)),
        "activations": round(work.kept),
        "block being computed": 0 if in_head else round(work.block),
        "logits": round(work.head) if in_head else 0,
        "batch": round(step.microbatches * step.rows * step.workload.row_bytes / step.degrees["context"]),
    }
    host = {"optimizer state": state.optimizer if offload else 0, "activations": round(work.moved)}
    return Memory(
        {name: size for name, size in parts.items() if size},
        state.total - host["optimizer state"],
        target.hardware.memory_bytes or None,
        reserved_bytes(target),
        {name: size for name, size in host.items() if size},
    )


def _state_on_its_way(step: DeviceStep, state: StateBytes) -> int:
    """Bytes of an offloaded optimizer state that are on one device at once: as they came, and as they go back."""
    if not updates_elementwise(step.config.optimizer):
        return 2 * state.optimizer
    small = largest = total = 0
    for one in step.trained:
        shape = [
            local_size((dim,), (entry,), step.degrees) for dim, entry in zip(one.shape, one.state_entries, strict=True)
        ]
        size = _FP32 * math.prod(shape)
        total += size
        small += size if size <= update_slices.SLICE_BYTES else 0
        largest = max(largest, size // num_slices(tuple(shape)))
    moments = state.optimizer / max(total, 1)
    return round(2 * moments * max(largest, min(small, update_slices.SLICE_BYTES)))


def _parameters(step: DeviceStep) -> tuple[float, float, float]:
    """Gradients, parameters cast to the compute dtype, and what is whole at once, gathered or not scattered yet."""
    config, degrees, size, trained = step.config, step.degrees, step.itemsize, step.trained
    local = sum(local_size(one.shape, one.entries, degrees) for one in trained)
    for_state = sum(local_size(one.shape, one.state_entries, degrees) for one in trained)
    zero = stage_over_data(config.parallel.zero) if degrees["data"] > 1 else 0
    # The layers of a stack add their gradients to the sum one by one where the step runs it (`layout/scatter.py`);
    # on a pipeline those of a chunk come together.
    has_stack = isinstance(config.model, TransformerConfig | ViTConfig)
    by_layer = has_stack and config.finetune.lora is None and not step.workload.pairs
    by_layer = by_layer and degrees["pipe"] == 1
    # Of one layer or of one parameter outside the stack: its gradient before it is added to a sum or scattered.
    one_layer = _largest_gradient(step)
    gradients, unscattered = min(POLICY_DTYPES[config.precision.policy].param_bytes, size) * local, 0.0
    if step.microbatches > 1:
        gradients = _FP32 * (for_state if zero == 2 else local)
        if zero == 2 and degrees["pipe"] == 1:
            # Where the step does not add it to its sum before the next one begins, that too.
            unscattered = (1 if by_layer else 2) * one_layer
            gradients += 0 if by_layer else _FP32 * for_state
        else:
            # Else the gradient of a microbatch comes whole, and in float32; on a pipeline that of a chunk.
            gradients += one_layer if by_layer else (_FP32 + size / 2) * local
    elif zero:
        # Each layer's gradient is scattered as soon as it is there.
        gradients, unscattered = size * for_state, one_layer
    # All is cast before the loops over microbatches and layers. With ZeRO a step begins with a copy of all that is
    # trained.
    copied = [one for one in step.placed if size < one.itemsize or (zero and one.trained)]
    cast = float(size * sum(local_size(one.shape, one.entries, degrees) for one in copied))
    return gradients, cast, _gathered(step, unscattered)


def _gathered(step: DeviceStep, unscattered: float) -> float:
    """Bytes of parameters that are whole at once on the axis `fsdp`, and of a gradient that is not scattered yet."""
    degrees, size = step.degrees, step.itemsize
    outside, stacks = 0.0, dict[str, float]()
    for one in step.placed if degrees["fsdp"] > 1 else ():
        if not one.is_over("fsdp"):
            continue
        whole = local_size(one.shape, one.entries, {**degrees, "fsdp": 1})
        if one.scan is None:
            outside += min(size, one.itemsize) * whole
        else:
            # Of a stack one layer at a time, the next one on its way, and the gradient of one.
            layers = one.shape[0] // (degrees["pipe"] if one.stacked else 1)
            share = min(size, one.itemsize) * whole / layers * (3 if one.trained else 2)
            stacks[one.scan] = stacks.get(one.scan, 0.0) + share
    # One stack runs at a time.
    return outside + unscattered + max(stacks.values(), default=0.0)


def _largest_gradient(step: DeviceStep) -> float:
    """Bytes of the largest gradient before it is added to a sum: of a layer, or of a parameter outside the stacks."""
    degrees, found = step.degrees, dict[str, float]()
    for one in step.trained:
        layers = 1 if one.scan is None else one.shape[0] / (degrees["pipe"] if one.stacked else 1)
        gradient = step.itemsize * local_size(one.shape, one.entries, degrees) / layers
        name = one.path if one.scan is None else one.scan
        found[name] = found.get(name, 0.0) + gradient
    return max(found.values(), default=0.0)


def _dequantized(step: DeviceStep) -> float:
    """Bytes of the largest kernel of one layer as floats, which is all that is dequantized at once."""
    if not step.stored.quantized:
        return 0.0
    degrees = {**step.degrees, "fsdp": 1}
    codes = {"nf4": ("/codes", 2), "int8": ("/values", 1)}
    end, per_byte = codes[step.config.finetune.base or "int8"]
    sizes = [
        local_size(one.shape, one.entries, degrees) * per_byte / (one.shape[0] / degrees["pipe"] if one.stacked else 1)
        for one in step.placed
        if one.path.endswith(end)
    ]
    return step.itemsize * max(sizes)


# --- Activations: what is kept, and what one block and the head need at once. ---

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
_NORMS = {"parallel": 1}
# Float32 arrays of whole logits that XLA for CPUs has at once, whatever the compute dtype: those, their exponentials
# and their gradient. Other compilers fuse them into one of the compute dtype.
_LOGITS_OF_CPU = 3


@dataclass(frozen=True)
class Work:
    """Bytes of one device that live inside a step, by what they are.

    Attributes:
        kept: activations from the forward pass for the backward pass.
        block: the most that one block needs at once in its backward pass.
        head: logits, or what the loss holds of them at once; the gradient of whole ones takes their place.
        moved: activations that wait in the host's memory for the backward pass.
    """

    kept: float
    block: float
    head: float
    moved: float = 0.0


def step_work(step: DeviceStep, kind: str) -> Work:
    """The activations of a step on a kind of hardware: cpu, gpu or tpu."""
    model = step.config.model
    if step.structure is not None:
        return _transformer(step, step.structure, kind)
    if isinstance(model, ResNetConfig):
        return _resnet(step, model, kind)
    assert isinstance(model, MLPConfig)
    size = 2 * step.itemsize * step.rows
    # The inputs of the lowest trained layer too.
    kept = size * sum(model.hidden_dims[max(0, step.lowest - 1) :]) / step.degrees["tensor"]
    widest = max([*model.hidden_dims, math.prod(step.workload.input_shape)])
    return Work(kept, size * widest / step.degrees["tensor"], 0.0)


def _transformer(step: DeviceStep, structure: Structure, kind: str) -> Work:
    works, forward = [], 0.0
    for index, stack in enumerate(structure.stacks):
        # Stages of a pipeline keep their inputs whatever is trained.
        if step.schedule is None and structure_block(stack.path) < step.lowest:
            forward = max(forward, _forward_block(step, stack, index, kind))
        else:
            works.append(_stack(step, stack, index, kind))
    kept, moved = sum(one.kept for one in works), sum(one.moved for one in works)
    last, size = structure.stacks[-1], step.itemsize
    width, t = last.blocks.embed_dim, step.tokens(last)
    if not works:
        # The output of the stacks, for the head; and for a norm before it.
        kept = (_NORM_STREAMS if step.lowest <= structure_block("output_norm") else 1) * size * t * width
    # What runs forward alone is done before anything is kept.
    block = max([*(one.block for one in works), forward - kept])
    kept += _adapters(step, structure)
    if structure.vocabulary is None:
        return Work(kept, block, 0.0, moved)
    width, vocabulary = structure.head[-1].inputs, structure.vocabulary / step.degrees["tensor"]
    logit_blocks = logit_blocks_of(step.config, t, width, vocabulary)
    head = block_bytes(logit_blocks, math.ceil(t), width, math.ceil(vocabulary), itemsize=size)
    if kind == "cpu" and logit_blocks.by == "whole":
        head = _LOGITS_OF_CPU * _FP32 * t * vocabulary
    return Work(kept, block, head, moved)


def _adapters(step: DeviceStep, structure: Structure) -> float:
    """Bytes of the results of adapters that are kept for the backward pass.

    The policy that keeps results of matmuls keeps both before they are added up (XLA for H100, jaxlib 0.10.2); under
    "none" an adapted layer keeps its arguments alone (`ops/linear.py`).
    """
    lora, stored, kept = step.config.finetune.lora, step.stored, 0.0
    if lora is None or step.config.remat.policy != "dots":
        return kept
    for stack in structure.stacks:
        own = [path for path in stored.adapters if path.startswith(f"{stack.path}/")]
        outputs = sum(math.prod(stored.tensors.params[f"{path}/lora_b"]) for path in own) / lora.rank
        share = step.layers(stack) / stack.blocks.num_layers / step.degrees["tensor"]
        kept += step.itemsize * step.tokens(stack) * outputs * share
    return kept


def _scores(step: DeviceStep, stack: Stack, index: int) -> tuple[float, float]:
    """Scores of a stack that exist at once, to itself and to another stack's output."""
    rows, heads = step.rows, stack.blocks.num_heads
    own = rows * step.attention[index].pairs_at_once * heads / step.degrees["tensor"]
    if stack.memory_length is None:
        return own, 0.0
    return own, rows * step.attention[index + 1].pairs_at_once * heads / step.degrees["tensor"]


def _forward_block(step: DeviceStep, stack: Stack, index: int, kind: str) -> float:
    """Bytes that a block of a stack works on at once in its forward pass alone."""
    model, tensor, size = stack.blocks, step.degrees["tensor"], step.itemsize
    t, k = step.tokens(stack), model.head_width
    stream = size * t * model.embed_dim / (tensor if step.config.parallel.sequence_parallel else 1)
    scores = max(_scores(step, stack, index))
    experts = None if model.experts is None else step.experts
    rows = 1.0 if experts is None else experts.rows
    matrices = len(mlp_shapes(model))
    columns, score_bytes, streams = 2 * model.num_heads + 2 * model.kv_heads, _FP32 + size, _FORWARD_STREAMS
    if kind == "tpu":  # whose compiler fuses what stands between two matmuls into one of them
        columns, score_bytes, streams, matrices = 2 * model.num_heads, size, 1, 1
    attention = size * t * columns * k / tensor + score_bytes * scores
    mlp = size * t * rows * matrices * model.mlp_width / tensor
    # Rows on their way to experts and back.
    mlp += 0.0 if experts is None else 2 * size * t * rows * model.embed_dim
    return streams * stream + max(attention, mlp)


def _stack(step: DeviceStep, stack: Stack, index: int, kind: str) -> Work:
    """The activations of one stack, the `index`-th of the model, without those of a head."""
    model, degrees, size, remat = stack.blocks, step.degrees, step.itemsize, step.config.remat
    tensor, experts = degrees["tensor"], None if model.experts is None else step.experts
    schedule = None if stack.is_leading else step.schedule
    t, d, heads, groups, k = step.tokens(stack), model.embed_dim, model.num_heads, model.kv_heads, model.head_width
    rows = 1.0 if experts is None else experts.rows
    shared = 0 if model.experts is None else (model.experts.shared_dim or 0)
    hidden = (rows * model.mlp_width + shared) / tensor
    matrices = len(mlp_shapes(model)) - 1
    norms = _NORMS.get(model.block, len(norm_names(model))) + (stack.memory_length is not None)
    residual = tensor if step.config.parallel.sequence_parallel else 1
    attention, (scores, crossed) = step.attention[index], _scores(step, stack, index)

    stream = size * t * d / residual
    queries = size * t * (heads + 2 * groups) * k / tensor
    kernel = attention.name not in ("reference", "context")
    # A kernel keeps row statistics of its softmax in place of scores; "dots" keeps the result beside them where a
    # kernel names both.
    statistics = _FP32 * t * heads / tensor if kernel else 0.0
    named = size * t * heads * k / tensor + statistics if attention.keeps_output else 0.0
    # Results of weight matmuls.
    outputs = queries + size * t * (2 * d / residual + matrices * hidden + latent_width(model))
    inner = size * t * (inner_width(model) / tensor + 2 * hidden)
    if stack.memory_length is not None:
        memory = size * step.rows * stack.memory_length / degrees["context"]
        outputs += size * t * (heads * k / tensor + d / residual) + memory * 2 * groups * k / tensor
        inner += size * t * heads * k / tensor
    sizes = {"query": heads * k, "key": groups * k, "value": groups * k, "attention_output": heads * k}
    widths = {name: width / tensor for name, width in sizes.items()}
    widths |= dict.fromkeys(("attention_projection", "mlp_output", "block_input"), d / residual)
    widths["mlp_hidden"] = hidden
    moved = size * t * sum(widths[name] for name in remat.offload)
    inputs = 0.0 if "block_input" in remat.offload else stream
    match remat.policy:
        case "full" | "sqrt":
            kept, again = inputs, outputs + inner
        case "dots":
            kept, again = stream + outputs + named, inner
        case "names":
            kept, again = inputs + size * t * sum(widths[n] for n in remat.names), inner
        case _:
            own = statistics if kernel else (_SCORE_KEPT[kind] + size) * scores
            kept = _NORM_STREAMS * norms * stream + outputs + inner + own + (_SCORE_KEPT[kind] + size) * crossed
            again = 0.0
    # What is not kept is computed again, all of one block at once. Of what is offloaded, that of one layer is on its
    # way. More norms than two work on as much again each.
    streams = _STREAMS + 2 * max(0, norms - 2)
    score_work = _SCORE_WORK[kind] + size + (_GROUPED_SCORE_WORK[kind] if groups < heads else 0)
    block = again + moved + streams * stream + score_work * max(scores, crossed)
    if experts is not None and model.experts is not None:
        block += size * t * 4 * rows * d
        if experts.sums_gradients:
            here = model.experts.num_experts / degrees["expert"]
            block += _FP32 * here * (matrices + 1) * d * model.mlp_width / tensor
    if attention.name == "blockwise":
        block += 2 * _FP32 * t * groups * k / tensor  # sums of the gradients of keys and values
    chunk = step.layers(stack) // (1 if schedule is None else schedule.num_chunks)
    moved *= chunk
    kept *= segment_layers(chunk).live if remat.policy == "sqrt" else chunk
    if schedule is not None:
        # Stage inputs of the microbatches under way, beside all that one stage keeps while it runs backward.
        kept += schedule.peak_live() * stream
    return Work(kept, block, 0.0, moved)


# Bytes for each element of a convolution's result, by the bytes of the compute dtype: outside the scanned stacks the
# result and what the compiler does not recompute of its norm; inside, all that autodiff asks for.
_KEPT_OUTSIDE, _KEPT_SCANNED = {2: 4.2, 4: 6.4}, {2: 10.4, 4: 13.3}
# A block that runs forward alone works on as much as the first of these; on TPUs, which fill up its channels, on more.
_FORWARD = {"tpu": 1.85}


def _resnet(step: DeviceStep, model: ResNetConfig, kind: str) -> Work:
    size, remat = step.itemsize, step.config.remat
    sizes = resnet_activations(model, step.workload.input_shape, step.lowest)
    kept = _KEPT_OUTSIDE[size] * sizes.first + size * sizes.residuals
    if remat.policy == "none":
        kept = _KEPT_OUTSIDE[size] * sizes.first + _KEPT_SCANNED[size] * sizes.rest
    elif "block_input" in remat.offload:
        kept = _KEPT_OUTSIDE[size] * sizes.first
    # With stacks the backward pass begins at the last blocks, which are small; without, the largest weighs.
    moved = size * sizes.residuals if "block_input" in remat.offload else 0.0
    block = 0.0 if sizes.rest else sizes.largest * _KEPT_OUTSIDE[size]
    # What runs forward alone is done before anything is kept.
    block = max(block, sizes.forward * _FORWARD.get(kind, 1.0) * _KEPT_OUTSIDE[size] - kept)
    return Work(step.rows * kept, step.rows * block, 0.0, step.rows * moved)


@dataclass(frozen=True)
class ResNetSizes:
    """Elements of an image: of results of convolutions that a backward pass needs, and of the largest blocks.

    Of convolutions outside the scanned stacks (`first`) and inside (`rest`), of the inputs of the blocks inside
    (`residuals`), of the largest block, and of the largest that runs forward alone.
    """

    first: int = 0
    rest: int = 0
    residuals: int = 0
    largest: int = 0
    forward: int = 0


def resnet_activations(model: ResNetConfig, input_shape: tuple[int, ...], lowest: int) -> ResNetSizes:
    """The sizes of a ResNet for images [H, W, C], of which the blocks from number `lowest` on are trained."""

    def halve(sides: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(math.ceil(side / 2) for side in sides)

    sides = input_shape[:2]
    sides = halve(sides) if model.stem == "imagenet" else sides
    stem = math.prod(sides) * model.width
    sizes = ResNetSizes(first=stem) if lowest == 0 else ResNetSizes(forward=stem)
    sides = halve(sides) if model.stem == "imagenet" else sides
    inputs = model.width
    for stage, count in enumerate(model.stage_blocks):
        inner = model.width * 2**stage
        outer = 4 * inner if model.bottleneck else inner
        before, sides = math.prod(sides), halve(sides) if stage else sides
        after = math.prod(sides)
        block = after * (2 * inner + outer if model.bottleneck else inner + outer)
        if 1 + 2 * stage < lowest:
            sizes = replace(sizes, forward=max(sizes.forward, block))
        else:
            first = block + (after * outer if inputs != outer or stage else 0)
            first += (before - after) * inner if model.bottleneck else 0  # the stride sits on the second convolution
            sizes = replace(sizes, first=sizes.first + first, largest=max(sizes.largest, block))
        if 2 + 2 * stage >= lowest:
            rest, residuals = sizes.rest + (count - 1) * block, sizes.residuals + (count - 1) * after * outer
            sizes = replace(sizes, rest=rest, residuals=residuals)
        inputs = outer
    return sizes
