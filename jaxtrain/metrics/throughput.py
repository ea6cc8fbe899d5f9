"""Rates of a run from times measured on the host: tokens a second, step time, data wait and MFU."""

from collections.abc import Mapping
from statistics import median
from typing import Literal


class Meter:
    """Collects step times and turns them, once a logged row, into rates. Plain arithmetic: no clock, no device.

    Args:
        unit: what is counted: tokens (language models) or examples.
        units_per_step: tokens or examples in a global batch.
        flops_per_step: floating-point operations of one forward and backward pass of a global batch
            (`model_flops_per_row` times rows); None when unknown.
        peak_flops: dense peak of *all* devices together in FLOP/s (`peaks.peak_flops` times devices); None when
            unknown.
    """

    def __init__(
        self,
        unit: Literal["tokens", "examples"],
        units_per_step: int,
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
        """Adds one step to the window.

        Args:
            step: number of the step, counted from 1; it only names the row.
            seconds: wall time from the end of the step before to the end of this one.
            data_wait_seconds: the part of it in which the loop waited for a batch.
        """
        self._step_seconds.append(seconds)
        self._data_wait_seconds.append(data_wait_seconds)

    def rates(self) -> dict[str, float | None]:
        """Rates over the window since the last `row`; None where nothing was recorded or the peak is unknown.

        `step_seconds` is a median, so that one slow step does not hide the usual pace; tokens a second and model FLOPs
        utilization are over the whole time of the window. The loop leaves evaluations and saves out of both; the
        `wall_seconds` of run.json hold them.
        """
        steps, seconds = len(self._step_seconds), sum(self._step_seconds)
        steps_per_second = steps / seconds if seconds > 0 else None
        utilization = None
        if steps_per_second is not None and self.flops_per_step is not None and self.peak_flops:
            utilization = self.flops_per_step * steps_per_second / self.peak_flops
        return {
            f"{self.unit}_per_second": None if steps_per_second is None else self.units_per_step * steps_per_second,
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
        learning_rate: float,
        skipped_steps: int,
        device_memory_bytes: int | None,
        more: Mapping[str, float | int | None] | None = None,
    ) -> dict[str, float | int | None]:
        """The row of `metrics.jsonl` for `step`; starts a new window.

        Args:
            step: steps done in all, over every process that worked on this run; tokens follow from it.
            loss: as a float, like `grad_norm` (global norm before clipping) and `learning_rate`.
            grad_norm: see `loss`.
            learning_rate: see `loss`.
            skipped_steps: non-finite steps so far.
            device_memory_bytes: `device_memory_bytes()`.
            more: metrics of the task, appended.

        Returns:
            Keys in the order of the design page.
        """
        values = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            self.unit: step * self.units_per_step,
            **self.rates(),
            "device_memory_bytes": device_memory_bytes,
            "skipped_steps": skipped_steps,
            **(more or {}),
        }
        self._step_seconds.clear()
        self._data_wait_seconds.clear()
        return values


def device_memory_bytes() -> int | None:
    """Peak memory in use on the first local device, in bytes; None where the backend gives none (CPU)."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")
