"""Predicted time of a step: blocks on the roofline, traffic of each mesh axis over its link, the pipeline's bubble.

No jax here. Collectives are rings: a device sends (n - 1) / n of the whole.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.config.model import ResNetConfig, TransformerConfig
from jaxtrain.config.schema import AXES, Config
from jaxtrain.layout.rules import stage_over_data
from jaxtrain.models.shipped.shapes import Stack, mlp_shapes
from jaxtrain.ops.attention.rules import AttentionForm
from jaxtrain.ops.experts.rows import round_rows
from jaxtrain.plan.layers import attention_forms, context_way, in_manual_region
from jaxtrain.plan.state import Parameter, StateBytes, local_size, update_flops
from jaxtrain.plan.step import DeviceStep
from jaxtrain.plan.targets import Target
from jaxtrain.plan.work import BlockWork, step_blocks
from jaxtrain.runtime.devices import FORMATS

# Expert ids are int32, the weights of a token's experts float32.
_ID_BYTES = 4


# --- What one device sends in one step, by axis. ---


@dataclass(frozen=True)
class Sent:
    """Bytes that one device sends over one axis in one step."""

    axis: str
    bytes: float
    kind: str


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


def traffic(step: DeviceStep) -> list[Sent]:
    """What one device sends in one step, by axis."""
    config, degrees, size, schedule = step.config, step.degrees, step.itemsize, step.schedule
    sent: list[Sent] = []

    def share(axis: str) -> float:
        return (degrees[axis] - 1) / degrees[axis]

    def without(one: Parameter, *axes: str) -> int:
        """Elements of a parameter that a device has once these axes are gathered."""
        return local_size(one.shape, one.entries, {**degrees, **dict.fromkeys(axes, 1)})

    zero = stage_over_data(config.parallel.zero)
    if degrees["data"] > 1:
        # Batch statistics are of all shards, and so is the gradient of each microbatch.
        times = step.microbatches if zero == 2 or isinstance(config.model, ResNetConfig) else 1
        whole = sum(without(one) for one in step.trained)
        # Sums over microbatches are float32, gradients of one batch come in the compute dtype. A reduction is a
        # reduce-scatter and an all-gather; ZeRO gathers parameters in the compute dtype instead of gradients.
        gradients = 4 if step.microbatches > 1 else size
        volume = whole * (gradients * times + (size if zero else gradients * times)) * share("data")
        sent.append(Sent("data", volume, "gradients" if zero == 0 else "gradients, parameters"))
    if degrees["fsdp"] > 1:
        # Kernels in fewer bits are gathered as they are stored.
        whole = sum(min(size, one.itemsize) * without(one, "fsdp") for one in step.placed)
        scattered = size * sum(without(one, "fsdp") for one in step.trained)
        # Gathered for every forward pass and for the backward, whose gradients are scattered.
        passes = step.forwards + 1 + (config.remat.policy == "sqrt")
        volume = step.microbatches * (passes * whole + scattered) * share("fsdp")
        sent.append(Sent("fsdp", volume, f"parameters {'twice' if step.forwards == 1 else '3 times'}, gradients"))

    def summed(axis: str) -> float:
        """Sums over an axis of the gradients of parameters that are not sharded over it, once per microbatch."""
        whole = [one for one in step.trained if not one.is_over(axis)]
        return 2 * step.microbatches * size * sum(without(one) for one in whole) * share(axis)

    for stack in () if step.structure is None else step.structure.stacks:
        sent += _stack_traffic(step, stack, summed)
    if schedule is not None:
        stages, chunks = schedule.num_stages, schedule.num_chunks
        # Parameters outside the stack are gathered once a step, and their gradients summed in float32; chunks that lie
        # on another stage than the one that runs them go there and back.
        outside = sum((size + 8 * one.trained) * without(one, "pipe") for one in step.placed if not one.stacked)
        dealt = sum((size + 4 * one.trained) * without(one) for one in step.placed if one.stacked)
        elsewhere = sum(c % stages != c // chunks for c in range(stages * chunks)) / (stages * chunks)
        sent.append(Sent("pipe", outside * share("pipe") + dealt * elsewhere, "parameters, gradients"))
    return sent


def _stack_traffic(step: DeviceStep, stack: Stack, summed: Callable[[str], float]) -> list[Sent]:
    """What one device sends for a stack of transformer blocks; `summed` as in `traffic`."""
    config, degrees, size, schedule = step.config, step.degrees, step.itemsize, step.schedule
    sent: list[Sent] = []
    model, label, tokens = stack.blocks, stack.label, step.tokens(stack)
    stream = size * tokens * model.embed_dim
    layers = step.layers(stack) * step.microbatches
    again = step.forwards + {"full": 1, "sqrt": 2}.get(config.remat.policy, 0)
    if degrees["tensor"] > 1:
        # After attention and after the MLP an all-reduce, forward and backward, and again where recomputed; one more
        # after cross-attention.
        sums = 1 + bool(mlp_shapes(model)) + (stack.memory_length is not None)
        count = sums * again + sums
        volume = layers * count * 2 * stream * (degrees["tensor"] - 1) / degrees["tensor"]
        sent.append(Sent("tensor", volume, f"{label}residual stream, {count} all-reduces per layer"))
    if degrees["context"] > 1:
        of_form = [
            count * _attention_traffic(step, stack, form, again) for form, count in attention_forms(model).items()
        ]
        volume = layers * sum(of_form) / model.num_layers
        # Gradients of parameters are summed once, with the first stack.
        volume += 0.0 if label and not label.startswith("encoder") else summed("context")
        sent.append(Sent("context", volume, "keys, values, gradients of all parameters"))
    if degrees["expert"] > 1 and model.experts is not None:
        volume = layers * _exchanged_bytes(config, model, tokens, size, degrees, step.forwards)
        kind = "tokens to experts and back, gradients of other parameters"
        sent.append(Sent("expert", volume + summed("expert"), kind))
    if schedule is not None and not stack.is_leading:
        # Under 1F1B stages exchange in every tick.
        ticks = schedule.num_ticks if schedule.name == "1f1b" else step.microbatches * schedule.num_chunks
        sent.append(Sent("pipe", 2 * ticks * stream, "activations, their gradients"))
    return sent


def _attention_traffic(step: DeviceStep, stack: Stack, form: AttentionForm, forwards: int) -> float:
    """Bytes over `context` for the attention of one layer and microbatch; `forwards` count those that are run again."""
    model, degrees = stack.blocks, step.degrees
    heads, groups, others = model.num_heads, model.kv_heads, degrees["context"] - 1
    head_bytes = step.tokens(stack) * step.itemsize * model.head_width / degrees["tensor"]
    match context_way(step.config, model, form):
        case "all_to_all":
            # Queries, keys and values to the devices of their heads, and outputs back; the gradients go the same ways.
            return (forwards + 1) * 2 * (heads + groups) * head_bytes * others / degrees["context"]
        case "gather":
            return (forwards + 1) * 2 * groups * head_bytes * others
        case _:
            # Keys and values go round forward and backward, where their gradients go all the way in float32. Under
            # causal attention all four change their order before and after (of two devices each has half in place).
            zig_zag = 2 * (heads + groups) * (0.5 if others == 1 else 1) if form.causal else 0
            gradients = 2 * groups * degrees["context"] * 4 / step.itemsize
            return head_bytes * ((forwards + 1) * (2 * groups * others + zig_zag) + gradients)


def _exchanged_bytes(
    config: Config, model: TransformerConfig, tokens: float, size: int, degrees: Mapping[str, int], forwards: int
) -> float:
    """Bytes that one device sends over `expert` for one layer and microbatch.

    The routing is even, so that one round takes it: a buffer of rows goes to every other shard, as do ids and weights
    of their experts; results come back. A backward pass sends the gradients of both buffers and of the weights. What is
    computed again sends tokens once more, and results only where the next layer needs them.

    `forwards` are forward passes without those of the remat policy, `size` bytes of a number in the compute dtype.
    """
    assert model.experts is not None
    policy = config.remat.policy
    # A segment runs again as a whole, and then block by block.
    whole = forwards + (policy == "sqrt")
    blocks = 1 if policy != "none" or in_manual_region(config) else 0
    buffers, choices = 2 * whole + blocks + 2, 2 * (whole + blocks) + 1
    row = size * buffers * model.embed_dim + _ID_BYTES * choices
    shards = degrees["expert"]
    rows = round_rows(tokens, model.experts.experts_per_token, model.experts.num_experts, shards)
    return (shards - 1) * rows * row


# --- Their times. ---

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
class BlockTime:
    """One kind of block of a step on one device.

    Attributes:
        name: attention projections, attention scores, MLP, norms, embedding, output, optimizer, stage 1, ...
        flops: of all of them in one step, recomputation included.
        bytes: moved to and from memory for that.
        seconds: the larger of both at the assumed rates.
        bound: compute or memory.
    """

    name: str
    flops: float
    bytes: float
    seconds: float
    bound: str

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Traffic:
    """What one mesh axis sends in one step.

    Attributes:
        axis: of the mesh.
        bytes: that one device sends.
        seconds: over its link.
        exposed_seconds: of these, what is assumed not to hide behind compute.
        link: fast (NVLink, ICI, PCIe), network, or PCIe to the host.
        kind: what it is made of, for people.
    """

    axis: str
    bytes: float
    seconds: float
    exposed_seconds: float
    link: str
    kind: str


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step.

    Attributes:
        seconds: the prediction.
        low_seconds, high_seconds: its range: at the best seen efficiency with all traffic hidden but that of tensor and
            expert, which blocks wait for, and of offloaded optimizer state; and at the worst with none hidden.
        compute_seconds: of the blocks, with no bubble.
        blocks: of one device.
        traffic: by axis.
        bubble_fraction: idle share of a pipeline's step.
        bound: what most of the step waits for: compute, memory, communication over an axis, or the pipeline's bubble.
        model_flops: of the whole step, over all devices.
        model_flops_utilization: model FLOPs over the devices' dense peak in the run's format.
        assumptions: lines that state the efficiencies and overlap.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    compute_seconds: float
    blocks: tuple[BlockTime, ...]
    traffic: tuple[Traffic, ...]
    bubble_fraction: float
    bound: str
    model_flops: float
    model_flops_utilization: float
    assumptions: tuple[str, ...]

    @property
    def bubble_seconds(self) -> float:
        """What a step idles in its pipeline: what neither the blocks nor exposed traffic takes."""
        rest = self.seconds - self.compute_seconds - sum(one.exposed_seconds for one in self.traffic)
        return max(rest, 0.0) if self.bubble_fraction and math.isfinite(rest) else 0.0


def has_fp8(target: Target) -> bool:
    """Whether the linear layers of policy fp8 run on units of their own: NVIDIA's, from Ada on (`ops/linear.py`).

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


