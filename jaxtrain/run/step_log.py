"""What is noted of each step that is done: its time, its row of metrics, the bar."""

import contextlib
from collections.abc import Mapping

import jax

from jaxtrain.data.rows import mean_tokens
from jaxtrain.errors import StorageError
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.throughput import Meter, device_memory_bytes
from jaxtrain.metrics.writers import Scalars, flat_scalars
from jaxtrain.run.flops import step_flops
from jaxtrain.run.record import RunRecord
from jaxtrain.runtime.devices import peak_flops
from jaxtrain.train.assemble import Run


class StepLog:
    """Measures every step and logs some of them.

    Args:
        run: what is trained.
        meter: collects the times.
        record: receives the rows.
        progress: what people see.
        start: steps done before this process.
        row: the last logged row, from before this process where no step will give one.
    """

    def __init__(
        self, run: Run, *, meter: Meter, record: RunRecord, progress: Progress, start: int, row: Scalars
    ) -> None:
        self._meter, self._record, self._progress = meter, record, progress
        self._every = run.config.logging.every
        self._always = (start + 1, run.config.train.steps)
        self._skipped = run.data.skipped
        self._unlogged: tuple[int, Mapping[str, jax.Array]] | None = None
        self.row: Scalars = row

    def note(self, number: int, metrics: Mapping[str, jax.Array], seconds: float, waited: float) -> None:
        """Take note of a step that is done.

        Args:
            number: of the step, counted from 1.
            metrics: on the device; read only if the step is logged.
            seconds: wall time of the step.
            waited: seconds of it that the loop waited for a batch.
        """
        self._meter.record(number, seconds, waited)
        self._record.spent.add("steps", seconds - waited)
        self._record.spent.add("waiting for data", waited)
        if number % self._every == 0 or number in self._always:
            self._log(number, metrics)
        else:
            self._unlogged = number, metrics
            self._progress.update(number, {})

    def end(self) -> None:
        """Log the last step where it was not: a run that stops early did not know before that it was the last."""
        unlogged, self._unlogged = self._unlogged, None
        if unlogged is not None:
            # A device that failed gives nothing, a full disk takes nothing, and what ends the run says that it did.
            with contextlib.suppress(jax.errors.JaxRuntimeError, StorageError):
                self._log(*unlogged)

    def go_back(self) -> None:
        """Forget the last step, which the run went back before."""
        self._unlogged = None

    def _log(self, number: int, metrics: Mapping[str, jax.Array]) -> None:
        self._unlogged = None
        values = flat_scalars(jax.device_get(dict(metrics)))
        standard = {name: values.pop(name) for name in ("loss", "grad_norm", "skipped_steps")}
        standard["learning_rate"] = values.pop("learning_rate", None)  # not known of an optimizer from Python
        for name in ("weight", "skipped_in_a_row", "spiked"):
            values.pop(name, None)
        if self._skipped:
            values["skipped_records"] = sum(source.count for source in self._skipped)
        self.row = self._meter.row(number, **standard, device_memory_bytes=device_memory_bytes(), more=values)
        self._record.scalars(number, self.row)
        self._progress.update(number, self.row)


def run_meter(run: Run, *, own_model: bool) -> Meter:
    """The meter of a run: what a step counts, and the FLOPs and the peak that utilization is computed from.

    Args:
        run: what is trained.
        own_model: the model came from Python, so that the config's count of FLOPs is not of it.
    """
    config, data = run.config, run.data
    peak = peak_flops(jax.devices()[0].device_kind, config.precision.policy)
    mean = mean_tokens(data.train) if data.unit == "tokens" else None
    tokens = None if mean is None else mean * config.train.global_batch_size
    places = data.units_per_row * config.train.global_batch_size
    return Meter(
        "tokens" if data.unit == "tokens" else "examples",
        places if tokens is None else tokens,
        flops_per_step=None if own_model else step_flops(run),
        peak_flops=None if peak is None else peak * run.step.mesh.size,
    )
