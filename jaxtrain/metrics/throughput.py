"""Rates of a run, from times measured on the host: tokens per second, step time, wait for data and MFU."""

from collections.abc import Mapping
from statistics import median
from typing import Literal


class Meter:
    """Collects step times and computes rates from them for each logged row; it uses no clock and no device.

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

    def record(self, step: int, seconds: float, data_wait_seconds: float) -> None:
        """Add a step to the window: its wall time since the end of the previous one, and the wait for data in it."""
        self._step_seconds.append(seconds)
        self._data_wait_seconds.append(data_wait_seconds)

    def rates(self) -> dict[str, float | None]:
        """Rates over the window since the last `row`, by their names of metrics.jsonl; None where one is not known.

        `step_seconds` is a median, the others are means; the loop excludes evaluations and saves from both.
        """
        steps, seconds = len(self._step_seconds), sum(self._step_seconds)
        rate = steps / seconds if seconds > 0 else None
        utilization = None
        if rate is not None and self.flops_per_step is not None and self.peak_flops:
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
        loss: float,
        grad_norm: float,
        learning_rate: float | None,
        skipped_steps: int,
        device_memory_bytes: int | None,
        more: Mapping[str, float | int | None] | None = None,
    ) -> dict[str, float | int | None]:
        """Make the row of `metrics.jsonl` for a step, in the order in which it is written, and begin a new window.

        `step` and `skipped_steps` count those of all processes of the run; `grad_norm` is global, before clipping.
        """
        rates = self.rates()
        self._step_seconds.clear()
        self._data_wait_seconds.clear()
        return {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            self.unit: round(step * self.units_per_step),
            **rates,
            "device_memory_bytes": device_memory_bytes,
            "skipped_steps": skipped_steps,
            **(more or {}),
        }


def device_memory_bytes() -> int | None:
    """Return the peak memory of the first local device in bytes; None where the backend does not report it (CPU)."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")
