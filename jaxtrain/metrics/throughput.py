"""Rates of a run (tokens per second, step time, wait for data, MFU) and where its wall time goes, by host times."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import fmean, median
from typing import Literal, get_args


class Meter:
    """Collects the steps of a logged row, and computes rates and means of them; it uses no clock and no device.

    `units_per_step` are tokens or examples in a global batch (of padded rows, a mean without padding), `flops_per_step`
    those of its forward and backward pass, `peak_flops` the dense peak of all devices together; None: not known.
    """

    def __init__(
        self,
        unit: Literal["tokens", "examples"],
        units_per_step: float,
        *,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
    ):
        self.unit = unit
        self.units_per_step = units_per_step
        self.flops_per_step = flops_per_step
        self.peak_flops = peak_flops
        self._step_seconds: list[float] = []
        self._data_wait_seconds: list[float] = []
        self._values: dict[str, list[float]] = {}

    def record(self, seconds: float, data_wait_seconds: float, values: Mapping[str, float]) -> None:
        """Add a step to the window.

        Args:
            seconds: wall time since the end of the previous step.
            data_wait_seconds: the wait for data in it.
            values: name -> number; a row has the means.
        """
        self._step_seconds.append(seconds)
        self._data_wait_seconds.append(data_wait_seconds)
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def rates(self) -> dict[str, float | None]:
        """Rates over the window since the last `row`, by their names of metrics.jsonl; None where one is not known.

        `step_seconds` is a median, the others are means; the loop excludes evaluations and saves from both.
        """
        steps = len(self._step_seconds)
        seconds = sum(self._step_seconds)
        rate = steps / seconds if seconds > 0 else None
        utilization = None
        if rate and self.flops_per_step and self.peak_flops:
            utilization = self.flops_per_step * rate / self.peak_flops
        return {
            f"{self.unit}_per_second": None if rate is None else self.units_per_step * rate,
            "step_seconds": median(self._step_seconds) if steps else None,
            "data_wait_seconds": sum(self._data_wait_seconds) / steps if steps else None,
            "model_flops_utilization": utilization,
        }

    def row(
        self,
        step: int,
        *,
        grad_norm: float,
        learning_rate: float | None,
        skipped_steps: int,
        device_memory_bytes: int | None,
        more: Mapping[str, float | int | None] | None = None,
    ) -> dict[str, float | int | None]:
        """Make the row of `metrics.jsonl` for a step, in the order in which it is written, and begin a new window.

        The loss and the other recorded values are means over the steps of the window where they were finite.
        `step` and `skipped_steps` count those of all processes of the run; `grad_norm` is global, before clipping.
        """
        rates = self.rates()
        means = {name: _finite_mean(values) for name, values in self._values.items()}
        self._step_seconds.clear()
        self._data_wait_seconds.clear()
        self._values.clear()
        return {
            "step": step,
            "loss": means.pop("loss"),
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            self.unit: round(step * self.units_per_step),
            **rates,
            "device_memory_bytes": device_memory_bytes,
            "skipped_steps": skipped_steps,
            **(more or {}),
            **means,
        }


def _finite_mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values, or the last value where none is finite."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else values[-1]


class StepClock:
    """Seconds of each step: its own wait for data and its own work, without the pauses between the steps."""

    def __init__(self) -> None:
        self._end = 0.0

    def begin(self) -> None:
        """Begin to measure the work of a step, with no other step under way."""
        self._end = time.perf_counter()

    def done(self, waited: float, next_wait: float) -> float:
        """Return the seconds of the step that has just finished.

        Args:
            waited: seconds that this step waited for its batch.
            next_wait: seconds that the next step, which is under way, has waited for its batch meanwhile.
        """
        now = time.perf_counter()
        seconds = now - self._end - next_wait + waited
        self._end = now
        return seconds


Part = Literal[
    "reading data", "compiling", "creating state", "steps", "waiting for data", "evaluation", "saving", "sampling"
]
PARTS: tuple[str, ...] = get_args(Part)
OTHER = "other"


class TimeSpent:
    """Adds up the seconds of each part of a run; `during` marks a block as a part for others, such as the watchdog."""

    def __init__(self, *, during: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        self._during = during
        self._began = time.monotonic()
        self._earlier: Mapping[str, float] = {}
        self._own = dict.fromkeys(PARTS, 0.0)

    def after(self, earlier: Mapping[str, float]) -> None:
        """Take note of the seconds of the processes before this one."""
        self._earlier = dict(earlier)

    def add(self, part: Part, seconds: float) -> None:
        """Add seconds of this process to a part."""
        self._own[part] += seconds

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Add the time of a block to a part, also where the block raises."""
        begin = time.monotonic()
        try:
            with self._during(part):
                yield
        finally:
            self._own[part] += time.monotonic() - begin

    def seconds(self) -> dict[str, float]:
        """Return part -> seconds so far, of all processes; `other` is what no part explains, so that all add up."""
        wall = time.monotonic() - self._began
        own = {**self._own, OTHER: max(0.0, wall - sum(self._own.values()))}
        return {part: round(seconds + self._earlier.get(part, 0.0), 3) for part, seconds in own.items()}


def device_memory_bytes() -> int | None:
    """Return the peak memory of the first local device in bytes; None where the backend does not report it (CPU)."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")
