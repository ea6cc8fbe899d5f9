"""From a config to a session: data read, step compiled, state created or restored, files opened, in that order."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.mirror import mirror_folder
from jaxtrain.config import Loaded
from jaxtrain.config.kinds import check_kinds, check_roll_back
from jaxtrain.data.stream import BatchStream
from jaxtrain.errors import ConfigError, DivergedError, PreemptedError
from jaxtrain.interop.fresh import check_fits, fresh_notes
from jaxtrain.layout.mesh import make_mesh, mesh_notes
from jaxtrain.layout.rules import config_degrees
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.metrics.progress import Phase, Progress
from jaxtrain.metrics.time_spent import TimeSpent
from jaxtrain.run.callbacks import Given, Watch, sorted_callbacks
from jaxtrain.run.directory import set_aside
from jaxtrain.run.evaluation import Evaluator, to_hold_out
from jaxtrain.run.import_run import check_class_order
from jaxtrain.run.interrupt import Interrupt
from jaxtrain.run.record import RunRecord, StepLog, run_meter
from jaxtrain.run.reference import first_reference, resumed_reference
from jaxtrain.run.restore import describe_start, keep_base, resumed_state, saved_form, start_of, trained_leaves
from jaxtrain.run.resume import (
    RECORD,
    check_resumed,
    choose_start,
    finished_row,
    flat,
    own_parts,
    run_metadata,
)
from jaxtrain.run.saving import RunSaves, begin_folder, take_folder
from jaxtrain.run.session import Session
from jaxtrain.run.watchdog import Activity
from jaxtrain.runtime.agreement import Facts, together
from jaxtrain.runtime.compiler import Taken, cache_folder, compile_lowered, option_notes, record_choices
from jaxtrain.runtime.devices import describe_devices, unused_accelerator
from jaxtrain.runtime.distributed import is_main_process
from jaxtrain.train.assemble import OwnStep, Run, assemble, open_run_data
from jaxtrain.train.base import BaseRecord, without_base
from jaxtrain.train.state import TrainState

_STATUS: dict[type[BaseException], str] = {
    PreemptedError: "preempted",
    DivergedError: "diverged",
    KeyboardInterrupt: "stopped",
}


@contextlib.contextmanager
def closing_on_failure(close: Callable[[str], None]) -> Iterator[None]:
    """Close with the status of what went wrong (preempted, diverged, stopped or failed), and raise that."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):
            close(_STATUS.get(type(error), "failed"))
        raise


def prepare_session(
    loaded: Loaded,
    run_dir: Path,
    given: Given,
    *,
    progress: Progress,
    interrupt: Interrupt,
    activity: Activity,
) -> Session:
    """Make every part of a run; what was opened is closed again where a later part cannot be made."""
    spent, main = TimeSpent(during=activity.during), is_main_process()
    with spent.measure("reading data"):
        run = together(lambda: _assembled(loaded, given, progress), says=_facts)
    interrupt.check()
    keep = run.config.checkpoint
    folder, owner = take_folder(keep, run_dir, name=run.name, resume=given.resume, main=main, report=progress.message)
    checkpointer = Checkpointer(
        folder,
        keep_last=keep.keep_last,
        keep_every=keep.keep_every,
        keep_best=keep.keep_best,
        mirror=mirror_folder(keep.mirror, run_dir),
        report=progress.message,
    )
    with closing_on_failure(lambda status: checkpointer.close()):
        resumed = choose_start(checkpointer, run_dir, given.resume)
        metadata, notes = _described_start(run, given, run_dir, checkpointer, resumed)
        meter = run_meter(run, own_model=given.model is not None)
        notes = [*loaded.notes, *notes]
        for line in _banner(run, run_dir, notes, units=f"{meter.units_per_step:,.0f} {run.data.unit}"):
            progress.message(line)
        if run.awaits_reference and resumed is not None:
            metadata["reference"] = checkpointer.metadata().get("reference")
            run = resumed_reference(run, run_dir, metadata["reference"])
        state, base = _compiled_state(
            run, run_dir, given.own_step, None if resumed is None else checkpointer, progress, spent
        )
        interrupt.check()
        start = 0 if resumed is None else int(state.step)
        activity.begins_at(start)
        saved = {} if resumed is None else checkpointer.metadata(start)
        metadata["base"] = None if base is None else base.as_json()
        metadata |= {key: saved[key] for key in (RECORD,) if key in saved}
        watch = Watch(run, run_dir, sorted_callbacks(given.callbacks)[0], start=start)
        has_ended = start >= run.config.train.steps or watch.status is not None
        if resumed is None:
            if main:
                # Only once the step runs: a mistake that shows in compiling leaves an earlier run as it was.
                if (previous := set_aside(run_dir)) is not None:
                    progress.message(f"what an earlier run left here was moved to {previous}")
                begin_folder(checkpointer.directory, keep, run_dir, progress.message)
            checkpointer.begin_anew()
            keep_base(base, run, state, run_dir)
            if run.awaits_reference:
                with spent.measure("evaluation"):
                    run, metadata["reference"] = first_reference(run, state, run_dir, progress, main=main)
        # Where no step will give a row, it is read before run.json is begun again.
        row = finished_row(run_dir) if has_ended else {}
        record = RunRecord(run_dir, spent, report=progress.message)
        record.open(loaded, run, metadata, start=start, has_ended=has_ended)
        metadata["run"], watch.log = record.kept, record.log
        return Session(
            run=run,
            run_dir=run_dir,
            start=start,
            state=state,
            metadata=metadata,
            checkpointer=checkpointer,
            saves=RunSaves(checkpointer, run_dir, keep, report=progress.message, owner=owner),
            record=record,
            steps=StepLog(run, meter=meter, record=record, progress=progress, start=start, row=row),
            evaluator=Evaluator(run.step),
            watch=watch,
            progress=progress,
            interrupt=interrupt,
            activity=activity,
        )


