"""The blocks of a step on one device: FLOPs and bytes of each, forward, backward and recomputed. No jax here.

A block is what the compiler makes one or a few kernels of. Its time is the larger of its FLOPs over the rate of the
matmul units and its bytes over the memory's (the roofline of Williams et al. 2009).

Of models of transformer blocks: t tokens of one microbatch on one device, d width, h query and g key-value heads of
width k, f MLP width, V vocabulary, L sequence; c bytes of the compute dtype.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtrain.config.model import MLPConfig, ResNetConfig
from jaxtrain.config.schema import Config, Remat
from jaxtrain.metrics.flops import (
    Product,
    backward_passes,
    mlp_products,
    resnet_products,
    structure_block,
    structure_products,
)
from jaxtrain.models.shipped.shapes import (
    ConvShape,
    OuterLayer,
    ResidualBlockShape,
    Stack,
    Structure,
    attention_shapes,
    dense_layers,
    latent_width,
    mlp_shapes,
    norm_names,
    resnet_stages,
    stem_shape,
)
from jaxtrain.ops.loss.blocks import LossBlocks, choose_blocks
from jaxtrain.plan.step import DeviceStep
from jaxtrain.precision.dtypes import POLICY_DTYPES

# Gradients of inputs and of weights: twice the forward pass.
_BACKWARD = 2
# Rounding, of each number: read in 16 bits for the largest magnitude, read again, written in 8 bits.
_ROUNDING_BYTES = 5
# Bytes per element of a quantized kernel as it is read: nf4 with its scales, and int8.
_READ = {"nf4": 0.52, "int8": 1.0}


@dataclass(frozen=True)
class BlockWork:
    """The work of one kind of block.

    Attributes:
        name: for people.
        count: how often a device runs it in one step.
        flops: of one forward pass.
        bytes: of one forward pass.
        recomputed: share of the forward pass that the backward pass repeats; 1 more where the loss runs a reference.
        backward: passes of the same size that the backward pass has: two where all parameters are trained.
        stage: whether it belongs to the layers that a pipeline deals out.
        linear: whether its FLOPs are those of linear layers, which a policy may run in a format of their own.
    """

    name: str
    count: int
    flops: float
    bytes: float
    recomputed: float = 0.0
    backward: float = _BACKWARD
    stage: bool = False
    linear: bool = False

    @property
    def total_flops(self) -> float:
        """Of one step: forward, backward, recomputation."""
        return self.count * self.flops * (1 + self.backward + self.recomputed)

    @property
    def total_bytes(self) -> float:
        """Bytes of one step: forward, backward, recomputation."""
        return self.count * self.bytes * (1 + self.backward + self.recomputed)


def recomputed_share(remat: Remat, *, matmul: bool, names: tuple[str, ...] = ()) -> float:
    """Share of a block's forward pass that is run again in the backward pass."""
    match remat.policy:
        case "none":
            return 0.0
        case "full" if not set(names) & set(remat.offload):
            return 1.0
        case "sqrt":
            # A segment runs again, and each of its blocks once more.
            return 2.0
        case "dots":
            return 0.0 if matmul else 1.0
        case _:
            kept = {*remat.offload, *(remat.names if remat.policy == "names" else ())}
            return 1 - sum(name in kept for name in names) / len(names) if names else 1.0


def step_blocks(step: DeviceStep) -> list[BlockWork]:
    """The blocks of one step on one device (of a pipeline: on the last stage, which also has the output layer)."""
    model = step.config.model
    if step.structure is not None:
        blocks = [block for index, stack in enumerate(step.structure.stacks) for block in _stack(step, stack, index)]
        blocks += [_embedding(step, step.structure), _output(step, step.structure)]
        blocks += _finetuning(step, step.structure)
    elif isinstance(model, ResNetConfig):
        blocks = _resnet(step, model)
    else:
        assert isinstance(model, MLPConfig)
        blocks = _mlp(step, model)
    backward = _backward_passes(step)
    changed = (replace(block, backward=backward.get(block.name, block.backward)) for block in blocks)
    # Where no gradient goes, nothing is computed again for it.
    blocks = [block if block.backward else replace(block, recomputed=0.0) for block in changed]
    return [replace(block, recomputed=block.recomputed + step.reads_reference) for block in blocks]


