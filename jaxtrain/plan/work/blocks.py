"""The blocks of a step on one device: FLOPs and bytes of each, forward, backward and recomputed. No jax here.

A block is what the compiler makes one or a few kernels of. Its time is the larger of its FLOPs over the rate of the
matmul units and its bytes over the memory's (the roofline of Williams et al. 2009).

t tokens of one microbatch on one device, d width, h query and g key-value heads of width k, f MLP width, V vocabulary,
L sequence; c bytes of the compute dtype.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxtrain.config.models import CalledModel, MLPConfig, ResNetConfig, TransformerConfig
from jaxtrain.config.schema import Config, RematConfig
from jaxtrain.metrics.flops import (
    Product,
    backward_passes,
    lowest_trained_block,
    mlp_products,
    resnet_products,
    transformer_products,
)
from jaxtrain.models.shipped.shapes import (
    ConvShape,
    ResidualBlockShape,
    dense_layers,
    mlp_shapes,
    resnet_stages,
    stem_shape,
)
from jaxtrain.ops.loss.blocks import LossBlocks, choose_blocks
from jaxtrain.plan.work.attention import AttentionWork
from jaxtrain.plan.work.experts import ExpertWork
from jaxtrain.plan.workload.parameters import model_tensors, trained_paths
from jaxtrain.plan.workload.record import Workload
from jaxtrain.precision.dtypes import POLICY_DTYPES

# Gradients of inputs and of weights: twice the forward pass.
_BACKWARD = 2
# Of each number: read in 16 bits for the largest magnitude, read again, written in 8 bits.
_ROUNDING_BYTES = 5


@dataclass(frozen=True)
class BlockWork:
    """The work of one kind of block.

    Attributes:
        name: for people.
        count: how often a device runs it in one step.
        flops: of one forward pass.
        bytes: of one forward pass.
        recomputed: share of the forward pass that the backward pass repeats.
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


@dataclass(frozen=True)
class DeviceBatch:
    """What one device works on.

    Attributes:
        microbatches: of a step.
        rows: of one microbatch on one device.
        degrees: of the mesh.
        attention: what it runs on; None: the model has none.
        scaled: whether linear layers round their operands to 8 bits, each by its own largest magnitude.
        experts: what they multiply; None: the model has none.
    """

    microbatches: int
    rows: float
    degrees: Mapping[str, int]
    attention: AttentionWork | None = None
    scaled: bool = False
    experts: ExpertWork | None = None


def step_blocks(config: Config, workload: Workload, batch: DeviceBatch) -> list[BlockWork]:
    """The blocks of one step on one device (of a pipeline: on the last stage, which also has the output layer)."""
    match config.model:
        case TransformerConfig():
            blocks = _transformer(config.model, config, workload, batch)
        case ResNetConfig():
            blocks = _resnet(config.model, config, workload, batch)
        case MLPConfig():
            blocks = _mlp(config.model, config, workload, batch)
    backward = _backward_of_blocks(config, workload)
    return [_with_backward(block, backward.get(block.name, _BACKWARD)) for block in blocks]


def _backward_of_blocks(config: Config, workload: Workload) -> dict[str, float]:
    """Name of a block -> passes that its backward pass has; empty where all parameters are trained."""
    model = config.model
    trained = trained_paths(model_tensors(model, workload).params, config.optimizer.freeze)
    if trained is None:
        return {}
    lowest = lowest_trained_block(model, trained)

    def mean(products: Sequence[Product]) -> float:
        passes = sum(one.multiply_adds * backward_passes(one, trained, lowest) for one in products)
        return passes / sum(one.multiply_adds for one in products)

    match model:
        case TransformerConfig():
            assert workload.sequence_length is not None
            assert workload.vocab_size is not None
            of = transformer_products(model, workload.sequence_length, workload.vocab_size)
            flows = _BACKWARD if lowest <= 1 else 0
            return {
                "attention projections": mean(of["projections"]),
                "attention scores": mean(of["scores"]),
                "MLP": mean(of["mlp"]),
                "experts": mean(of["mlp"]),
                "norms, residual, activation": flows,
                "rounding to 8 bits": flows,
                "embedding": _BACKWARD if lowest == 0 else 0,
                "output and loss": mean(of["output"]),
            }
        case ResNetConfig():
            of = _grouped(resnet_products(model, workload.input_shape, workload.num_outputs or 0))
            names = {"stem": "stem", "head_kernel": "head"}
            for stage in range(len(model.stage_blocks)):
                names |= {f"stage{stage}_first": f"stage {stage} first", f"stage{stage}_rest": f"stage {stage}"}
            found = {names[name]: mean(products) for name, products in of.items()}
            # The norms' backward pass follows their convolutions'.
            return {"head": found.pop("head")} | {
                f"{name} {part}": passes for name, passes in found.items() for part in ("convolutions", "norms")
            }
        case MLPConfig():
            products = mlp_products(model, workload.input_shape, workload.num_outputs or 0)
            names = [*(f"layer {number}" for number in range(len(model.hidden_dims))), "output"]
            return {name: mean([product]) for name, product in zip(names, products, strict=True)}
        case CalledModel():
            raise AssertionError("the blocks of a model of the user's own are not known")


