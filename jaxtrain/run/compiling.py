"""The step of a run, traced and compiled: with its digests, and with what was chosen for it."""

import threading
from concurrent.futures import Future, wait
from typing import Any

import jax

from jaxtrain.config.model import published_from
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.runinfo import PACKAGES, package_versions
from jaxtrain.run.assemble import Run
from jaxtrain.run.code import step_code
from jaxtrain.runtime.compiler import record_choices
from jaxtrain.runtime.distributed import together
from jaxtrain.train.state import TrainState


class TracedStep:
    """The step of a run, traced for the shapes of its batches.

    Attributes:
        program: the trace.
        choices: what was chosen while it was traced, one line per operation.
        code: its digests, see `step_code`.
    """

    def __init__(self, run: Run, progress: Progress) -> None:
        with progress.phase("tracing") as phase, record_choices() as choices:
            self.program = run.step.trace(run.batches.spec())
            phase.note("; ".join(choices))
        self.choices = choices
        self.code = step_code(
            run.step,
            self.program,
            versions=str(package_versions((*PACKAGES, "equinox"))),
            draws_parameters=run.spec.params is None and published_from(run.config.model) is None,
        )


def compile_step(run: Run, traced: TracedStep, progress: Progress, created: Future[TrainState] | None = None) -> None:
    """Compile the step that was traced, and show whether the program came from the cache.

    Another thread may create the state (`created`) meanwhile. Of several processes, none continues before both are
    done, because collectives of the two threads could meet in another order in another process.
    """
    events: set[str] = set()
    this_thread = threading.get_ident()  # the other one compiles too

    def listen(event: str, **_: Any) -> None:
        if threading.get_ident() == this_thread:
            events.add(event.removeprefix("/jax/compilation_cache/"))

    def compile_here() -> None:
        try:
            with progress.phase("compiling") as phase:
                run.step.use(traced.program.lower().compile(), choices=traced.choices)
                if "cache_hits" in events and "cache_misses" not in events:
                    phase.note("from cache")
                elif run.config.compilation_cache is not None:
                    phase.note("cached next time")
        finally:
            if created is not None and jax.process_count() > 1:
                wait([created])

    jax.monitoring.register_event_listener(listen)
    try:
        together(compile_here)
    finally:
        jax.monitoring.unregister_event_listener(listen)
