"""Memory of a step on one device by part, without compiling: state exactly, the rest by what compilers keep.

The constants count bytes that XLA keeps for each element of a tensor. They were fitted to what compilers said of the
layouts in `tests/plan/compiled.json`, which the model meets within 15 % (one it misses by 17 %).
"""

import math
from dataclasses import dataclass, field

from jaxtrain.config.model import TransformerConfig, ViTConfig
from jaxtrain.layout.rules import num_pieces, stage_over_data
from jaxtrain.optim import rules as update_slices
from jaxtrain.optim.rules import num_slices, updates_elementwise
from jaxtrain.plan.activations import step_work
from jaxtrain.plan.state import StateBytes, local_size
from jaxtrain.plan.step import DeviceStep
from jaxtrain.plan.targets import Target
from jaxtrain.plan.work import logit_blocks_of
from jaxtrain.precision.dtypes import POLICY_DTYPES
from jaxtrain.runtime.distributed import GPU_MEMORY_FRACTION

_FP32 = 4
# Of the capacity: what jax leaves to CUDA's context, cuBLAS and NCCL. libtpu's capacity is what programs get.
_RESERVED = {"gpu": 1 - GPU_MEMORY_FRACTION}


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by part, at the moment of the step when most is allocated.

    Attributes:
        parts: name -> bytes, in the order to show: parameters, optimizer state, moving average, model state, gradients,
            parameters in compute dtype, activations, working set, logits, communication, batch.
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
    # The layers of a stack add their gradients to the sum one by one where the step runs it (`layout/stack_sums.py`);
    # on a pipeline those of a chunk come together.
    has_stack = isinstance(config.model, TransformerConfig | ViTConfig)
    by_layer = has_stack and config.finetune.lora is None and not step.workload.pairs
    by_use = by_layer and step.microbatches > 1 and degrees["data"] == math.prod(degrees.values())
    by_layer = by_layer and degrees["pipe"] == 1
    # Of one layer or of one parameter outside the stack: its gradient before it is added to a sum or scattered.
    one_layer = _largest_gradient(step, by_use=zero if by_use and _whole_logits(step) else 0)
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
            layers = one.shape[0] // degrees["pipe"]
            share = min(size, one.itemsize) * whole / layers * (3 if one.trained else 2)
            stacks[one.scan] = stacks.get(one.scan, 0.0) + share
    # One stack runs at a time.
    return outside + unscattered + max(stacks.values(), default=0.0)


def _whole_logits(step: DeviceStep) -> bool:
    """Whether the logits of a device are computed at once, if there are any.

    Lookup and output layer then add to the sums of their tables by themselves, with ZeRO on a mesh of `data` alone.
    """
    if step.structure is None:
        return False
    last, vocabulary = step.structure.stacks[-1], (step.structure.vocabulary or 0) / step.degrees["tensor"]
    if vocabulary == 0:
        return True
    return logit_blocks_of(step.config, step.tokens(last), last.blocks.embed_dim, vocabulary).by == "whole"


def _largest_gradient(step: DeviceStep, *, by_use: int) -> float:
    """Bytes of the largest gradient before it is added to a sum: of a layer, or of a parameter outside the stacks.

    `by_use` is the ZeRO stage where tables outside the stacks get theirs in blocks of ids, in float32; 0: they do not.
    """
    degrees, found = step.degrees, dict[str, float]()
    for one in step.trained:
        layers = 1 if one.scan is None else one.shape[0] / degrees["pipe"]
        gradient = step.itemsize * local_size(one.shape, one.entries, degrees) / layers
        is_table = one.scan is None and len(one.shape) == 2
        # Under stage 2 a device sums some columns, see `DataReduction.sum_dim`.
        if is_table and (by_use == 1 or (by_use == 2 and min(one.shape) % degrees["data"] == 0)):
            gradient = _FP32 * math.prod(one.shape) / num_pieces(math.prod(one.shape), max(one.shape))
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