def _grouped(products: Sequence[Product]) -> dict[str, list[Product]]:
    """Products by the top level of their paths."""
    found: dict[str, list[Product]] = {}
    for one in products:
        found.setdefault((one.path or "").partition("/")[0], []).append(one)
    return found


def _with_backward(block: BlockWork, backward: float) -> BlockWork:
    """The block with fewer passes backward; without any, nothing is computed again for it."""
    if backward == block.backward:
        return block
    return replace(block, backward=backward, recomputed=block.recomputed if backward else 0.0)


def _recomputed(remat: RematConfig, *, matmul: bool, names: tuple[str, ...] = ()) -> float:
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


def _transformer(model: TransformerConfig, config: Config, workload: Workload, batch: DeviceBatch) -> list[BlockWork]:
    degrees, size = batch.degrees, POLICY_DTYPES[config.precision.policy].compute_bytes
    tensor, context = degrees["tensor"], degrees["context"]
    length = workload.input_shape[0]
    t, d = batch.rows * length / context, model.embed_dim
    heads, groups = model.num_heads, model.kv_heads
    k = model.head_width
    f = model.mlp_width
    assert workload.vocab_size is not None
    vocabulary = workload.vocab_size / tensor
    count = model.num_layers // degrees["pipe"] * batch.microbatches
    # A stage keeps its inputs only and runs forward once more before its backward.
    again = 1.0 if degrees["pipe"] > 1 else 0.0
    remat = config.remat

    weights = d * (2 * heads + 2 * groups) * k / tensor
    streams = t * (2 * d + (2 * heads + 2 * groups) * k / tensor)
    matrices = len(mlp_shapes(model))
    projections = BlockWork(
        "attention projections",
        count,
        2 * t * weights,
        size * (weights + streams),
        _recomputed(remat, matmul=True, names=("query", "key", "value", "attention_projection")) + again,
        stage=True,
        linear=True,
    )
    pairs = t * length * heads / tensor
    assert batch.attention is not None
    computed = pairs * batch.attention.computed
    score_bytes = size * t * (2 * heads + 2 * groups) * k / tensor + batch.attention.score_bytes * computed
    # Scores have batch dims, so that policy dots recomputes them too where their result is not kept.
    kept = batch.attention.keeps_output
    recomputed = batch.attention.again + _recomputed(remat, matmul=kept, names=("attention_output",))
    scores = BlockWork(
        "attention scores",
        count,
        4 * computed * k,
        score_bytes,
        recomputed + again,
        stage=True,
    )
    experts, work = model.experts, batch.experts
    assert (experts is None) == (work is None)
    rows, multiplied, stored, router = 1.0, 1.0, 1.0, 0.0
    if experts is not None and work is not None:
        rows, multiplied, stored = work.rows, work.multiplied, experts.num_experts / degrees["expert"]
        router = 2 * t * d * experts.num_experts
    mlp_weights = matrices * d * f / tensor
    mlp_recomputed = _recomputed(remat, matmul=experts is None, names=("mlp_hidden", "mlp_output"))
    mlp = BlockWork(
        "MLP" if experts is None else "experts",
        count,
        2 * t * mlp_weights * multiplied + router,
        size * (mlp_weights * stored + rows * t * (2 * d + matrices * f / tensor)),
        max(mlp_recomputed, 0.0 if work is None else work.again) + again,
        stage=True,
        linear=experts is None,
    )
    residual = tensor if config.parallel.sequence_parallel else 1
    # A norm reads and writes the residual stream, a sum of two reads both and writes: 10 passes with norms of inputs or
    # of sums, 14 with those of outputs too. Then the rotation of queries and keys, their norms, and the nonlinearity.
    passes = (14 if model.block == "sandwich" else 10) * d / residual
    rotated = (6 if model.qk_norm else 4) * (heads + groups) * k / tensor
    elementwise = BlockWork(
        "norms, residual, activation",
        count,
        0.0,
        size * t * (passes + rotated + 3 * rows * f / tensor),
        _recomputed(remat, matmul=False) + again,
        stage=True,
    )
    output = _output(logit_blocks_of(config, t, d, vocabulary), batch.microbatches, t, d, vocabulary, size)
    # A look-up reads and writes, and so does a norm.
    embed = BlockWork("embedding", batch.microbatches, 0.0, 2 * size * t * d * (1 + model.embedding_norm))
    blocks = [projections, scores, mlp, elementwise, embed, output]
    if batch.scaled:
        numbers = _rounded_numbers(remat, weights, d + heads * k / tensor, d + (heads + 2 * groups) * k / tensor, t)
        if experts is None:
            numbers += _rounded_numbers(remat, mlp_weights, d + f / tensor, d + (matrices - 1) * f / tensor, t)
        # A block's backward pass counts twice its forward pass, which is all that there is here.
        moved = _ROUNDING_BYTES * numbers / (1 + _BACKWARD)
        blocks.insert(3, BlockWork("rounding to 8 bits", count, 0.0, moved, stage=True))
    return blocks


