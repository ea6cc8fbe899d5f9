"""The blocks of a step on one device: FLOPs and bytes of each, forward, backward and recomputed. No jax here.

A block is what the compiler makes one or a few kernels of. Its time is the larger of its FLOPs over the rate of the
matmul units and its bytes over the memory's (the roofline of Williams et al. 2009).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxtrain.config.model import MLPConfig, ResNetConfig
from jaxtrain.config.schema import Config
from jaxtrain.metrics.flops import (
    Product,
    backward_passes,
    lowest_trained_block,
    mlp_products,
    resnet_products,
    structure_block,
    structure_products,
)
from jaxtrain.models.shipped.shapes import (
    ConvShape,
    ResidualBlockShape,
    Structure,
    dense_layers,
    resnet_stages,
    stem_shape,
)
from jaxtrain.plan.work.block import BACKWARD, BlockWork, DeviceBatch, recomputed_share
from jaxtrain.plan.work.finetuned import finetuning_blocks
from jaxtrain.plan.work.transformer import transformer_blocks
from jaxtrain.plan.workload.finetuned import finetuned
from jaxtrain.plan.workload.parameters import model_structure, model_tensors
from jaxtrain.plan.workload.record import Workload
from jaxtrain.precision.dtypes import POLICY_DTYPES


def step_blocks(config: Config, workload: Workload, batch: DeviceBatch) -> list[BlockWork]:
    """The blocks of one step on one device (of a pipeline: on the last stage, which also has the output layer)."""
    structure = model_structure(config.model, workload)
    match config.model:
        case _ if structure is not None:
            blocks = transformer_blocks(structure, config, batch)
            stored = finetuned(config, model_tensors(config.model, workload))
            blocks += finetuning_blocks(stored, structure, config, batch)
        case ResNetConfig():
            blocks = _resnet(config.model, config, workload, batch)
        case MLPConfig():
            blocks = _mlp(config.model, config, workload, batch)
    backward = _backward_of_blocks(config, workload)
    return [_with_backward(block, backward.get(block.name, block.backward)) for block in blocks]


def _backward_of_blocks(config: Config, workload: Workload) -> dict[str, float]:
    """Name of a block -> passes that its backward pass has; empty where all parameters are trained."""
    model = config.model
    trained = finetuned(config, model_tensors(model, workload)).trained
    if trained is None:
        return {}
    lowest = lowest_trained_block(model, trained)

    def mean(products: Sequence[Product]) -> float:
        passes = sum(one.multiply_adds * backward_passes(one, trained, lowest) for one in products)
        return passes / sum(one.multiply_adds for one in products)

    structure = model_structure(model, workload)
    if structure is not None:
        return _backward_of_stacks(structure, lowest, mean)
    match model:
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
        case _:
            raise AssertionError("the blocks of a model of the user's own are not known")


def _backward_of_stacks(
    structure: Structure, lowest: int, mean: Callable[[Sequence[Product]], float]
) -> dict[str, float]:
    """The passes of the blocks of a model of transformer blocks, by the mean over the products of each."""
    of = structure_products(structure)
    found = {"embedding": BACKWARD if lowest == 0 else 0, "output and loss": mean(of["output"])}
    for stack in structure.stacks:
        flows = BACKWARD if lowest <= structure_block(stack.path) else 0
        names = {"projections": "attention projections", "scores": "attention scores", "mlp": "MLP"}
        if stack.memory_length is not None:
            names |= {f"cross {part}": f"cross-attention {part}" for part in ("projections", "scores")}
        found |= {stack.label + name: mean(of[stack.label + part]) for part, name in names.items()}
        found |= {f"{stack.label}{name}": flows for name in ("norms, residual, activation", "rounding to 8 bits")}
        found["experts"] = found[f"{stack.label}MLP"]
    return found


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


def _resnet(model: ResNetConfig, config: Config, workload: Workload, batch: DeviceBatch) -> list[BlockWork]:
    size, rows = POLICY_DTYPES[config.precision.policy].compute_bytes, batch.rows
    height, width, channels = workload.input_shape
    blocks: list[BlockWork] = []
    repeat = recomputed_share(config.remat, matmul=False)
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
