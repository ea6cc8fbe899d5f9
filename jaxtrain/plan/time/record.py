"""Seconds of a step, by what takes them. No jax here."""

from dataclasses import dataclass


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
