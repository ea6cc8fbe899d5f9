"""Memory of a step on one device by part, without compiling: state exactly, the rest by what compilers keep.

The constants count bytes that XLA keeps for each element of a tensor. They were fitted to what compilers said of the
layouts in `tests/plan/compiled.json`, which the model meets within 15 % (one it misses by 17 %).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxtrain.config.model import MLPConfig, ResNetConfig, TransformerConfig, ViTConfig
from jaxtrain.config.schema import Config
from jaxtrain.layout.rules import entry_axes, num_pieces, stage_over_data
from jaxtrain.metrics.flops import lowest_trained_block
from jaxtrain.optim import rules as update_slices
from jaxtrain.optim.rules import num_slices, updates_elementwise
from jaxtrain.parallel.schedules import Schedule
from jaxtrain.plan.catalogue.hardware import Target
from jaxtrain.plan.memory.record import Memory, Work
from jaxtrain.plan.memory.transformer import transformer_work, whole_logits
from jaxtrain.plan.work.block import DeviceBatch
from jaxtrain.plan.work.finetuned import dequantized_bytes, kept_bytes
from jaxtrain.plan.work.state import Parameter, StateBytes, local_size
from jaxtrain.plan.workload.finetuned import finetuned
from jaxtrain.plan.workload.parameters import model_structure, model_tensors
from jaxtrain.plan.workload.record import Workload
from jaxtrain.precision.dtypes import POLICY_DTYPES
from jaxtrain.runtime.distributed import GPU_MEMORY_FRACTION

_FP32 = 4


def step_memory(
    config: Config,
    workload: Workload,
    target: Target,
    placed: Sequence[Parameter],
    state: StateBytes,
    batch: DeviceBatch,
    schedule: Schedule | None,
) -> Memory:
    """The peak of one device.

    Args:
        config: the run.
        workload: its rows.
        target: hardware and count.
        placed: parameters on the mesh.
        state: bytes of the train state.
        batch: what a device works on.
        schedule: of the pipeline.
    """
    structure = model_structure(config.model, workload)
    stored = finetuned(config, model_tensors(config.model, workload))
    # Below it nothing is kept for a backward pass.
    lowest = lowest_trained_block(config.model, stored.trained)
    match config.model:
        case _ if structure is not None:
            work = transformer_work(structure, config, batch, schedule, target.hardware.kind, lowest)
            work = replace(work, kept=work.kept + kept_bytes(stored, structure, config, batch))
        case ResNetConfig():
            work = _resnet(config.model, config, workload, batch, target.hardware.kind, lowest)
        case MLPConfig():
            work = _mlp(config.model, config, workload, batch, lowest)
    # The layers of a stack add their gradients to the sum one by one where the step runs it (`layout/stack_sums.py`).
    has_stack = isinstance(config.model, TransformerConfig | ViTConfig)
    layer_by_layer = has_stack and config.finetune.lora is None and not workload.pairs
    by_use = layer_by_layer and structure is not None and whole_logits(structure, config, batch)
    gradients, cast, gathered = _parameters(config, placed, batch, layer_by_layer=layer_by_layer, by_use=by_use)
    in_head = work.head > work.block
    offload = config.optimizer.offload
    # The update comes when activations are gone.
    on_its_way = _state_on_its_way(config, placed, state, batch.degrees) if offload else 0
    parts = {
        "parameters": state.params,
        "optimizer state": 0 if offload else state.optimizer,
        "optimizer state being updated": max(0, round(on_its_way - work.kept - max(work.block, work.head))),
        "moving average": state.average,
        "model state": state.model_state,
        "gradients": round(gradients),
        "parameters in compute dtype": round(cast),
        "gathered parameters": round(gathered),
        "dequantized kernel": round(dequantized_bytes(config, stored, placed, batch)),
        "activations": round(work.kept),
        "block being computed": 0 if in_head else round(work.block),
        "logits": round(work.head) if in_head else 0,
        "batch": round(batch.microbatches * batch.rows * workload.row_bytes / batch.degrees["context"]),
    }
    hardware = target.hardware
    capacity = hardware.memory_bytes or None
    host = {"optimizer state": state.optimizer if offload else 0, "activations": round(work.moved)}
    return Memory(
        {name: size for name, size in parts.items() if size},
        state.total - host["optimizer state"],
        capacity,
        reserved_bytes(target),
        {name: size for name, size in host.items() if size},
    )


# Of the capacity: what jax leaves to CUDA's context, cuBLAS and NCCL. libtpu's capacity is what programs get.
_RESERVED = {"gpu": 1 - GPU_MEMORY_FRACTION}


def reserved_bytes(target: Target) -> int:
    """Bytes of a device's memory that a program does not get."""
    return round(_RESERVED.get(target.hardware.kind, 0.0) * (target.hardware.memory_bytes or 0))