def _backward_passes(step: DeviceStep) -> dict[str, float]:
    """Name of a block -> passes that its backward pass has; empty where all parameters are trained."""
    model, workload, trained, lowest = step.config.model, step.workload, step.stored.trained, step.lowest
    if trained is None:
        return {}

    def mean(products: Sequence[Product]) -> float:
        passes = sum(one.multiply_adds * backward_passes(one, trained, lowest) for one in products)
        return passes / (sum(one.multiply_adds for one in products) or 1)

    if step.structure is not None:
        of = structure_products(step.structure)
        found = {"embedding": _BACKWARD if lowest == 0 else 0, "output and loss": mean(of["output"])}
        for stack in step.structure.stacks:
            flows = _BACKWARD if lowest <= structure_block(stack.path) else 0
            names = {"projections": "attention projections", "scores": "attention scores", "mlp": "MLP"}
            if stack.memory_length is not None:
                names |= {f"cross {part}": f"cross-attention {part}" for part in ("projections", "scores")}
            found |= {stack.label + name: mean(of[stack.label + part]) for part, name in names.items()}
            found |= {f"{stack.label}{name}": flows for name in ("norms, residual, activation", "rounding to 8 bits")}
            found["experts"] = found[f"{stack.label}MLP"]
        return found
    if isinstance(model, ResNetConfig):
        products = resnet_products(model, workload.input_shape, workload.num_outputs or 0)
        names = {"stem": "stem", "head_kernel": "head"}
        for stage in range(len(model.stage_blocks)):
            names |= {f"stage{stage}_first": f"stage {stage} first", f"stage{stage}_rest": f"stage {stage}"}
        found = {}
        for path, name in names.items():
            if group := [one for one in products if (one.path or "").partition("/")[0] == path]:
                # The norms' backward pass follows their convolutions'.
                found |= dict.fromkeys((name, f"{name} convolutions", f"{name} norms"), mean(group))
        return found
    assert isinstance(model, MLPConfig)
    products = mlp_products(model, workload.input_shape, workload.num_outputs or 0)
    names = [*(f"layer {number}" for number in range(len(model.hidden_dims))), "output"]
    return {name: mean([product]) for name, product in zip(names, products, strict=True)}


