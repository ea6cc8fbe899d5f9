"""The lines that a run shows: before it compiles, of bad steps, and at its end."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxtrain.config.schema import SpikeRule
from jaxtrain.errors import DivergedError
from jaxtrain.layout.mesh import mesh_notes
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.writers import Scalars
from jaxtrain.plan.compile import state_bytes
from jaxtrain.run.assemble import Run
from jaxtrain.run.start import trained_leaves
from jaxtrain.runtime.compiler import cache_folder, option_notes
from jaxtrain.runtime.devices import describe_devices, unused_accelerator
from jaxtrain.weights.base import without_base

# After so many lines on bad steps of one process, the counts of skipped steps in the metrics must do.
_MAX_BAD_STEPS = 10


def shown_metrics(metrics: Mapping[str, float | int | None]) -> list[str]:
    """Return metrics as people read them: `eval loss 1.234`."""
    return [f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items() if value is not None]


def first_lines(run: Run, notes: Sequence[str], *, units: str) -> list[str]:
    """Return what is shown before a run compiles: model, data, devices and what was chosen for it."""
    config = run.config
    step = run.step
    count = format_count(run.num_parameters)
    title = f"{run.spec.loaded.name}: {step.model.name}, {count} parameters, {config.train.steps:,} steps of {units}"
    if config.train.accumulation_steps > 1:
        title += f" in {config.train.accumulation_steps} microbatches"
    lines = [title]
    trains = trained_leaves(step)
    if trains is not None:
        trained = without_base(step.abstract_state, trains).params
        count = sum(leaf.size for leaf in jax.tree.leaves(trained))
        lines.append(f"adapters: {count:,} parameters are trained; checkpoints hold only these")
    for line in run.data.description:
        lines.append(f"data: {line}")
    lines.append(_devices_line(run))
    lines.append(f"compiled programs: {cache_folder(config.compilation_cache) or 'not kept'}")
    lines.append(f"run directory: {run.spec.run_dir}")
    lines += mesh_notes(step.mesh)
    lines += option_notes(step.compiler_options, asked=config.compiler_options)
    lines += notes
    unused = unused_accelerator(jax.devices()[0].platform)
    if unused:
        lines.append(unused)
    return lines


def _devices_line(run: Run) -> str:
    step = run.step
    device_bytes, host_bytes = state_bytes(step)
    degrees = [f"{axis}={size}" for axis, size in step.mesh.shape.items() if size > 1]
    mesh = " ".join(degrees) or "one device"
    policy = run.config.precision.policy
    line = f"devices: {describe_devices()} ({mesh}), {policy}, state {format_bytes(device_bytes)} per device"
    if host_bytes:
        line += f", {format_bytes(host_bytes)} on the host"
    return line


class BadSteps:
    """Reports which steps were skipped, by their metrics."""

    def __init__(self, spikes: SpikeRule | None, progress: Progress) -> None:
        self._spikes = spikes
        self._progress = progress
        self._num_shown = 0

    def note(self, number: int, metrics: Mapping[str, jax.Array]) -> None:
        """Report a step that is done, if it was skipped."""
        spikes = self._spikes
        if spikes is not None and bool(metrics["spiked"]):
            cause = f"is a spike, more than {spikes.sigmas:g} deviations above the last {spikes.window} steps"
        elif int(metrics["skipped_in_a_row"]) and not _has_no_weight(metrics):
            cause = "is not finite"
        else:
            return
        if self._num_shown == _MAX_BAD_STEPS:
            return
        self._num_shown += 1
        numbers = shown_metrics({"loss": float(metrics["loss"]), "gradient_norm": float(metrics["grad_norm"])})
        self._progress.message(f"step {number} {cause}: {', '.join(numbers)}; batch {number - 1} is skipped")


def _has_no_weight(metrics: Mapping[str, jax.Array]) -> bool:
    """Return whether a batch had no weight, which is skipped without a fault."""
    return float(metrics["weight"]) == 0 and float(metrics["grad_norm"]) == 0


def diverged(skipped_in_a_row: int, number: int, metrics: Mapping[str, Any]) -> DivergedError:
    """Return the error of too many skipped steps in a row, up to step `number`."""
    cause = "gradients were not finite"
    remedy = "add warmup_steps, or use precision.policy=bf16 or fp32"
    if "spiked" in metrics and int(metrics["spiked"]):
        cause = "loss or gradient norm were spikes (or not finite)"
        remedy = "raise spikes.sigmas, or set spikes=null"
    return DivergedError(
        f"{cause} {skipped_in_a_row} steps in a row, up to step {number}; parameters are as before them: lower "
        f"optimizer.learning_rate, {remedy}"
    )


def last_lines(run: Run, step: int, metrics: Scalars, *, sample: str | None, stopped: str | None) -> list[str]:
    """Return what is shown at the end of a run: its sample, last evaluation, why it stopped early, its report."""
    lines = []
    if sample:
        lines.append(f"sample: {sample}")
    evaluated = {name: value for name, value in metrics.items() if name.startswith("eval_")}
    lines.append(", ".join([f"done: step {step}", *shown_metrics(evaluated)]))
    if stopped is not None:
        lines.append(stopped)
    if run.config.logging.report:
        lines.append(f"report: {run.spec.run_dir / 'report.html'}")
    return lines