def _state_on_its_way(
    config: Config, placed: Sequence[Parameter], state: StateBytes, degrees: Mapping[str, int]
) -> int:
    """Bytes of an offloaded optimizer state that are on one device at once: as they came, and as they go back."""
    trained = [one for one in placed if one.trained]
    if not updates_elementwise(config.optimizer):
        return 2 * state.optimizer
    small = largest = total = 0
    for one in trained:
        size = 4 * local_size(one.shape, one.state_entries, degrees)
        total += size
        shape = tuple(
            local_size((dim,), (entry,), degrees) for dim, entry in zip(one.shape, one.state_entries, strict=True)
        )
        cut = size // num_slices(shape)
        small += size if size <= update_slices.SLICE_BYTES else 0
        largest = max(largest, cut)
    moments = state.optimizer / max(total, 1)
    return round(2 * moments * max(largest, min(small, update_slices.SLICE_BYTES)))


def _parameters(
    config: Config, placed: Sequence[Parameter], batch: DeviceBatch, *, layer_by_layer: bool, by_use: bool
) -> tuple[float, float, float]:
    """Gradients, parameters cast to the compute dtype, and what is whole at once, gathered or not scattered yet.

    Args:
        config: the run.
        placed: parameters on the mesh.
        batch: what a device works on.
        layer_by_layer: whether sums over microbatches take the gradient of each layer as it arises; on a pipeline those
            of a chunk come together.
        by_use: whether the lookup and the output layer add to the sums of their tables by themselves, in a step with
            ZeRO on a mesh of `data` alone.
    """
    degrees, size = batch.degrees, POLICY_DTYPES[config.precision.policy].compute_bytes
    stored = POLICY_DTYPES[config.precision.policy].param_bytes
    trained = [one for one in placed if one.trained]
    local = sum(local_size(one.shape, one.entries, degrees) for one in trained)
    for_state = sum(local_size(one.shape, one.state_entries, degrees) for one in trained)
    zero = stage_over_data(config.parallel.zero) if degrees["data"] > 1 else 0
    gradients = min(stored, size) * local
    layer_by_layer = layer_by_layer and degrees["pipe"] == 1
    # Of one layer or of one parameter outside the stack: its gradient before it is added to a sum or scattered.
    by_use = by_use and batch.microbatches > 1 and degrees["data"] == math.prod(degrees.values())
    one_layer = _largest_gradient(trained, degrees, size=size, by_use=zero if by_use else 0)
    unscattered = 0.0
    if batch.microbatches > 1:
        scatters = zero == 2 and degrees["pipe"] == 1
        gradients = _FP32 * (for_state if zero == 2 else local)
        if scatters:
            # Where the step does not add it to its sum before the next one begins, that too.
            unscattered = (1 if layer_by_layer else 2) * one_layer
            gradients += 0 if layer_by_layer else _FP32 * for_state
        else:
            # Else the gradient of a microbatch comes whole, and in float32; on a pipeline that of a chunk.
            gradients += one_layer if layer_by_layer else (_FP32 + size / 2) * local
    elif zero:
        # Each layer's gradient is scattered as soon as it is there.
        gradients, unscattered = size * for_state, one_layer
    # All is cast before the loops over microbatches and layers. With ZeRO a step begins with a copy of all that is
    # trained.
    copied = [one for one in placed if size < one.itemsize or (zero and one.trained)]
    cast = float(size * sum(local_size(one.shape, one.entries, degrees) for one in copied))
    gathered: dict[str | None, float] = {}
    if degrees["fsdp"] > 1:
        alone = {**degrees, "fsdp": 1}
        for one in placed:
            if not any("fsdp" in entry_axes(entry) for entry in one.entries):
                continue
            whole = local_size(one.shape, one.entries, alone)
            # Of a stack one layer at a time, the next one on its way, and the gradient of one.
            scanned = one.scan is not None
            layers = one.shape[0] // degrees["pipe"] if scanned else 1
            copies = (3 if one.trained else 2) if scanned else 1
            share = min(size, one.itemsize) * whole / layers * copies
            gathered[one.scan] = gathered.get(one.scan, 0.0) + share
    gathered[None] = gathered.get(None, 0.0) + unscattered
    # One stack runs at a time.
    outside_stacks = gathered.pop(None, 0.0)
    return gradients, cast, outside_stacks + max(gathered.values(), default=0.0)


def _largest_gradient(trained: Sequence[Parameter], degrees: Mapping[str, int], *, size: int, by_use: int) -> float:
    """Bytes of the largest gradient before it is added to a sum: of a layer, or of a parameter outside the stacks.

    Args:
        trained: parameters that have one.
        degrees: of the mesh.
        size: bytes of an element.
        by_use: ZeRO stage where tables outside the stacks get theirs in blocks of ids, in float32; 0: they do not.
    """
    found: dict[str, float] = {}
    for one in trained:
        layers = 1 if one.scan is None else one.shape[0] / degrees["pipe"]
        name = one.path if one.scan is None else one.scan
        gradient = size * local_size(one.shape, one.entries, degrees) / layers
        is_table = one.scan is None and len(one.shape) == 2
        # Under stage 2 a device sums some columns, see `DataReduction.sum_dim`.
        if is_table and (by_use == 1 or (by_use == 2 and min(one.shape) % degrees["data"] == 0)):
            blocks = num_pieces(math.prod(one.shape), max(one.shape))
            gradient = _FP32 * math.prod(one.shape) / blocks
        found[name] = found.get(name, 0.0) + gradient
    return max(found.values(), default=0.0)