def _stack(step: DeviceStep, stack: Stack, index: int) -> list[BlockWork]:
    """The blocks of one stack, the `index`-th of the model."""
    model, degrees, remat = stack.blocks, step.degrees, step.config.remat
    tensor, size, t, d = degrees["tensor"], step.itemsize, step.tokens(stack), model.embed_dim
    h, g, k, f = model.num_heads, model.kv_heads, model.head_width, model.mlp_width
    count = step.layers(stack) * step.microbatches
    # A stage keeps its inputs only and runs forward once more before its backward.
    again = 1.0 if degrees["pipe"] > 1 else 0.0

    def block(
        name: str, flops: float, moved: float, recomputed: float, *, linear: bool = False, label: str = stack.label
    ) -> BlockWork:
        stage = not stack.is_leading
        return BlockWork(f"{label}{name}", count, flops, moved, recomputed + again, stage=stage, linear=linear)

    attention = step.attention[index]
    # Tensor parallelism shards heads, not latents, which are written and read.
    weights = sum(math.prod(one.kernel) / (tensor if one.of_heads else 1) for one in attention_shapes(model).values())
    streams = t * (2 * d + (2 * h + 2 * g) * k / tensor + 2 * latent_width(model))
    projected = recomputed_share(remat, matmul=True, names=("query", "key", "value", "attention_projection"))
    computed = t * stack.length * h / tensor * attention.computed
    score_bytes = size * t * (2 * h + 2 * g) * k / tensor + attention.score_bytes * computed
    # Scores have batch dims, so that policy dots recomputes them too where their result is not kept.
    scored = attention.again + recomputed_share(remat, matmul=attention.keeps_output, names=("attention_output",))
    blocks = [
        block("attention projections", 2 * t * weights, size * (weights + streams), projected, linear=True),
        block("attention scores", 4 * computed * k, score_bytes, scored),
    ]
    crosses = stack.memory_length is not None
    if stack.memory_length is not None:
        s, of_memory = step.rows * stack.memory_length / degrees["context"], step.attention[index + 1]
        moved = weights + t * (2 * d + 2 * h * k / tensor) + s * (2 * d + 2 * g * k / tensor)
        flops = 2 * d * k / tensor * (2 * h * t + 2 * g * s)
        blocks.append(block("cross-attention projections", flops, size * moved, projected, linear=True))
        crossed = t * stack.memory_length * h / tensor * of_memory.computed
        moved = size * (2 * h * t + 2 * g * s) * k / tensor + of_memory.score_bytes * crossed
        share = recomputed_share(remat, matmul=False, names=("attention_output",))
        blocks.append(block("cross-attention scores", 4 * crossed * k, moved, share))
    experts, work = model.experts, None if model.experts is None else step.experts
    assert (experts is None) == (work is None)
    rows, multiplied, kernels, router = 1.0, 1.0, 1.0, 0.0
    if experts is not None and work is not None:
        rows, multiplied, kernels = work.rows, work.multiplied, experts.num_experts / degrees["expert"]
        router = 2 * t * d * experts.num_experts
    matrices = len(mlp_shapes(model))
    mlp_weights = matrices * d * f / tensor
    shared = 0 if experts is None else (experts.shared_dim or 0)
    shared_weights = matrices * d * shared / tensor
    mlp_flops = 2 * t * (mlp_weights * multiplied + shared_weights)
    # What a manual region runs again is the experts, not the router before it.
    experts_again = 0.0 if work is None else work.again * mlp_flops / (mlp_flops + router)
    share = max(recomputed_share(remat, matmul=True, names=("mlp_hidden", "mlp_output")), experts_again)
    moved = size * (mlp_weights * kernels + rows * t * (2 * d + matrices * f / tensor))
    moved += size * (shared_weights + t * (2 * d + matrices * shared / tensor)) if shared else 0
    if experts is None:
        blocks += [block("MLP", mlp_flops, moved, share, linear=True)] if matrices else []
    else:
        blocks.append(block("experts", mlp_flops + router, moved, share, label=""))
    if step.config.precision.policy == "fp8":
        numbers = _rounded_numbers(remat, weights, d + h * k / tensor, d + (h + 2 * g) * k / tensor, t)
        numbers *= 2 if crosses else 1
        if experts is None:
            numbers += _rounded_numbers(remat, mlp_weights, d + f / tensor, d + (matrices - 1) * f / tensor, t)
        # A block's backward pass counts twice its forward pass, which is all that there is here.
        moved = _ROUNDING_BYTES * numbers / (1 + _BACKWARD)
        blocks.append(BlockWork(f"{stack.label}rounding to 8 bits", count, 0.0, moved, stage=not stack.is_leading))
    # A norm reads and writes the residual stream, and each of two sums reads both and writes: 10 passes with two norms,
    # 5 more with cross-attention, 5 fewer without an MLP. Then the rotation of queries and keys, their norms, and the
    # nonlinearity.
    residual = tensor if step.config.parallel.sequence_parallel else 1
    passes = (3 * (1 + bool(matrices)) + 2 * len(norm_names(model)) + 5 * crosses) * d / residual
    rotated = (6 if model.qk_norm else 4) * (h + g) * k / tensor
    moved = size * t * (passes + rotated + 3 * rows * f / tensor)
    return [*blocks, block("norms, residual, activation", 0.0, moved, recomputed_share(remat, matmul=False))]


