"""Predicted time of a step: blocks on the roofline, traffic of each mesh axis over its link, the pipeline's bubble.

No jax here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.plan.state import StateBytes, update_flops
from jaxtrain.plan.step import DeviceStep
from jaxtrain.plan.targets import Target
from jaxtrain.plan.traffic import Sent, crossing, traffic
from jaxtrain.plan.work import BlockWork, step_blocks
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
        model_flops_utilization: model FLOPs over the devices' dense peak in the run's format; None: no peak known.
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
    model_flops_utilization: float | None
    assumptions: tuple[str, ...]

    @property
    def bubble_seconds(self) -> float:
        """What a step idles in its pipeline: what neither the blocks nor exposed traffic takes."""
        rest = self.seconds - self.compute_seconds - sum(one.exposed_seconds for one in self.traffic)
        return max(rest, 0.0) if self.bubble_fraction and math.isfinite(rest) else 0.0


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
    # The update reads state and gradients and writes state, without what is frozen.
    # It has no backward pass, which a block counts twice.
    update = update_flops(step.config, step.stored, step.placed, step.degrees)
    blocks.append(BlockWork("optimizer", 1, update / 3, (2 * state.total + 2 * state.params - 4 * state.frozen) / 3))
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
        assumptions.append(f"traffic hides: {shown}; the range has all of it hidden, and none")
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