def _efficiency(target: Target) -> dict[str, tuple[float, float, float]]:
    """What matmuls, memory and links of a target reach of their peaks: (likely, best, worst)."""
    rates, likely = _EFFICIENCY[target.hardware.kind], target.hardware.matmul_efficiency
    if likely is None:
        return rates
    _, best, worst = (rate / rates["compute"][_LIKELY] * likely for rate in rates["compute"])
    return rates | {"compute": (likely, min(best, 1.0), worst)}


def step_time(
    step: DeviceStep, state: StateBytes, target: Target, on_host: Mapping[str, int] | None = None
) -> StepTime | None:
    """The prediction, or None where no peak is known for the run's number format.

    What is in the host's memory, name -> bytes as in `Memory.host_parts`, is sent there and back.
    """
    policy = step.config.precision.policy
    peak = peak_rate(target, policy)
    if peak is None or not target.hardware.memory_bandwidth:
        return None
    blocks = step_blocks(step)
    # The update reads state and gradients and writes state, without what is frozen or a reference.
    # It has no backward pass, which a block counts twice.
    update = update_flops(step.config, step.stored, step.placed, step.degrees)
    moved = 2 * (state.total - state.reference) + 2 * state.params - 4 * state.frozen
    blocks.append(BlockWork("optimizer", 1, update / 3, moved / 3))
    sent = traffic(step)
    times = {"activations": step.microbatches * (1 if step.schedule is None else step.schedule.num_chunks)}
    for name, size in (on_host or {}).items():
        sent.append(Sent(f"host ({name})", 2 * size * times.get(name, 1), "to the host and back"))
    rated = [_rate(step, blocks, sent, target, which) for which in (_LIKELY, _BEST, _WORST)]
    of_blocks, on_axes, seconds = rated[_LIKELY]
    compute = sum(block.seconds for block in of_blocks)
    assert step.workload.flops_per_row is not None, "a model of the user's own is not analysed here"
    flops = step.workload.flops_per_row * step.workload.rows
    rates = _efficiency(target)
    assumptions = [
        f"matmuls at {rates['compute'][0]:.0%} of the peak ({rates['compute'][2]:.0%} to {rates['compute'][1]:.0%}), "
        f"memory at {rates['memory'][0]:.0%} of its rate, links at {rates['link'][0]:.0%} of theirs",
    ]
    hidden = [axis for axis in _OVERLAP if any(one.axis == axis for one in sent)]
    if hidden:
        shown = ", ".join(f"{axis} behind {_OVERLAP[axis][0]:.0%} of the compute" for axis in hidden)
        assumptions.append(f"traffic hides: {shown}; the range covers all and none of it hidden")
    return StepTime(
        seconds=seconds,
        low_seconds=rated[_BEST][2],
        high_seconds=rated[_WORST][2],
        compute_seconds=compute,
        blocks=tuple(of_blocks),
        traffic=tuple(on_axes),
        bubble_fraction=step.bubble,
        bound=_bound(of_blocks, on_axes, compute, step.bubble),
        model_flops=flops,
        model_flops_utilization=flops / (seconds * peak * target.num_devices),
        assumptions=tuple(assumptions),
    )


