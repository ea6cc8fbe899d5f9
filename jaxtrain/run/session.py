"""One run, ready to train: its parts, and how its state is evaluated, saved and left in every phase."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.errors import PreemptedError, StorageError
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.activity import Activity
from jaxtrain.run.base import trained_leaves
from jaxtrain.run.held_out import HeldOut
from jaxtrain.run.interrupt import Interrupt, StoppedWaiting
from jaxtrain.run.profile import ProfileWindow
from jaxtrain.run.record import RunRecord
from jaxtrain.run.saves import OF_ONE_PROCESS, RunSaves
from jaxtrain.run.step_log import StepLog
from jaxtrain.run.watch import Watch
from jaxtrain.train.assemble import Run
from jaxtrain.train.base import without_base
from jaxtrain.train.state import TrainState


@dataclass(frozen=True)
class Session:
    """The parts of a run, made by `prepare.prepare_session`.

    Attributes:
        run: config, data, batches and the compiled step.
        run_dir: directory of the run, which this process holds.
        start: number of steps that were done before this process started.
        state: the state after step `start`, on the mesh; the first step donates it, so do not use it afterwards.
        metadata: what each checkpoint says of the run that wrote it; a roll back adds itself.
        checkpointer: of the run directory.
        saves: through it.
        record: the files that grow with the run.
        steps: measures and logs the steps.
        held_out: evaluates.
        watch: calls the callbacks, and knows whether the run stops early.
        profile: the profiler's window.
        progress: what people see.
        interrupt: says when to stop.
        activity: is told what this process does.
    """

    run: Run
    run_dir: Path
    start: int
    state: TrainState
    metadata: dict[str, Any]
    checkpointer: Checkpointer
    saves: RunSaves
    record: RunRecord
    steps: StepLog
    held_out: HeldOut
    watch: Watch
    profile: ProfileWindow
    progress: Progress
    interrupt: Interrupt
    activity: Activity


def close_session(session: Session, status: str) -> None:
    """Finish the last save, then close the files of the run with its status; a second call does nothing."""
    session.steps.end()
    try:
        with session.record.spent.measure("saving"):
            session.saves.close(hurry=status == "preempted", agrees=status not in OF_ONE_PROCESS)
    except StorageError:
        session.record.close("failed", final_metrics(session), session.progress)
        raise
    session.activity.writes(None)
    with session.activity.during("report"):
        session.record.close(
            status,
            final_metrics(session),
            session.progress,
            is_asked=lambda: bool(session.interrupt.seconds_since()),
        )


def lacks_evaluation(session: Session) -> bool:
    """Whether the checkpoint that the run goes on from was saved without the result of an evaluation."""
    return bool(from_process_0(lambda: session.checkpointer.info(session.start).eval_loss is None))


def add_evaluation(session: Session, number: int) -> None:
    """Add the result of an evaluation to the checkpoint of its step, which was saved before."""
    loss = session.held_out.loss_after(number)
    # A save may have failed; the wait for it says so.
    if loss is not None and from_process_0(lambda: number in session.checkpointer.steps()):
        session.checkpointer.add_eval_loss(number, loss, score=session.watch.score_after(number))


def evaluate_state(session: Session, number: int, state: TrainState, *, is_repeated: bool = False) -> None:
    """Evaluate the state after a step, unless that was done.

    Args:
        session: the run.
        number: of the step.
        state: after it.
        is_repeated: whether an earlier process did it, recorded it and called what is to be called.

    Raises:
        PreemptedError: the run is to stop; the state is saved, and evaluated when the run goes on.
    """
    was_left = False
    with session.interrupt.holding(lambda: _stop_beside(session, number, state)):
        try:
            if session.held_out.evaluate(number, state, is_recorded=is_repeated) and not is_repeated:
                with saving_on_failure(session, number, state):
                    session.watch.evaluated(number, session.held_out.metrics, state)
        except StoppedWaiting:
            was_left = True
        except Exception:  # held-out rows that cannot be read, or do not fit
            saved_on_failure(session, number, state)
            raise
    if was_left:
        stop_run(session, number, state)


def stop_run(session: Session, number: int, state: TrainState) -> NoReturn:
    """Save the state after a step and raise the error that ends the run with exit code 75."""
    began = time.monotonic()
    save_state(session, number, state)
    session.saves.wait(hurry=True)
    raise PreemptedError(_stopped_line(session, number, time.monotonic() - began))


def _stop_beside(session: Session, number: int, state: TrainState) -> str:
    """Do the same on another thread than the main one, which does not come back, and close the files of the run."""
    began = time.monotonic()
    _write(session, number, state)
    session.saves.wait(hurry=True)
    line = _stopped_line(session, number, time.monotonic() - began)
    close_session(session, "preempted")
    return line


def _stopped_line(session: Session, number: int, seconds: float) -> str:
    return (
        f"stopped after step {number} of {session.run.config.train.steps}; saved in "
        f"{session.checkpointer.directory} in {seconds:.1f} s{session.interrupt.seconds_since()}: run again to go on"
    )


def save_state(session: Session, number: int, state: TrainState) -> None:
    if not _write(session, number, state):
        return
    if session.watch.wants_complete_saves and session.saves.settle():
        session.watch.saved(number, state)


def _write(session: Session, number: int, state: TrainState) -> bool:
    """Begin a save; False where the step was saved already."""
    record, loss, score = session.record, session.held_out.loss_after(number), session.watch.score_after(number)
    record.look()  # a save deletes older steps, which may be those of another run
    with record.spent.measure("saving"):
        saved = without_base(state, trained_leaves(session.run.step))
        began = session.saves.save(number, saved, metadata=session.metadata, eval_loss=loss, score=score)
    if began:
        session.activity.writes(session.checkpointer.directory / str(number))
    record.keep_time(number)
    return began


@contextlib.contextmanager
def saving_on_failure(session: Session, number: int, state: TrainState) -> Iterator[None]:
    """Save the state where a callback fails, then raise its error."""
    try:
        with session.activity.during("callback"):
            yield
    except Exception:
        saved_on_failure(session, number, state)
        raise


def saved_on_failure(session: Session, number: int, state: TrainState, *, says: bool = True) -> bool:
    """Save the state after a step where something failed, and say so; False where that fails too."""
    if jax.process_count() > 1 or session.record.is_lost:  # the others may be in no save, or another run has the place
        return False
    with contextlib.suppress(Exception):
        _write(session, number, state)
        session.saves.wait(hurry=True)
        if says:
            session.progress.message(f"step {number} is saved in {session.checkpointer.directory}: run again to go on")
        return True
    return False


def final_metrics(session: Session) -> dict[str, float | int | None]:
    """The last logged row with the last evaluation."""
    return {**session.steps.row, **session.held_out.metrics}