def _assembled(loaded: Loaded, given: Given, progress: Progress) -> Run:
    """Read the data and build the step; degrees and kinds that do not fit fail before any data is read."""
    config, data = loaded.config, given.data
    check_roll_back(config.spikes, config.checkpoint)
    if given.own_step.mesh is None:
        make_mesh(**config_degrees(config.parallel), devices=None)
    if given.model is None and data is None:
        check_kinds(config, own_task=given.task is not None)
    with progress.phase("reading data") as phase:
        opened = data if data is not None else open_run_data(config)
        phase.note(opened.description[0] if opened.description else "")
    if config.evaluation.early_stopping is not None and opened.validation is None:
        raise ConfigError(
            f"evaluation.early_stopping needs held-out rows, and the data has none; {to_hold_out(config)}"
        )
    if config.spikes is not None and config.spikes.action == "roll_back" and isinstance(opened.train, BatchStream):
        raise ConfigError(
            "spikes.action=roll_back reads batches by their number, and an iterable has none; give a dataset with "
            "__len__ and __getitem__, or set spikes.action=skip"
        )
    return assemble(config, opened, name=loaded.name, model=given.model, task=given.task, own=given.own_step)


def _facts(run: Run) -> Facts:
    """What all processes must have alike: the rows of each batch, and the options that each compiler accepts."""
    options = {**run.step.compiler_options.used, **run.step.compiler_options.tried}
    named = {f"data ({name})": value for name, value in flat(run.stream).items()}
    named |= {f"compiler option {name}": value for name, value in options.items()}
    return {name: (str(value), "") for name, value in named.items()}


def _described_start(
    run: Run, given: Given, run_dir: Path, checkpointer: Checkpointer, resumed: int | None
) -> tuple[dict[str, Any], list[str]]:
    """The metadata of the run's checkpoints, and what people are told of where it starts."""
    state = run.step.abstract_state
    optimizer_state = None if given.own_step.optimizer is None else state.optimizer_state
    own = own_parts(model=given.model, task=given.task, data=given.data, optimizer_state=optimizer_state)
    metadata = run_metadata(run, own)
    if resumed is None:
        if given.model is not None:
            return metadata, []
        check_fits(run.config.model)
        if given.own_step.params is None and not given.own_step.skip:
            check_class_order(run.config, (run.data.reading or {}).get("classes"))
        return metadata, fresh_notes(run.config.model)
    target = saved_form(run.step, checkpointer)
    may_change = given.resume is not None
    changes = check_resumed(checkpointer, target, metadata, run_dir=run_dir, may_change=may_change)
    same = f"same config except {', '.join(changes[:5])}" if changes else "same config"
    notes = [f"resuming step {resumed} from {checkpointer.directory}: {same}"]
    if isinstance(run.batches, BatchStream):
        notes.append(f"skipping the first {resumed} batches of the iterable")
    return metadata, notes


