"""Measurements of the complete step of a config: its time, the time of the host besides it, and memory."""

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

from jaxtrain.config.data import CalledData
from jaxtrain.config.schema import Config
from jaxtrain.data import prefetch
from jaxtrain.data.configured import open_run_data, training_batches
from jaxtrain.metrics.throughput import Meter, StepClock, device_memory_bytes
from jaxtrain.plan.compile import batch_shapes
from jaxtrain.plan.workload import Workload
from jaxtrain.train.batch import BatchSource
from jaxtrain.train.build import build_step
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import TrainStep

_MOST_STEPS, _LEAST_STEPS, _HOST_STEPS = 50, 3, 300


@dataclass(frozen=True)
class WholeStep:
    """Time and memory of a step.

    Attributes:
        seconds: median time of a step, including the wait for the device.
        num_steps: number of steps that were measured.
        compile_seconds: time of tracing and compiling the step.
        host_seconds: median time of the loop per step besides the compiled program and the wait for data.
        data_wait_seconds: mean wait for a batch where steps take no time; a step that takes longer never waits.
        planned_bytes: memory of one device by the compiler: arguments, outputs that do not reuse the memory of
            arguments, and temporaries; None where the backend does not report it.
        device_peak_bytes: peak memory of the first device since the process began; None where the backend does not
            report it.
        process_peak_bytes: peak resident memory of this process since it began, compilers included.
    """

    seconds: float
    num_steps: int
    compile_seconds: float
    host_seconds: float
    data_wait_seconds: float
    planned_bytes: int | None
    device_peak_bytes: int | None
    process_peak_bytes: int


def workload_step(config: Config, workload: Workload) -> tuple[TrainStep, BatchSource]:
    """The train step of a config, and rows for it: random ones of the workload's shapes, or those of `data.call`."""
    step = build_step(
        config,
        input_shape=workload.input_shape,
        vocab_size=workload.vocab_size,
        num_outputs=workload.num_outputs,
    )
    if isinstance(config.data, CalledData):
        return step, training_batches(config, open_run_data(config))
    return step, RandomBatches(workload)


class RandomBatches:
    """Random rows in the shapes of a workload, drawn on the host for each step."""

    def __init__(self, workload: Workload):
        self._spec = batch_shapes(workload)
        # Ids of the vocabulary; numbers of documents are all 1, so that nothing is padding.
        ids = dict.fromkeys(("inputs", "tokens", "decoder_tokens"), workload.vocab_size)
        self._most = {**ids, "targets": workload.num_outputs or workload.vocab_size}

    def spec(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The global shapes of a batch."""
        return self._spec

    def load(
        self,
        k: int,
        shardings: Mapping[str, jax.sharding.Sharding],
        *,
        check: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> dict[str, jax.Array]:
        """Put batch k, which seeds its rows, on the mesh; there is nothing to check."""
        generator = np.random.default_rng(k)

        def make(name: str, shape: Any) -> Any:
            if isinstance(shape, Mapping):
                return {inner: make(inner, one) for inner, one in shape.items()}
            if name.endswith(("segments", "weights")):
                return np.ones(shape.shape, shape.dtype)
            if np.issubdtype(shape.dtype, np.integer):
                return generator.integers(0, self._most.get(name) or 2, shape.shape).astype(shape.dtype)
            return generator.standard_normal(shape.shape, np.float32)

        return {name: jax.device_put(make(name, shape), shardings[name]) for name, shape in self._spec.items()}


def measure_step(step: TrainStep, batches: BatchSource, *, seed: int, budget_seconds: float) -> WholeStep:
    """Compile and run a step, then run the loop with a program that computes nothing.

    Args:
        step: the step, not compiled yet.
        batches: the source of batches.
        seed: of the state.
        budget_seconds: after so long no further step is timed.
    """
    began = time.perf_counter()
    compiled = step.compile(batches.spec())
    compile_seconds = time.perf_counter() - began
    load = step.loader(batches)
    state, batch = step.init(seed), load(0)
    state, _ = jax.block_until_ready(step(state, batch))
    seconds: list[float] = []
    while len(seconds) < _LEAST_STEPS or (sum(seconds) < budget_seconds and len(seconds) < _MOST_STEPS):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        seconds.append(time.perf_counter() - began)
    host, waited = _host_seconds(step, load, state, compiled, budget_seconds)
    memory = compiled.memory_analysis()
    planned = None
    if memory is not None:
        planned = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        planned -= memory.alias_size_in_bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return WholeStep(
        seconds=statistics.median(seconds),
        num_steps=len(seconds),
        compile_seconds=compile_seconds,
        host_seconds=host,
        data_wait_seconds=waited,
        planned_bytes=planned,
        device_peak_bytes=device_memory_bytes(),
        process_peak_bytes=peak if sys.platform == "darwin" else peak * 1024,
    )


def _host_seconds(
    step: TrainStep,
    load: Callable[[int], dict[str, jax.Array]],
    state: TrainState,
    compiled: jax.stages.Compiled,
    budget_seconds: float,
) -> tuple[float, float]:
    """The median seconds per step of the loop around a step that computes nothing, and its mean wait for data.

    The program has the arguments and results of the step's own program, so that the same arrays are dispatched; it
    returns the state unchanged. Afterwards the step uses its own program again. The state is donated.
    """
    metrics = compiled.out_info[1]

    def nothing(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Any]:
        # A sum of zero keeps every part of the batch an argument.
        zero = sum(jnp.sum(leaf.reshape(-1)[:1]) * 0 for leaf in jax.tree.leaves(batch))
        return state, jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype) + jnp.asarray(zero, out.dtype), metrics)

    replicated = NamedSharding(step.mesh, PartitionSpec())
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), load(0))
    passing = jax.jit(nothing, donate_argnums=0, out_shardings=(step.state_shardings, replicated))
    meter, rows, clock = Meter("tokens", 1), [], StepClock()
    step.use(passing.lower(step.abstract_state, shapes).compile())
    loaded, began = prefetch(load, 0, _HOST_STEPS), time.perf_counter()
    try:
        pending: tuple[Any, float] | None = None  # as the loop of a run: step k is read once step k + 1 is dispatched
        for _ in range(_HOST_STEPS):
            asked = time.perf_counter()
            batch = next(loaded)
            waited = time.perf_counter() - asked
            if pending is None:
                clock.begin()
            state, metrics = step(state, batch)
            if pending is not None:
                int(pending[0]["skipped_in_a_row"])
                rows.append((clock.done(pending[1], waited), pending[1]))
                meter.record(*rows[-1], values={"loss": pending[0]["loss"].item()})
            pending = metrics, waited
            # Rows of images take longer to draw than a step.
            if len(rows) > _LEAST_STEPS and time.perf_counter() - began > budget_seconds:
                break
    finally:
        loaded.close()
        step.use(compiled)
    return (
        statistics.median(max(seconds - waited, 0.0) for seconds, waited in rows[1:]),
        statistics.fmean(waited for _, waited in rows[1:]),
    )
