"""The whole step of a config, measured: its time, what the host does beside it, memory and energy."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.bench.power import measured_energy
from jaxtrain.config.schema import Config
from jaxtrain.data import prefetch
from jaxtrain.metrics.throughput import Meter, device_memory_bytes
from jaxtrain.plan.compilers.exact import batch_shapes
from jaxtrain.plan.workload.record import Workload
from jaxtrain.run.loop import Hooks, train_loop
from jaxtrain.train.assemble import build_step
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep

_MOST_STEPS, _LEAST_STEPS, _BUDGET_SECONDS = 50, 3, 10.0
_HOST_STEPS = 300


@dataclass(frozen=True)
class WholeStep:
    """What a step takes.

    Attributes:
        seconds: median of a step, the device waited for.
        num_steps: that were measured.
        compile_seconds: of tracing and compiling it.
        host_seconds: median of what the loop takes for a step beside the compiled program and the wait for data.
        data_wait_seconds: mean wait for a batch when steps take no time: a slower step than this never waits.
        planned_bytes: of one device, by the compiler: arguments, outputs that are no arguments, temporaries.
        device_peak_bytes: in use at most on the first device; None where the backend does not say.
        process_peak_bytes: resident memory of this process at most, compilers included.
        joules: of all local devices for one step.
        joules_reason: why they are not known.
    """

    seconds: float
    num_steps: int
    compile_seconds: float
    host_seconds: float
    data_wait_seconds: float
    planned_bytes: int | None
    device_peak_bytes: int | None
    process_peak_bytes: int
    joules: float | None
    joules_reason: str | None


def workload_step(config: Config, workload: Workload) -> TrainStep:
    """The train step of a config, for rows of the shapes that its workload has."""
    return build_step(
        config,
        input_shape=workload.input_shape,
        vocab_size=workload.vocab_size,
        num_outputs=workload.num_outputs,
    )


class RandomBatches:
    """Random rows of a workload's shapes, made anew for each step on the host."""

    def __init__(self, workload: Workload):
        self._spec = batch_shapes(workload)
        self._most = {"inputs": workload.vocab_size, "targets": workload.vocab_size or workload.num_outputs}

    def spec(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Global shapes of a batch."""
        return self._spec

    def load(
        self, k: int, shardings: Mapping[str, Any], *, check: Callable[[Mapping[str, Any]], None] | None = None
    ) -> dict[str, jax.Array]:
        """Batch k on the mesh; its ids are made to fit, so there is nothing to check."""
        generator = np.random.default_rng(k)

        def make(name: str, shape: jax.ShapeDtypeStruct) -> np.ndarray:
            if np.issubdtype(shape.dtype, np.integer):
                return generator.integers(0, self._most[name] or 2, shape.shape).astype(shape.dtype)
            return generator.standard_normal(shape.shape, np.float32)

        return {name: jax.device_put(make(name, shape), shardings[name]) for name, shape in self._spec.items()}


def measure_step(step: TrainStep, batches: Any, *, seed: int, most_steps: int = _MOST_STEPS) -> WholeStep:
    """Compile and run a step, then run the loop around a program that does nothing.

    Args:
        step: not compiled yet.
        batches: a `BatchSource`.
        seed: of the state.
        most_steps: to measure.
    """
    began = time.perf_counter()
    compiled = step.compile(batches.spec())
    compile_seconds = time.perf_counter() - began
    load = step.loader(batches)
    state, batch = step.init(seed), load(0)
    state, _ = jax.block_until_ready(step(state, batch))
    seconds: list[float] = []
    with measured_energy(jax.local_devices()) as energy:
        while len(seconds) < _LEAST_STEPS or (sum(seconds) < _BUDGET_SECONDS and len(seconds) < most_steps):
            began = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            seconds.append(time.perf_counter() - began)
    host, waited = host_seconds(step, load, state, compiled)
    memory = compiled.memory_analysis()
    planned = None
    if memory is not None:
        planned = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        planned -= memory.alias_size_in_bytes
    return WholeStep(
        seconds=statistics.median(seconds),
        num_steps=len(seconds),
        compile_seconds=compile_seconds,
        host_seconds=host,
        data_wait_seconds=waited,
        planned_bytes=planned,
        device_peak_bytes=device_memory_bytes(),
        process_peak_bytes=process_peak_bytes(),
        joules=None if energy.joules is None else energy.joules / len(seconds),
        joules_reason=energy.reason,
    )


def host_seconds(step: TrainStep, load: Any, state: TrainState, compiled: jax.stages.Compiled) -> tuple[float, float]:
    """Median seconds of the loop for a step that computes nothing, without the wait for data; and that wait's mean.

    The program has the arguments and results of the step's own, so that what is dispatched is the same; state passes
    through it untouched. The step runs its own program again afterwards.

    Args:
        step: compiled.
        load: from `step.loader`.
        state: donated.
        compiled: the step's program.
    """
    metrics = compiled.out_info[1]

    def nothing(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        # A sum of zero keeps every part of the batch an argument.
        zero = sum(jnp.sum(leaf.reshape(-1)[:1]) * 0 for leaf in jax.tree.leaves(batch))
        return state, jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype) + jnp.asarray(zero, out.dtype), metrics)

    whole = NamedSharding(step.mesh, PartitionSpec())
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), load(0))
    passing = jax.jit(nothing, donate_argnums=0, out_shardings=(step.state_shardings, whole))
    meter, rows = Meter("tokens", 1), []

    def finished(number: int, metrics: Any, seconds: float, waited: float) -> None:
        meter.record(number, seconds, waited)
        rows.append((seconds, waited))

    hooks = Hooks(lambda number: None, finished, lambda number: False, lambda number, state: None, lambda number: False)
    step.use(passing.lower(step.abstract_state, shapes).compile())
    loaded = prefetch(load, 0, _HOST_STEPS)
    try:
        train_loop(step, state, loaded, first=1, last=_HOST_STEPS, max_skipped_in_a_row=10, hooks=hooks)
    finally:
        loaded.close()
        step.use(compiled)
    return (
        statistics.median(max(seconds - waited, 0.0) for seconds, waited in rows[1:]),
        statistics.fmean(waited for _, waited in rows[1:]),
    )


def process_peak_bytes() -> int:
    """Resident memory of this process at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