def _banner(run: Run, run_dir: Path, notes: Sequence[str], *, units: str) -> list[str]:
    """The lines that are shown before a run compiles: model, data, devices and what was chosen for it."""
    config, mesh, step = run.config, run.step.mesh, run.step
    places = zip(jax.tree.leaves(step.abstract_state), jax.tree.leaves(step.state_on_host), strict=True)
    memory = {False: 0, True: 0}  # on the host?
    for leaf, is_on_host in places:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            memory[bool(is_on_host)] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    degrees = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    accumulation, trains = config.train.accumulation_steps, trained_leaves(step)
    lines = [
        f"{run.name}: {step.model.name}, {format_count(run.num_parameters)} parameters, "
        f"{config.train.steps:,} steps of {units}" + (f" in {accumulation} microbatches" if accumulation > 1 else "")
    ]
    if trains is not None:
        trained = sum(leaf.size for leaf in jax.tree.leaves(without_base(step.abstract_state, trains).params))
        lines.append(f"adapters: {trained:,} parameters are trained; checkpoints hold them alone")
    unused = unused_accelerator(jax.devices()[0].platform)
    return [
        *lines,
        *(f"data: {line}" for line in run.data.description),
        f"devices: {describe_devices()} ({degrees}), {config.precision.policy}, "
        f"state {format_bytes(memory[False])} per device"
        + (f", {format_bytes(memory[True])} on the host" if memory[True] else ""),
        f"compiled programs: {cache_folder(config.compilation_cache) or 'not kept'}",
        f"run directory: {run_dir}",
        *mesh_notes(mesh),
        *option_notes(step.compiler_options, asked=config.compiler_options),
        *notes,
        *([unused] if unused else []),
    ]


def _compiled_state(
    run: Run,
    run_dir: Path,
    own_step: OwnStep,
    resumes: Checkpointer | None,
    progress: Progress,
    spent: TimeSpent,
) -> tuple[TrainState, BaseRecord | None]:
    """Compile the step, and create the state or restore the newest intact one; with the base of its adapters."""
    with ThreadPoolExecutor(1) as pool:
        # Compiling the initialisation takes about as long as compiling the step, so the two run side by side.
        created = None
        if resumes is None:
            created = pool.submit(lambda: run.step.init(run.config.seed, **start_of(run, own_step)))
        with spent.measure("compiling"):
            _compile(run, progress, created)
        if created is None:
            assert resumes is not None
            with progress.phase("restoring checkpoint"), spent.measure("creating state"):
                return resumed_state(run, run_dir, own_step, resumes)
        with progress.phase("creating state"), spent.measure("creating state"):
            state = jax.block_until_ready(created.result())
            return state, describe_start(run, state, start_of(run, own_step))


def _compile(run: Run, progress: Progress, created: Future[TrainState] | None) -> None:
    """Compile the step for the shapes of its batches, and show whether the program came from the cache.

    Another thread creates the state meanwhile. Of several processes, none goes on before both are done, because
    collectives of the two threads could meet in another order in another process.
    """
    seen: set[str] = set()
    chosen: list[str] = []

    def listen(event: str, **_: Any) -> None:
        seen.add(event.removeprefix("/jax/compilation_cache/"))

    with contextlib.ExitStack() as ends:

        def attempt() -> tuple[Taken, Phase]:
            try:
                with progress.phase("tracing") as tracing, record_choices() as choices:
                    lowered = run.step.trace(run.batches.spec()).lower()
                    tracing.note("; ".join(choices))
                chosen.extend(choices)
                phase = ends.enter_context(progress.phase("compiling"))
                jax.monitoring.register_event_listener(listen)
                ends.callback(jax.monitoring.unregister_event_listener, listen)
                taken = compile_lowered(lowered, run.step.compiler_options.tried)
                run.step.use(taken.compiled, choices=[*chosen, *taken.lines], tried=taken.tried)
                return taken, phase
            finally:
                if created is not None and jax.process_count() > 1:
                    wait([created])

        taken, phase = together(attempt)
        kept = run.config.compilation_cache is not None
        # The initialisation compiles at the same time, so a miss may be its; then the note is too modest.
        found = "cache_hits" in seen and "cache_misses" not in seen
        cached = "from cache" if found else "cached next time" if kept else ""
        phase.note("; ".join([*([cached] if cached else []), *taken.lines]))