def _rate(
    step: DeviceStep, blocks: Sequence[BlockWork], sent: Sequence[Sent], target: Target, which: int
) -> tuple[list[BlockTime], list[Traffic], float]:
    """Times of blocks, of traffic and of the step at one set of rates."""
    hardware, policy = target.hardware, step.config.precision.policy
    compute_rate, memory_rate, link_rate = (_efficiency(target)[name][which] for name in ("compute", "memory", "link"))
    # Under fp8 linear layers alone run in that format.
    peaks = {True: peak_rate(target, policy), False: peak_rate(target, "bf16" if policy == "fp8" else policy)}
    times = []
    for block in blocks:
        peak = peaks[block.linear]
        assert peak is not None, "no hardware has fp8 alone"
        compute = block.total_flops / (peak * compute_rate)
        memory = block.total_bytes / (hardware.memory_bandwidth * memory_rate)
        bound = "compute" if compute >= memory else "memory"
        times.append(BlockTime(block.name, block.total_flops, block.total_bytes, max(compute, memory), bound))
    stages = sum(time.seconds for time, block in zip(times, blocks, strict=True) if block.stage)
    rest = sum(time.seconds for time in times) - stages
    total = stages / (1 - step.bubble) + rest
    crossed = crossing(step.degrees, target)
    on_axes = []
    # What is left to hide behind shrinks with every axis that hides.
    room = stages + rest
    for one in sent:
        rate, link = hardware.link_bandwidth, "fast"
        if one.axis in crossed:
            shared = crossed[one.axis] if one.axis in _RINGS else 1
            rate, link = min(hardware.link_bandwidth, shared * hardware.network_bandwidth), "network"
        elif one.axis.startswith("host"):
            rate, link = hardware.host_bandwidth, "PCIe"
        seconds = one.bytes / (rate * link_rate) if rate else math.inf
        hidden = min(seconds, _OVERLAP.get(one.axis, (0.0, 0.0, 0.0))[which] * room)
        room -= hidden
        on_axes.append(Traffic(one.axis, one.bytes, seconds, seconds - hidden, link, one.kind))
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
