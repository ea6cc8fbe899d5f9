"""What is noted of each step that is done: its time, its row of metrics, the bar."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path

import jax

from jaxtrain.config.schema import ProfileConfig
from jaxtrain.data.rows import mean_tokens
from jaxtrain.errors import StorageError
from jaxtrain.metrics.flops import model_flops_per_row
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.throughput import Meter, device_memory_bytes
from jaxtrain.metrics.writers import Scalars, flat_scalars
from jaxtrain.models.model import LOW_RANK, parameter_shapes
from jaxtrain.optim.masks import trainable_predicate
from jaxtrain.run.record import RunRecord
from jaxtrain.runtime.devices import peak_flops
from jaxtrain.train.assemble import Run


class StepLog:
    """Measures every step and logs some of them."""

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
        """Take note of a step that is done."""
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


_PROFILED_STEPS = 3


class ProfileWindow:
    """Traces the steps that `profile` of the config asks for into `profile/` of the run directory."""

    def __init__(self, window: ProfileConfig, run_dir: Path, progress: Progress) -> None:
        self._window, self._folder, self._progress = window, run_dir / "profile", progress
        self._is_running = False

    def before_step(self, number: int) -> None:
        if number - 1 == self._window.start_step:
            jax.profiler.start_trace(str(self._folder))
            self._is_running = True

    def after_step(self, number: int) -> None:
        start = self._window.start_step
        if start is not None and number == start + _PROFILED_STEPS:
            self.stop()

    def stop(self) -> None:
        if self._is_running:
            self._is_running = False
            jax.profiler.stop_trace()
            self._progress.message(f"profile: {self._folder}")


def run_meter(run: Run, *, own_model: bool) -> Meter:
    """The meter of a run: what a step counts, and the FLOPs and the peak that utilization is computed from."""
    config, data = run.config, run.data
    peak = peak_flops(jax.devices()[0].device_kind, config.precision.policy)
    mean = mean_tokens(data.train) if data.unit == "tokens" else None
    return Meter(
        "tokens" if data.unit == "tokens" else "examples",
        (data.units_per_row if mean is None else mean) * config.train.global_batch_size,
        flops_per_step=None if own_model else step_flops(run),
        peak_flops=None if peak is None else peak * run.step.mesh.size,
    )


def step_flops(run: Run) -> float | None:
    """Model FLOPs of a step of the config's model; None where a size that it needs is not known."""
    config, data, model = run.config, run.data, run.step.model
    shapes, adapted, adapters = parameter_shapes(model), model.adapted, {}
    if adapted is None:
        is_trained = trainable_predicate(config.optimizer.freeze, list(shapes))
    else:
        is_trained, kernels = adapted.trains, parameter_shapes(adapted.original)
        # Elements of the two factors of an adapter, as a multiple of its kernel's.
        adapters = {
            path: sum(shapes[f"{path}/{name}"].size for name in LOW_RANK) / kernels[path].size
            for path in adapted.targets
        }
    flops = model_flops_per_row(
        config.model,
        sequence_length=data.input_shape[-1] if data.unit == "tokens" else None,
        input_shape=data.input_shape,
        num_outputs=data.num_outputs,
        vocab_size=data.vocab_size,
        decoder_length=data.decoder_length,
        trained=None if is_trained is None else [path for path in shapes if is_trained(path)],
        adapters=adapters,
    )
    # A pair of answers [2, L] is two texts.
    texts = math.prod(data.input_shape[:-1]) if data.unit == "tokens" else 1
    return None if flops is None else flops * texts * config.train.global_batch_size