def logit_blocks_of(config: Config, tokens: float, width: int, vocabulary: float) -> LossBlocks:
    """How the step's loss computes the logits of one device in blocks, by the rule of `ops/loss/blocks.py`."""
    loss, size = config.loss, POLICY_DTYPES[config.precision.policy].compute_bytes
    by = None if loss.logits == "auto" else loss.logits
    return choose_blocks(math.ceil(tokens), width, math.ceil(vocabulary), itemsize=size, by=by, size=loss.block)


def _output(logit_blocks: LossBlocks, count: int, t: float, d: int, vocabulary: float, size: int) -> BlockWork:
    """Output layer and loss; bytes are a share of the step's, as if backward were twice forward."""
    flops, logits, factors = 2 * t * d * vocabulary, t * vocabulary, size * (d * vocabulary + t * d)
    if logit_blocks.by == "whole":
        # Logits are written, read for the loss in float32 and once more for its gradient.
        return BlockWork("output and loss", count, flops, factors + 3 * size * logits)
    # A block of logits is written and read in float32, its gradient written and read by two matmuls.
    gradients = 3 * size * logits
    if logit_blocks.by == "tokens":
        sums = 8 * d * vocabulary * logit_blocks.count
        return BlockWork("output and loss", count, flops, factors + (8 * logits + gradients + sums) / (1 + _BACKWARD))
    sums = 8 * t * d * logit_blocks.count
    # Logits are computed twice.
    return BlockWork("output and loss", count, flops, factors + (16 * logits + gradients + sums) / (2 + _BACKWARD), 1.0)


def _rounded_numbers(remat: RematConfig, weights: float, inputs: float, outputs: float, tokens: float) -> float:
    """Numbers that a step rounds: weights and inputs for each forward pass, gradients of outputs once."""
    forwards = 1 if remat.policy == "none" else 2
    return forwards * (weights + tokens * inputs) + tokens * outputs


def _resnet(model: ResNetConfig, config: Config, workload: Workload, batch: DeviceBatch) -> list[BlockWork]:
    size, rows = POLICY_DTYPES[config.precision.policy].compute_bytes, batch.rows
    height, width, channels = workload.input_shape
    blocks: list[BlockWork] = []
    repeat = _recomputed(config.remat, matmul=False)
    remaining = [height, width]

    def convolve(shape: ConvShape) -> tuple[float, float, float]:
        """FLOPs, bytes of the convolution, bytes of its norm and nonlinearity; a norm reads twice and writes once."""
        before = math.prod(remaining)
        remaining[:] = [math.ceil(side / shape.stride) for side in remaining]
        after = math.prod(remaining)
        weights = math.prod(shape.kernel)
        flops = 2 * weights * after * rows
        moved = size * (weights + rows * (before * shape.inputs + after * shape.outputs))
        return flops, moved, 4 * size * rows * after * shape.outputs

    def add(name: str, parts: list[tuple[float, float, float]], count: int, recomputed: float) -> None:
        flops, moved, norms = (sum(column) for column in zip(*parts, strict=True))
        blocks.append(BlockWork(f"{name} convolutions", count * batch.microbatches, flops, moved, recomputed))
        blocks.append(BlockWork(f"{name} norms", count * batch.microbatches, 0.0, norms, recomputed))

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
    assert workload.num_outputs is not None
    weights = channels * workload.num_outputs
    pooled = rows * channels * math.prod(remaining)
    blocks.append(BlockWork("head", batch.microbatches, 2 * rows * weights, size * (weights + pooled)))
    return blocks


def _mlp(model: MLPConfig, config: Config, workload: Workload, batch: DeviceBatch) -> list[BlockWork]:
    size, tensor = POLICY_DTYPES[config.precision.policy].compute_bytes, batch.degrees["tensor"]
    assert workload.num_outputs is not None
    layers = dense_layers(model, math.prod(workload.input_shape), workload.num_outputs)
    blocks = []
    for index, shape in enumerate(layers.values()):
        (inputs,), (outputs,) = shape.inputs, shape.outputs
        name = "output" if index == len(model.hidden_dims) else f"layer {index}"
        weights = inputs * outputs / tensor
        moved = size * (weights + batch.rows * (inputs + 3 * outputs))
        blocks.append(BlockWork(name, batch.microbatches, 2 * batch.rows * weights, moved, linear=name != "output"))
    return blocks
