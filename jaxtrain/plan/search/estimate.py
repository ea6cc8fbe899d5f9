"""What a plan says: the records that the analytic model fills in and that tables, JSON and pages show."""

from dataclasses import dataclass, field

from jaxtrain.config.schema import Config
from jaxtrain.plan.catalogue.hardware import Target
from jaxtrain.plan.compilers.exact import ExactMemory
from jaxtrain.plan.cost.training import Cost
from jaxtrain.plan.memory.record import Memory
from jaxtrain.plan.time.record import StepTime
from jaxtrain.plan.workload.record import Workload


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
        unknown: what is not known of functions of the user's own, in a few words; None: all is estimated.
        fitted: the layout that was taken in place of the config's, and why, in a line; None: it is the config's.
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
    unknown: str | None = None
    fitted: str | None = None
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = field(default=())

    @property
    def peak_bytes(self) -> int:
        """Of one device, by the compiler where it was asked, else by the analytic model."""
        return self.memory.total_bytes if self.exact is None else self.exact.peak_bytes

    @property
    def room_bytes(self) -> int | None:
        """What one device has for a step; None where it is not known."""
        return (self.exact and self.exact.capacity_bytes) or self.memory.usable_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the peak has room; None where the capacity is not known."""
        if self.exact is None or self.memory.capacity_bytes is None:
            return self.memory.fits
        return self.peak_bytes <= (self.room_bytes or 0)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second over all devices; None for other rows or without a time."""
        return self.workload.tokens / self.time.seconds if self.time and self.workload.tokens else None

    @property
    def rows_per_second(self) -> float | None:
        """Rows a second over all devices."""
        return self.workload.rows / self.time.seconds if self.time else None
