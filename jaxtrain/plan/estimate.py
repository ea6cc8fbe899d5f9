"""What a plan says: the records that the analytic model fills in and that tables, JSON and pages show."""

from dataclasses import dataclass, field

from jaxtrain.config.schema import Config
from jaxtrain.plan.cost import Cost
from jaxtrain.plan.exact import ExactMemory
from jaxtrain.plan.hardware import Target
from jaxtrain.plan.workload import Workload


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
    """

    parts: dict[str, int]
    state_bytes: int
    capacity_bytes: int | None
    reserved_bytes: int = 0
    host_parts: dict[str, int] = field(default_factory=dict)

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
        return None if self.usable_bytes is None else self.total_bytes <= self.usable_bytes


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
        low_seconds, high_seconds: its range: with all traffic hidden at the best seen efficiency, and with none hidden
            at the worst.
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


@dataclass(frozen=True)
class Estimate:
    """A config on a target.

    Attributes:
        config: the run, its degrees as numbers.
        target: hardware and count.
        degrees: mesh axis -> degree.
        workload: rows of a step.
        num_parameters: of the model.
        memory: analytic.
        time: None where no peak of the hardware is known for the run's number format.
        cost: of the whole run; None without a time.
        exact: memory by the target's own compiler; None: not compiled.
        exact_missing: why there is none, in a line; None where there is one or none was asked for.
        notes: assumptions and warnings for people.
        advice: changes that make it fit, where it does not.
    """

    config: Config
    target: Target
    degrees: dict[str, int]
    workload: Workload
    num_parameters: int
    memory: Memory
    time: StepTime | None
    cost: Cost | None
    exact: ExactMemory | None = None
    exact_missing: str | None = None
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool | None:
        """By the compiler where it was asked, else by the analytic model; None where the capacity is not known."""
        if self.exact is None or self.memory.capacity_bytes is None:
            return self.memory.fits
        return self.exact.peak_bytes <= (self.exact.capacity_bytes or self.memory.usable_bytes or 0)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second over all devices; None for other rows or without a time."""
        return self.workload.tokens / self.time.seconds if self.time and self.workload.tokens else None

    @property
    def rows_per_second(self) -> float | None:
        """Rows a second over all devices."""
        return self.workload.rows / self.time.seconds if self.time else None