def _rounded_numbers(remat: Remat, weights: float, inputs: float, outputs: float, tokens: float) -> float:
    """Numbers that a step rounds: weights and inputs for each forward pass, gradients of outputs once."""
    forwards = 1 if remat.policy == "none" else 2
    return forwards * (weights + tokens * inputs) + tokens * outputs


def _outer(step: DeviceStep, layer: OuterLayer) -> tuple[float, float]:
    """FLOPs and bytes of a layer around the stacks, which is not sharded over `tensor`."""
    rows = step.rows * (layer.positions / step.degrees["context"] if layer.positions > 1 else 1)
    weights = layer.inputs * layer.outputs
    return 2 * rows * weights, step.itemsize * (weights + rows * (layer.inputs + layer.outputs))


def _embedding(step: DeviceStep, structure: Structure) -> BlockWork:
    stacks = [one for one in structure.stacks if not one.is_leading]
    streams = [(step.tokens(one) * one.blocks.table_width, one.blocks) for one in stacks]
    # A look-up reads and writes, and so does a norm.
    looked_up = sum(numbers * (1 + (blocks.embedding_norm is True)) for numbers, blocks in streams)
    entry = [_outer(step, one) for one in structure.entry]
    moved = 2 * step.itemsize * looked_up + sum(moved for _, moved in entry)
    return BlockWork("embedding", step.microbatches, sum(flops for flops, _ in entry), moved)


def logit_blocks_of(config: Config, tokens: float, width: int, vocabulary: float) -> LossBlocks:
    """How the step's loss computes the logits of one device in blocks, by the rule of `ops/loss/blocks.py`."""
    loss, size = config.loss, POLICY_DTYPES[config.precision.policy].compute_bytes
    by = None if loss.logits == "auto" else loss.logits
    return choose_blocks(math.ceil(tokens), width, math.ceil(vocabulary), itemsize=size, by=by, size=loss.block)


def _output(step: DeviceStep, structure: Structure) -> BlockWork:
    """The head and the loss; bytes are a share of the step's, as if backward were twice forward."""
    size, recomputed = step.itemsize, 0.0
    layers = structure.head if structure.vocabulary is None else structure.head[:-1]
    before = [_outer(step, one) for one in layers]
    flops = moved = 0.0
    if structure.vocabulary is not None:
        last = structure.stacks[-1]
        t, d, vocabulary = step.tokens(last), structure.head[-1].inputs, structure.vocabulary / step.degrees["tensor"]
        found = logit_blocks_of(step.config, t, d, vocabulary)
        flops, logits, factors = 2 * t * d * vocabulary, t * vocabulary, size * (d * vocabulary + t * d)
        # A block of logits is written and read in float32, its gradient written and read by two matmuls.
        gradients = 3 * size * logits
        if found.by == "whole":
            # Logits are written, read for the loss in float32 and once more for its gradient.
            moved = factors + 3 * size * logits
        elif found.by == "tokens":
            sums = 8 * d * vocabulary * found.count
            moved = factors + (8 * logits + gradients + sums) / (1 + _BACKWARD)
        else:
            # Logits are computed twice.
            sums, recomputed = 8 * t * d * found.count, 1.0
            moved = factors + (16 * logits + gradients + sums) / (2 + _BACKWARD)
    flops, moved = flops + sum(f for f, _ in before), moved + sum(b for _, b in before)
    return BlockWork("output and loss", step.microbatches, flops, moved, recomputed)


