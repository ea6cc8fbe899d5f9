"""Predicted time of a step: blocks on the roofline, traffic of each mesh axis over its link, the pipeline's bubble."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.config.model import ResNetConfig, TransformerConfig
from jaxtrain.config.schema import Config
from jaxtrain.layout.rules import AXES, entry_axes, stage_over_data
from jaxtrain.models.shipped.structure import Stack
from jaxtrain.ops.attention.form import AttentionForm
from jaxtrain.parallel.schedules import Schedule
from jaxtrain.plan.catalogue.hardware import Target
from jaxtrain.plan.time.record import BlockTime, StepTime, Traffic
from jaxtrain.plan.work.attention import attention_forms, context_way
from jaxtrain.plan.work.block import BlockWork, DeviceBatch
from jaxtrain.plan.work.blocks import step_blocks
from jaxtrain.plan.work.experts import exchanged_bytes
from jaxtrain.plan.work.state import Parameter, StateBytes, local_size, update_flops
from jaxtrain.plan.workload.parameters import model_structure
from jaxtrain.plan.workload.record import Workload
from jaxtrain.precision.dtypes import POLICY_DTYPES
from jaxtrain.runtime.devices import FORMATS

# What matmuls, memory and links reach of their peaks: (likely, best, worst). Matmuls reach what `matmul_efficiency` of
# the hardware says, else what is here; the spread around it is that of published speeds. Streams reach 85 to 92 % of
# the memory's rate. The links of a TPU are counted together, of which an axis of the mesh along one dim of the torus
# has a half (v5e, v6e) or a third (v5p). A CPU's peak is measured with matmuls, so that large ones reach it.
_EFFICIENCY = {
    "gpu": {"compute": (0.60, 0.80, 0.36), "memory": (0.80, 0.90, 0.60), "link": (0.75, 0.90, 0.50)},
    "tpu": {"compute": (0.75, 0.90, 0.55), "memory": (0.80, 0.90, 0.60), "link": (0.80, 0.90, 0.30)},
    "cpu": {"compute": (0.75, 1.00, 0.40), "memory": (0.70, 1.00, 0.35), "link": (0.50, 1.00, 0.25)},
}
# Axes whose collectives are rings of gathers and sums: one crosses to the next island once, over the network of all
# members that share an island. What other axes send goes from device to device.
_RINGS = ("data", "fsdp", "tensor")
# Traffic that the compiler starts early: (likely, best, worst) share of the compute that it can hide behind.
_OVERLAP = {"data": (0.5, 1.0, 0.0), "fsdp": (0.7, 1.0, 0.0), "context": (0.5, 1.0, 0.0), "pipe": (0.5, 1.0, 0.0)}
# Activations pass to the host and back beside the layers; optimizer state when nothing else runs.
_OVERLAP["host (activations)"] = (0.5, 1.0, 0.0)
_LIKELY, _BEST, _WORST = 0, 1, 2


@dataclass(frozen=True)
class Sent:
    """Bytes that one device sends over one axis in one step."""

    axis: str
    bytes: float
    kind: str


def has_fp8(target: Target) -> bool:
    """Whether the linear layers of policy fp8 run on units of their own: NVIDIA's, from Ada on (`ops/fp8.py`).

    Elsewhere the numbers are the same and the product is one of bf16. MI300 has other 8-bit formats; the TPU's compiler
    is given bf16.
    """
    return target.hardware.vendor == "nvidia" and "fp8" in target.hardware.peak_flops


def peak_rate(target: Target, policy: str) -> float | None:
    """Dense FLOP/s of one device in the number format of a policy, of fp8 that of its linear layers.

    TPUs multiply in bf16 and emulate float32 by six passes of it (jax's precision "highest"), tf32 by three.
    """
    peaks = target.hardware.peak_flops
    if policy == "fp8" and not has_fp8(target):
        policy = "bf16"
    known = peaks.get(FORMATS[policy])
    if known is None and target.hardware.kind == "tpu" and "bf16" in peaks and policy in ("fp32", "tf32"):
        return peaks["bf16"] / (6 if policy == "fp32" else 3)
    return known


def crossing(degrees: Mapping[str, int], target: Target) -> dict[str, int]:
    """Axes whose neighbours sit in different islands, with how many of each share one.

    As `layout/mesh.py` deals islands to the outermost axes.
    """
    islands, rest = divmod(math.prod(degrees.values()), target.hardware.island)
    crossed, inside = {}, 1
    if not rest:
        for axis in AXES:
            across = math.gcd(degrees[axis], islands)
            islands //= across
            if across > 1:
                crossed[axis] = degrees[axis] // across
        return crossed
    # Islands of different sizes fit no shape: devices fill it in their order.
    for axis in reversed(AXES):
        if degrees[axis] > 1 and inside * degrees[axis] > target.hardware.island:
            crossed[axis] = max(1, target.hardware.island // inside)
        inside *= degrees[axis]
    return crossed


def _efficiency(target: Target) -> dict[str, tuple[float, float, float]]:
    """What matmuls, memory and links of a target reach of their peaks: (likely, best, worst)."""
    rates, likely = _EFFICIENCY[target.hardware.kind], target.hardware.matmul_efficiency
    if likely is None:
        return rates
    _, best, worst = (rate / rates["compute"][_LIKELY] * likely for rate in rates["compute"])
    return rates | {"compute": (likely, min(best, 1.0), worst)}


def traffic(
    config: Config,
    workload: Workload,
    placed: Sequence[Parameter],
    batch: DeviceBatch,
    schedule: Schedule | None,
) -> list[Sent]:
    """What one device sends in one step, by axis; ring algorithms, where a device sends (n - 1) / n of the whole."""
    degrees, size = batch.degrees, POLICY_DTYPES[config.precision.policy].compute_bytes
    # A stage of a pipeline keeps its inputs only, and runs forward once more before its backward.
    forwards = 1 if schedule is None else 2
    sent: list[Sent] = []

    def share(axis: str) -> float:
        return (degrees[axis] - 1) / degrees[axis]

    def without(one: Parameter, *axes: str) -> int:
        """Elements of a parameter that a device has once these axes are gathered."""
        return local_size(one.shape, one.entries, {**degrees, **dict.fromkeys(axes, 1)})

    trained = [one for one in placed if one.trained]
    zero = stage_over_data(config.parallel.zero)
    if degrees["data"] > 1:
        # Batch statistics are of all shards, and so is the gradient of each microbatch.
        times = batch.microbatches if zero == 2 or isinstance(config.model, ResNetConfig) else 1
        whole = sum(without(one) for one in trained)
        # Sums over microbatches are float32, gradients of one batch come in the compute dtype. A reduction is a
        # reduce-scatter and an all-gather; ZeRO gathers parameters in the compute dtype instead of gradients.
        gradients = 4 if batch.microbatches > 1 else size
        volume = whole * (gradients * times + (size if zero else gradients * times)) * share("data")
        sent.append(Sent("data", volume, "gradients" if zero == 0 else "gradients, parameters"))
    if degrees["fsdp"] > 1:
        # Kernels in fewer bits are gathered as they are stored.
        whole = sum(min(size, one.itemsize) * without(one, "fsdp") for one in placed)
        scattered = size * sum(without(one, "fsdp") for one in trained)
        # Gathered for every forward pass and for the backward, whose gradients are scattered.
        passes = forwards + 1 + (config.remat.policy == "sqrt")
        volume = batch.microbatches * (passes * whole + scattered) * share("fsdp")
        sent.append(Sent("fsdp", volume, f"parameters {'twice' if forwards == 1 else '3 times'}, gradients"))

    def summed(axis: str) -> float:
        """Sums over an axis of the gradients of parameters that are not sharded over it, once per microbatch."""
        whole = [one for one in trained if not any(axis in entry_axes(entry) for entry in one.entries)]
        return 2 * batch.microbatches * size * sum(without(one) for one in whole) * share(axis)

    structure = model_structure(config.model, workload)
    for stack in () if structure is None else structure.stacks:
        sent += _stack_traffic(stack, config, batch, schedule, summed)
    if schedule is not None:
        stages, chunks = schedule.num_stages, schedule.num_chunks
        # Parameters outside the stack are gathered once a step, and their gradients summed in float32; chunks that lie
        # on another stage than the one that runs them go there and back.
        outside = sum((size + 8 * one.trained) * without(one, "pipe") for one in placed if not one.stacked)
        dealt = sum((size + 4 * one.trained) * without(one) for one in placed if one.stacked)
        elsewhere = sum(c % stages != c // chunks for c in range(stages * chunks)) / (stages * chunks)
        sent.append(Sent("pipe", outside * share("pipe") + dealt * elsewhere, "parameters, gradients"))
    return sent


def _stack_traffic(
    stack: Stack, config: Config, batch: DeviceBatch, schedule: Schedule | None, summed: Callable[[str], float]
) -> list[Sent]:
    """What one device sends for a stack of transformer blocks.

    Args:
        stack: the blocks.
        config: the run.
        batch: what a device works on.
        schedule: of the pipeline.
        summed: axis -> bytes of the sums over it of gradients of parameters that are not sharded over it.
    """
    degrees, size = batch.degrees, POLICY_DTYPES[config.precision.policy].compute_bytes
    forwards = 1 if schedule is None else 2
    sent: list[Sent] = []
    model, label = stack.blocks, stack.label
    tokens = batch.rows * stack.length / degrees["context"]
    stream = size * tokens * model.embed_dim
    layers = model.num_layers / degrees["pipe"] * batch.microbatches
    again = forwards + {"full": 1, "sqrt": 2}.get(config.remat.policy, 0)
    # Gradients of parameters are summed once, with the first stack.
    gradients = 0.0 if label and not label.startswith("encoder") else 1.0
    if degrees["tensor"] > 1:
        # After attention and after the MLP an all-reduce, forward and backward, and again where recomputed; one more
        # after cross-attention.
        sums = 3 if stack.memory_length is not None else 2
        count = sums * again + sums
        volume = layers * count * 2 * stream * (degrees["tensor"] - 1) / degrees["tensor"]
        sent.append(Sent("tensor", volume, f"{label}residual stream, {count} all-reduces a layer"))
    if degrees["context"] > 1:
        forms = attention_forms(model)
        of_form = [
            count * _attention_traffic(config, model, form, tokens * size, degrees, again)
            for form, count in forms.items()
        ]
        volume = layers * sum(of_form) / model.num_layers
        sent.append(
            Sent("context", volume + gradients * summed("context"), "keys, values, gradients of all parameters")
        )
    if degrees["expert"] > 1 and model.experts is not None:
        volume = layers * exchanged_bytes(config, model, tokens, size, degrees, forwards)
        kind = "tokens to experts and back, gradients of other parameters"
        sent.append(Sent("expert", volume + summed("expert"), kind))
    if schedule is not None:
        # Under 1F1B stages exchange in every tick.
        ticks = schedule.num_ticks if schedule.name == "1f1b" else batch.microbatches * schedule.num_chunks
        sent.append(Sent("pipe", 2 * ticks * stream, "activations, their gradients"))
    return sent


def _attention_traffic(
    config: Config,
    model: TransformerConfig,
    form: AttentionForm,
    column_bytes: float,
    degrees: Mapping[str, int],
    forwards: int,
) -> float:
    """Bytes that one device sends over `context` for the attention of one layer and microbatch.

    Args:
        config: the run.
        model: its model.
        form: of the layer's attention.
        column_bytes: of one number for each of the device's tokens.
        degrees: of the mesh.
        forwards: forward passes, those that are run again included.
    """
    heads, groups = model.num_heads, model.kv_heads
    size = POLICY_DTYPES[config.precision.policy].compute_bytes
    head_bytes = column_bytes * model.head_width / degrees["tensor"]
    others = degrees["context"] - 1
    match context_way(config, model, form):
        case "all_to_all":
            # Queries, keys and values to the devices of their heads, and outputs back; the gradients go the same ways.
            return (forwards + 1) * 2 * (heads + groups) * head_bytes * others / degrees["context"]
        case "gather":
            return (forwards + 1) * 2 * groups * head_bytes * others
        case _:
            # Keys and values go round forward and backward, where their gradients go all the way in float32. Under
            # causal attention all four change their order before and after (of two devices each has half in place).
            zig_zag = 2 * (heads + groups) * (0.5 if others == 1 else 1) if form.causal else 0
            gradients = 2 * groups * degrees["context"] * 4 / size
            return head_bytes * ((forwards + 1) * (2 * groups * others + zig_zag) + gradients)


def step_time(
    config: Config,
    workload: Workload,
    target: Target,
    placed: Sequence[Parameter],
    state: StateBytes,
    batch: DeviceBatch,
    schedule: Schedule | None,
    on_host: Mapping[str, int] | None = None,
) -> StepTime | None:
    """The prediction, or None where no peak is known for the run's number format.

    Args:
        config: the run.
        workload: its rows.
        target: hardware and count.
        placed: parameters on the mesh.
        state: bytes of the train state.
        batch: what a device works on.
        schedule: of the pipeline.
        on_host: name -> bytes in the host's memory, as in `Memory.host_parts`.
    """
    peak = peak_rate(target, config.precision.policy)
    if peak is None or not target.hardware.memory_bandwidth:
        return None
    blocks = step_blocks(config, workload, batch)
    # The update reads state and gradients and writes state, without what is frozen.
    # It has no backward pass, which a block counts twice.
    update = update_flops(config, placed, batch.degrees)
    blocks.append(BlockWork("optimizer", 1, update / 3, (2 * state.total + 2 * state.params - 4 * state.frozen) / 3))
    sent = traffic(config, workload, placed, batch, schedule)
    times = {"activations": batch.microbatches * (1 if schedule is None else schedule.num_chunks)}
    sent += [
        Sent(f"host ({name})", 2 * size * times.get(name, 1), "to the host and back")
        for name, size in (on_host or {}).items()
    ]
    bubble = 0.0 if schedule is None else schedule.bubble_fraction()
    other = peak_rate(target, "bf16") if config.precision.policy == "fp8" else peak
    assert other is not None, "no hardware has fp8 alone"
    peaks = {True: peak, False: other}
    rated = [_rate(blocks, sent, bubble, peaks, target, batch, which) for which in (_LIKELY, _BEST, _WORST)]
    times, on_axes, seconds = rated[_LIKELY]
    compute = sum(block.seconds for block in times)
    assert workload.flops_per_row is not None, "a model of the user's own is not analysed here"
    flops = workload.flops_per_row * workload.rows
    rates = _efficiency(target)
    assumptions = [
        f"matmuls at {rates['compute'][0]:.0%} of the peak ({rates['compute'][2]:.0%} to {rates['compute'][1]:.0%}), "
        f"memory at {rates['memory'][0]:.0%} of its rate, links at {rates['link'][0]:.0%} of theirs",
    ]
    hidden = [axis for axis in _OVERLAP if any(one.axis == axis for one in sent)]
    if hidden:
        shown = ", ".join(f"{axis} behind {_OVERLAP[axis][0]:.0%} of the compute" for axis in hidden)
        assumptions.append(f"traffic hides: {shown}; the range has all of it hidden, and none")
    return StepTime(
        seconds=seconds,
        low_seconds=rated[_BEST][2],
        high_seconds=rated[_WORST][2],
        compute_seconds=compute,
        blocks=tuple(times),
        traffic=tuple(on_axes),
        bubble_fraction=bubble,
        bound=_bound(times, on_axes, compute, bubble),
        model_flops=flops,
        model_flops_utilization=flops / (seconds * peak * target.num_devices),
        assumptions=tuple(assumptions),
    )


def _rate(
    blocks: Sequence[BlockWork],
    sent: Sequence[Sent],
    bubble: float,
    peaks: Mapping[bool, float],
    target: Target,
    batch: DeviceBatch,
    which: int,
) -> tuple[list[BlockTime], list[Traffic], float]:
    """Times at one set of rates; `peaks` by whether a block is one of linear layers."""
    hardware, rates = target.hardware, _efficiency(target)
    times = []
    for block in blocks:
        compute = block.total_flops / (peaks[block.linear] * rates["compute"][which])
        memory = block.total_bytes / (hardware.memory_bandwidth * rates["memory"][which])
        bound = "compute" if compute >= memory else "memory"
        times.append(BlockTime(block.name, block.total_flops, block.total_bytes, max(compute, memory), bound))
    stages = sum(time.seconds for time, block in zip(times, blocks, strict=True) if block.stage)
    rest = sum(time.seconds for time in times) - stages
    total = stages / (1 - bubble) + rest
    crossed = crossing(batch.degrees, target)
    on_axes = []
    # What is left to hide behind shrinks with every axis that hides.
    room = stages + rest
    for one in sent:
        fast = one.axis not in crossed
        kind = "fast" if fast else "network"
        shared = crossed.get(one.axis, 1) if one.axis in _RINGS else 1
        between = min(hardware.link_bandwidth, shared * hardware.network_bandwidth)
        rate = (hardware.link_bandwidth if fast else between) * rates["link"][which]
        if one.axis.startswith("host"):
            rate, kind = hardware.host_bandwidth * rates["link"][which], "PCIe"
        seconds = one.bytes / rate if rate else math.inf
        overlap = _OVERLAP.get(one.axis, (0.0, 0.0, 0.0))[which]
        hidden = min(seconds, overlap * room)
        room -= hidden
        on_axes.append(Traffic(one.axis, one.bytes, seconds, seconds - hidden, kind, one.kind))
        total += seconds - hidden
    return times, on_axes, total


def _bound(times: Sequence[BlockTime], on_axes: Sequence[Traffic], compute: float, bubble: float) -> str:
    waits = {
        "compute": sum(block.seconds for block in times if block.bound == "compute"),
        "memory bandwidth": sum(block.seconds for block in times if block.bound == "memory"),
        "the pipeline's bubble": compute * bubble / (1 - bubble),
        **{f"traffic over {one.axis} ({one.link} link)": one.exposed_seconds for one in on_axes},
    }
    return max(waits, key=lambda name: waits[name])
