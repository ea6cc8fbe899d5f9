"""From a config to a session: data read, step compiled, state created or restored, files opened, in that order."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.mirror import mirror_folder
from jaxtrain.checkpoint.places import Place
from jaxtrain.config import Loaded
from jaxtrain.config.kinds import check_kinds, check_roll_back
from jaxtrain.data import Data
from jaxtrain.data.stream import BatchStream
from jaxtrain.errors import ConfigError, DivergedError, PreemptedError
from jaxtrain.interop.fresh import check_fits, fresh_notes
from jaxtrain.layout.degrees import config_degrees
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.metrics.progress import Phase, Progress
from jaxtrain.metrics.runinfo import compared_after
from jaxtrain.metrics.time_spent import TimeSpent
from jaxtrain.models.model import Model
from jaxtrain.models.task import Task
from jaxtrain.run.activity import Activity
from jaxtrain.run.agreed import run_facts
from jaxtrain.run.banner import banner_lines, to_hold_out
from jaxtrain.run.base import describe_start, keep_base, moved_base, start_of, trained_leaves
from jaxtrain.run.callbacks import Callback
from jaxtrain.run.called_sources import source_changes
from jaxtrain.run.changed_state import as_kept, as_saved
from jaxtrain.run.compared import compared_rows
from jaxtrain.run.elsewhere import begin_there, take_folder
from jaxtrain.run.evaluation import Evaluator
from jaxtrain.run.held_out import HeldOut, metric_names
from jaxtrain.run.import_run import check_class_order
from jaxtrain.run.interrupt import Interrupt
from jaxtrain.run.lock import RunLock
from jaxtrain.run.own_parts import own_parts
from jaxtrain.run.profile import ProfileWindow
from jaxtrain.run.record import open_record
from jaxtrain.run.reference import first_reference, resumed_reference, with_known_reference
from jaxtrain.run.resume import (
    check_resumed,
    choose_start,
    finished_row,
    recorded_save,
    run_metadata,
    set_aside,
)
from jaxtrain.run.roll_back import RECORD, check_can_go_back
from jaxtrain.run.saves import RunSaves
from jaxtrain.run.session import Session
from jaxtrain.run.step_log import StepLog, run_meter
from jaxtrain.run.watch import Watch
from jaxtrain.runtime.agreement import together
from jaxtrain.runtime.compiler import Taken, compile_lowered, record_choices
from jaxtrain.train.assemble import Run, assemble, length_notes, open_run_data
from jaxtrain.train.base import BaseRecord, base_of, with_base, without_base
from jaxtrain.train.option_checks import check_jit
from jaxtrain.train.own_step import OwnStep
from jaxtrain.train.start import restore_base
from jaxtrain.train.state import TrainState

_STATUS: dict[type[BaseException], str] = {
    PreemptedError: "preempted",
    DivergedError: "diverged",
    KeyboardInterrupt: "stopped",
}


def prepare_session(
    loaded: Loaded,
    run_dir: Path,
    *,
    resume: str | None,
    model: Model | None,
    task: Task | None,
    data: Data | None,
    own_step: OwnStep,
    callbacks: Sequence[Callback],
    progress: Progress,
    interrupt: Interrupt,
    activity: Activity,
    lock: RunLock,
    main: bool,
) -> Session:
    """Make every part of a run; what was opened is closed again where a later part cannot be made.

    Args:
        loaded: the config.
        run_dir: exists and is locked.
        resume: see `choose_start`.
        model, task, data: your own instead of the config's.
        own_step: further parts of the step that are your own.
        callbacks: called between the steps.
        progress: what people see.
        interrupt: entered.
        activity: is told what this process does.
        lock: by which the main process holds the directory.
        main: whether this process writes.

    Raises:
        ConfigError, DataError, CheckpointError: the run cannot start.
    """
    check_jit()
    spent = TimeSpent(during=activity.during)
    with spent.measure("reading data"):
        parts = {"model": model, "task": task, "data": data, "own_step": own_step}
        run = together(lambda: _assembled(loaded, **parts, progress=progress), says=run_facts)
    interrupt.check()
    optimizer_state = None if own_step.optimizer is None else run.step.abstract_state.optimizer_state
    own = own_parts(model=model, task=task, data=data, optimizer_state=optimizer_state)
    metadata = run_metadata(run, own)
    keep = run.config.checkpoint
    folder, owner = take_folder(keep, run_dir, name=run.name, resume=resume, main=main, report=progress.message)
    checkpointer = _checkpointer(run, folder, run_dir, progress)
    with closing_on_failure(lambda status: checkpointer.close()):
        resumed = choose_start(checkpointer, run_dir, resume)
        notes = [*loaded.notes, *(length_notes(run.config) if model is not None and data is None else [])]
        if resumed is None and model is None:
            check_fits(run.config.model)
            notes += fresh_notes(run.config.model)
            if own_step.params is None and not own_step.skip:
                check_class_order(run.config, (run.data.reading or {}).get("classes"))
        if resumed is not None:
            target = as_saved(without_base(run.step.abstract_state, trained_leaves(run.step)), checkpointer)
            changes = check_resumed(checkpointer, target, metadata, run_dir=run_dir, may_change=resume is not None)
            same = f"same config except {', '.join(changes[:5])}" if changes else "same config"
            notes.append(f"resuming step {resumed} from {checkpointer.directory}: {same}")
            notes += source_changes(checkpointer.metadata(), metadata["called"])
            if isinstance(run.batches, BatchStream):
                notes.append(f"skipping the first {resumed} batches of the iterable")
        meter = run_meter(run, own_model=model is not None)
        progress.banner(banner_lines(loaded, run, run_dir, notes, own=own, units_per_step=meter.units_per_step))

        if run.awaits_reference and resumed is not None:
            recorded = checkpointer.metadata().get("reference")
            known = resumed_reference(run, run_dir, recorded, lambda: _created(run, own_step), progress, main=main)
            run, metadata["reference"] = with_known_reference(run, known), known.record
        state, base = _compiled_state(
            run, run_dir, own_step, checkpointer, progress, spent, is_resumed=resumed is not None
        )
        interrupt.check()
        metadata["base"] = None if base is None else base.as_json()
        start = 0 if resumed is None else int(state.step)
        if resumed is not None:
            saved = checkpointer.metadata(start)
            metadata.update({RECORD: saved[RECORD]} if RECORD in saved else {})
        activity.begins_at(start)
        compared, other_rows = compared_rows(run, checkpointer, None if resumed is None else start)
        metadata.update(compared)
        watch = Watch(run, run_dir, callbacks=callbacks, start=start, after=compared_after(metadata))
        if resumed is not None:
            checkpointer.score_again(watch.recorded_scores(start), after=compared_after(metadata))
        has_ended = start >= run.config.train.steps or watch.status is not None
        if other_rows is not None and not has_ended:
            progress.message(other_rows)
        evaluator = Evaluator(run.step)
        if watch.has_early_stopping and not has_ended:
            watch.check_metric(metric_names(run, state, evaluator))
        if resumed is None and main:
            # Only once the step runs: a mistake that shows in compiling leaves an earlier run as it was.
            lost = 0 if resume == "never" else recorded_save(run_dir)
            previous = set_aside(run_dir)
            if lost:
                progress.message(
                    f"run.json names a save of step {lost}, and {checkpointer.directory} holds no checkpoint: training "
                    "begins again at step 0 (was it deleted, or on a disk that is gone?)"
                )
            if previous is not None:
                progress.message(f"what an earlier run left here was moved to {previous}")
            begin_there(checkpointer, keep, run_dir, progress.message)
        if resumed is None:
            checkpointer.begin_anew()
            keep_base(base, run, state, run_dir)
        if run.awaits_reference:
            with spent.measure("evaluation"):
                known = first_reference(run, state, run_dir, progress, main=main)
            run, metadata["reference"] = with_known_reference(run, known), known.record
        # Where no step will give a row, it is read before run.json is begun again.
        row = finished_row(run_dir) if has_ended else {}
        record = open_record(
            loaded,
            run,
            run_dir,
            start=start,
            has_ended=has_ended,
            metadata=metadata,
            spent=spent,
            main=main,
            lock=lock,
            report=progress.message,
        )
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
            held_out=HeldOut(run, record, progress, evaluator=evaluator, interrupt=interrupt, activity=activity),
            watch=watch,
            profile=ProfileWindow(run.config.profile, run_dir, progress),
            progress=progress,
            interrupt=interrupt,
            activity=activity,
        )


@contextlib.contextmanager
def closing_on_failure(close: Callable[[str], None]) -> Iterator[None]:
    """Close with the status of what went wrong, and raise that: an error while closing does not replace it.

    Args:
        close: receives preempted, diverged, stopped or failed.
    """
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):
            close(_STATUS.get(type(error), "failed"))
        raise


def _assembled(
    loaded: Loaded,
    *,
    model: Model | None,
    task: Task | None,
    data: Data | None,
    own_step: OwnStep,
    progress: Progress,
) -> Run:
    """Read the data and build the step; degrees and kinds that do not fit fail before any data is read."""
    config = loaded.config
    check_roll_back(config.spikes, config.checkpoint)
    if own_step.mesh is None:
        make_mesh(**config_degrees(config.parallel), devices=None)
    if model is None and data is None:
        check_kinds(config, own_task=task is not None)
    with progress.phase("reading data") as phase:
        opened = data if data is not None else open_run_data(config)
        phase.note(opened.description[0] if opened.description else "")
    if config.evaluation.early_stopping is not None and opened.validation is None:
        raise ConfigError(
            "evaluation.early_stopping needs held-out rows, and the data has none; "
            f"{to_hold_out(config, own_data=data is not None)}"
        )
    check_can_go_back(config.spikes, opened)
    return assemble(config, opened, name=loaded.name, model=model, task=task, own=own_step)


def _checkpointer(run: Run, folder: Place, run_dir: Path, progress: Progress) -> Checkpointer:
    keep = run.config.checkpoint
    return Checkpointer(
        folder,
        keep_last=keep.keep_last,
        keep_every=keep.keep_every,
        keep_best=keep.keep_best,
        mirror=mirror_folder(keep.mirror, run_dir),
        report=progress.message,
    )


def _compiled_state(
    run: Run,
    run_dir: Path,
    own_step: OwnStep,
    checkpointer: Checkpointer,
    progress: Progress,
    spent: TimeSpent,
    *,
    is_resumed: bool,
) -> tuple[TrainState, BaseRecord | None]:
    """Compile the step, and create the state or restore the newest intact checkpoint.

    Returns:
        The state, and its base where checkpoints do not hold it.
    """
    trains = trained_leaves(run.step)
    given = {} if is_resumed else start_of(run, own_step)

    with ThreadPoolExecutor(1) as pool:
        # Compiling the initialisation takes about as long as compiling the step, so the two run side by side.
        created = None if is_resumed else pool.submit(_created, run, own_step)
        with spent.measure("compiling"):
            _compile(created, run, progress)
        if created is None:
            with progress.phase("restoring checkpoint"), spent.measure("creating state"):
                saved = as_saved(without_base(run.step.abstract_state, trains), checkpointer)
                state = as_kept(checkpointer.restore(saved), run.step)
                record = None if trains is None else base_of(checkpointer.metadata(int(state.step)))
                if record is None or trains is None:
                    return state, None
                base = restore_base(
                    run.step.sharded_model,
                    record,
                    run_dir=run_dir,
                    only=lambda path: not trains(path),
                    moved_to=moved_base(run, own_step),
                )
                return with_base(state, base), record
        with progress.phase("creating state"), spent.measure("creating state"):
            state = jax.block_until_ready(created.result())
            return state, describe_start(run, state, given)


def _created(run: Run, own_step: OwnStep) -> TrainState:
    """The state at step 0."""
    return run.step.init(run.config.seed, **start_of(run, own_step))


def _compile(created: Future[TrainState] | None, run: Run, progress: Progress) -> None:
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
                lowered = _lowered(run, progress, chosen)
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


def _lowered(run: Run, progress: Progress, chosen: list[str]) -> jax.stages.Lowered:
    """Trace and lower the step; what was chosen in tracing is added to a list."""
    with progress.phase("tracing") as phase, record_choices() as choices:
        lowered = run.step.trace(run.batches.spec()).lower()
        phase.note("; ".join(choices))
    chosen += choices
    return lowered