def _finetuning(step: DeviceStep, structure: Structure) -> list[BlockWork]:
    """The products with the factors of adapters, and turning quantized kernels into floats."""
    lora, base, stored = step.config.finetune.lora, step.config.finetune.base, step.stored
    if lora is None:
        return []
    degrees, size = step.degrees, step.itemsize
    repeat = recomputed_share(step.config.remat, matmul=True) + (1.0 if degrees["pipe"] > 1 else 0.0)
    blocks: list[BlockWork] = []
    for stack in structure.stacks:
        layers, t, stage = stack.blocks.num_layers, step.tokens(stack), not stack.is_leading
        count = step.layers(stack) * step.microbatches
        own = [path for path in stored.adapters if path.startswith(f"{stack.path}/")]
        factors = [math.prod(stored.tensors.params[f"{path}/{name}"]) for path in own for name in ("lora_a", "lora_b")]
        numbers = sum(factors) / layers / degrees["tensor"]
        if own:
            # An adapter of I inputs and O outputs has r (I + O) numbers; it reads and adds to t (I + O) activations.
            moved = numbers + t * (numbers / lora.rank + 2 * lora.rank * len(own))
            blocks.append(
                BlockWork(f"{stack.label}adapters", count, 2 * t * numbers, size * moved, repeat, stage=stage)
            )
        kernels = sum(n for path, n in stored.quantized.items() if path.startswith(f"{stack.path}/"))
        if kernels and base is not None:
            moved = kernels / layers / degrees["tensor"] * (_READ[base] + size)
            # Once for each product: of the inputs, of those again, and of the gradients.
            name = f"{stack.label}dequantization"
            blocks.append(BlockWork(name, count, 0.0, moved, repeat, backward=1.0, stage=stage))
    return blocks


def _resnet(step: DeviceStep, model: ResNetConfig) -> list[BlockWork]:
    size, rows, workload = step.itemsize, step.rows, step.workload
    height, width, channels = workload.input_shape
    blocks: list[BlockWork] = []
    repeat = recomputed_share(step.config.remat, matmul=False)
    remaining = [height, width]

    def convolve(shape: ConvShape) -> tuple[float, float, float]:
        """FLOPs, bytes of the convolution, bytes of its norm and nonlinearity; a norm reads twice and writes once."""
        before = math.prod(remaining)
        remaining[:] = [math.ceil(side / shape.stride) for side in remaining]
        after = math.prod(remaining)
        weights = math.prod(shape.kernel)
        moved = size * (weights + rows * (before * shape.inputs + after * shape.outputs))
        return 2 * weights * after * rows, moved, 4 * size * rows * after * shape.outputs

    def add(name: str, parts: list[tuple[float, float, float]], count: int, recomputed: float) -> None:
        flops, moved, norms = (sum(column) for column in zip(*parts, strict=True))
        blocks.append(BlockWork(f"{name} convolutions", count * step.microbatches, flops, moved, recomputed))
        blocks.append(BlockWork(f"{name} norms", count * step.microbatches, 0.0, norms, recomputed))

    def block(shape: ResidualBlockShape) -> list[tuple[float, float, float]]:
        parts = [convolve(conv) for conv in shape.convs]
        # Behind them, so that its input counts as large as its output.
        return parts if shape.shortcut is None else [*parts, convolve(replace(shape.shortcut, stride=1))]

    add("stem", [convolve(stem_shape(model, channels))], 1, 0.0)
    if model.stem == "imagenet":
        remaining = [math.ceil(side / 2) for side in remaining]
    stages = resnet_stages(model)
    for number, stage in enumerate(stages):
        add(f"stage {number} first", block(stage.first), 1, 0.0)
        if stage.num_rest:
            add(f"stage {number}", block(stage.rest), stage.num_rest, repeat)
    channels = stages[-1].outputs
    weights = channels * (workload.num_outputs or 0)
    pooled = rows * channels * math.prod(remaining)
    return [*blocks, BlockWork("head", step.microbatches, 2 * rows * weights, size * (weights + pooled))]


def _mlp(step: DeviceStep, model: MLPConfig) -> list[BlockWork]:
    layers = dense_layers(model, math.prod(step.workload.input_shape), step.workload.num_outputs or 0)
    blocks = []
    for index, shape in enumerate(layers.values()):
        (inputs,), (outputs,) = shape.inputs, shape.outputs
        name = "output" if index == len(model.hidden_dims) else f"layer {index}"
        weights = inputs * outputs / step.degrees["tensor"]
        moved = step.itemsize * (weights + step.rows * (inputs + 3 * outputs))
        flops = 2 * step.rows * weights
        blocks.append(BlockWork(name, step.microbatches, flops, moved, linear=name != "output"))
    return blocks