# Bytes for each element of a convolution's result, by the bytes of the compute dtype: outside the scanned stacks the
# result and what the compiler does not recompute of its norm; inside, all that autodiff asks for.
_KEPT_OUTSIDE, _KEPT_SCANNED = {2: 4.2, 4: 6.4}, {2: 10.4, 4: 13.3}
# A block that runs forward alone works on as much as the first of these; on TPUs, which fill up its channels, on more.
_FORWARD = {"tpu": 1.85}


def _resnet(
    model: ResNetConfig, config: Config, workload: Workload, batch: DeviceBatch, kind: str, lowest: int
) -> Work:
    size = POLICY_DTYPES[config.precision.policy].compute_bytes
    sizes = resnet_activations(model, workload, lowest)
    kept = _KEPT_OUTSIDE[size] * sizes.first + size * sizes.residuals
    if config.remat.policy == "none":
        kept = _KEPT_OUTSIDE[size] * sizes.first + _KEPT_SCANNED[size] * sizes.rest
    elif "block_input" in config.remat.offload:
        kept = _KEPT_OUTSIDE[size] * sizes.first
    # With stacks the backward pass begins at the last blocks, which are small; without, the largest weighs.
    moved = size * sizes.residuals if "block_input" in config.remat.offload else 0.0
    block = 0.0 if sizes.rest else sizes.largest * _KEPT_OUTSIDE[size]
    # What runs forward alone is done before anything is kept.
    block = max(block, sizes.forward * _FORWARD.get(kind, 1.0) * _KEPT_OUTSIDE[size] - kept)
    return Work(batch.rows * kept, batch.rows * block, 0.0, batch.rows * moved)


@dataclass(frozen=True)
class ResNetSizes:
    """Elements of an image: of results of convolutions that a backward pass needs, and of the largest blocks.

    Attributes:
        first: of the convolutions outside the scanned stacks.
        rest: of those inside.
        residuals: of the inputs of the blocks inside.
        largest: of the largest block.
        forward: of the largest block that runs forward alone; 0: there is none.
    """

    first: int
    rest: int
    residuals: int
    largest: int
    forward: int


def resnet_activations(model: ResNetConfig, workload: Workload, lowest: int = 0) -> ResNetSizes:
    """The sizes of a ResNet.

    Args:
        model: which one.
        workload: its rows.
        lowest: number of the first block that is trained, see `metrics/flops.py`.
    """
    height, width, _ = workload.input_shape
    remaining = (height, width)

    def halve(sides: tuple[int, int]) -> tuple[int, int]:
        return math.ceil(sides[0] / 2), math.ceil(sides[1] / 2)

    first = rest = residuals = largest = forward = 0
    remaining = halve(remaining) if model.stem == "imagenet" else remaining
    stem = math.prod(remaining) * model.width
    if lowest == 0:
        first += stem
    else:
        forward = stem
    remaining = halve(remaining) if model.stem == "imagenet" else remaining
    inputs = model.width
    for stage, count in enumerate(model.stage_blocks):
        inner = model.width * 2**stage
        outer = 4 * inner if model.bottleneck else inner
        before, remaining = math.prod(remaining), halve(remaining) if stage else remaining
        after = math.prod(remaining)
        block = after * (2 * inner + outer if model.bottleneck else inner + outer)
        if 1 + 2 * stage < lowest:
            forward = max(forward, block)
        else:
            first += block + (after * outer if inputs != outer or stage else 0)
            first += (before - after) * inner if model.bottleneck else 0  # the stride sits on the second convolution
            largest = max(largest, block)
        if 2 + 2 * stage >= lowest:
            rest += (count - 1) * block
            residuals += (count - 1) * after * outer
        inputs = outer
    return ResNetSizes(first, rest, residuals, largest, forward)


def _mlp(model: MLPConfig, config: Config, workload: Workload, batch: DeviceBatch, lowest: int) -> Work:
    size, tensor = POLICY_DTYPES[config.precision.policy].compute_bytes, batch.degrees["tensor"]
    # The inputs of the lowest trained layer too.
    kept = 2 * size * batch.rows * sum(model.hidden_dims[max(0, lowest - 1) :]) / tensor
    widest = max([*model.hidden_dims, math.prod(workload.input_shape)])
    return Work(kept, 2 * size * batch.rows * widest / tensor, 0.0)
