"""One run while it trains: its parts, and how its state is evaluated, saved and left in every phase."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.data import prefetch
from jaxtrain.errors import PreemptedError, StorageError
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.writers import Scalars, flat_scalars
from jaxtrain.run.callbacks import Watch
from jaxtrain.run.evaluation import Evaluator, held_out_batches
from jaxtrain.run.interrupt import Interrupt, StoppedWaiting
from jaxtrain.run.record import RunRecord, StepLog
from jaxtrain.run.resume import trained_leaves
from jaxtrain.run.saving import RunSaves
from jaxtrain.run.watchdog import Activity
from jaxtrain.train.assemble import Run
from jaxtrain.train.base import without_base
from jaxtrain.train.state import TrainState


@dataclass
class Session:
    """The parts of a run, made by `prepare.prepare_session`."""

    run: Run
    run_dir: Path
    start: int
    state: TrainState
    metadata: dict[str, Any]
    checkpointer: Checkpointer
    saves: RunSaves
    record: RunRecord
    steps: StepLog
    evaluator: Evaluator
    watch: Watch
    progress: Progress
    interrupt: Interrupt
    activity: Activity
    has_ended: bool  # no step is left
    is_over: bool  # nor is anything else: an earlier process closed the run
    metrics: Scalars = field(default_factory=dict)  # of the last evaluation; of a run that is over, all of them
    evaluated: int | None = None


def final_metrics(session: Session) -> Scalars:
    """The last logged row with the last evaluation."""
    return {**session.steps.row, **session.metrics}


def shown_metrics(metrics: Scalars) -> list[str]:
    """Metrics as people read them: `eval loss 1.234`."""
    return [f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items() if value is not None]


def close_session(session: Session, status: str) -> None:
    """Finish the last save, then close the files of the run with its status; a second call does nothing."""
    session.steps.end()
    try:
        with session.record.spent.measure("saving"):
            # A run that failed in one process agrees on nothing: the others are elsewhere.
            agrees = status not in ("failed", "stopped")
            session.saves.close(hurry=status == "preempted", agrees=agrees)
    except StorageError:
        session.record.close("failed", final_metrics(session), session.progress)
        raise
    with session.activity.during("report"):
        asked = session.interrupt.seconds_since
        session.record.close(status, final_metrics(session), session.progress, is_asked=lambda: bool(asked()))


def evaluate_state(session: Session, number: int, state: TrainState) -> None:
    """Evaluate the state after a step on the run's held-out rows, unless that was done."""
    if session.run.data.validation is None or session.evaluated == number:
        return
    try:
        with session.record.spent.measure("evaluation"):
            session.metrics = _evaluated(session, state)
        session.evaluated = number
        session.record.scalars(number, session.metrics)
        session.progress.message(f"step {number}: {'  '.join(shown_metrics(session.metrics))}")
        with session.activity.during("callback"):
            session.watch.evaluated(number, session.metrics, state)
    except StoppedWaiting:
        stop_run(session, number, state)
    except Exception:  # held-out rows that cannot be read, or do not fit; a callback
        save_on_failure(session, number, state)
        raise


def _evaluated(session: Session, state: TrainState) -> Scalars:
    config, rows = session.run.config, session.run.data.validation
    assert rows is not None
    size, most = config.train.global_batch_size, config.evaluation.max_batches
    batches = held_out_batches(config, rows, size=size, max_batches=most)
    loaded = prefetch(session.run.step.loader(batches), 0, len(batches), depth=1)
    try:
        ticking = session.activity.ticking(session.interrupt.until_asked(loaded))
        return flat_scalars(session.evaluator(state, ticking))
    finally:
        loaded.close()


def add_evaluation(session: Session, number: int) -> None:
    """Add the result of an evaluation to the checkpoint of its step, which was saved before."""
    loss = session.metrics.get("eval_loss") if session.evaluated == number else None
    # A save may have failed; the wait for it says so.
    if loss is not None and from_process_0(lambda: number in session.checkpointer.steps()):
        session.checkpointer.add_eval_loss(number, loss, score=session.watch.score_after(number))


def save_state(session: Session, number: int, state: TrainState) -> None:
    """Begin to save the state after a step, unless it was saved; callbacks that see saves wait until it is complete."""
    if _write(session, number, state) and session.watch.sees_saves and session.saves.settle():
        session.watch.saved(number, state)


def _write(session: Session, number: int, state: TrainState) -> bool:
    """Begin a save; False where the step was saved already."""
    record, score, began_at = session.record, session.watch.score_after(number), time.monotonic()
    loss = session.metrics.get("eval_loss") if session.evaluated == number else None
    with record.spent.measure("saving"):
        saved = without_base(state, trained_leaves(session.run.step))
        began = session.saves.save(number, saved, metadata=session.metadata, loss=loss, score=score)
    if began:
        record.update(save_seconds=round(time.monotonic() - began_at, 3))
    return began


def stop_run(session: Session, number: int, state: TrainState) -> NoReturn:
    """Save the state after a step and raise the error that ends the run with exit code 75."""
    began = time.monotonic()
    save_state(session, number, state)
    session.saves.wait(hurry=True)
    raise PreemptedError(
        f"stopped after step {number} of {session.run.config.train.steps}; saved in {session.checkpointer.directory} "
        f"in {time.monotonic() - began:.1f} s{session.interrupt.seconds_since()}: run again to go on"
    )


@contextlib.contextmanager
def saving_on_failure(session: Session, number: int, state: TrainState) -> Iterator[None]:
    """Save the state where a callback fails, then raise its error."""
    try:
        with session.activity.during("callback"):
            yield
    except Exception:
        save_on_failure(session, number, state)
        raise


def save_on_failure(session: Session, number: int, state: TrainState, *, says: bool = True) -> bool:
    """Save the state after a step where something failed, and say so; False where that fails too."""
    if jax.process_count() > 1:  # the others may be in no save
        return False
    with contextlib.suppress(Exception):
        _write(session, number, state)
        session.saves.wait(hurry=True)
        if says:
            session.progress.message(f"step {number} is saved in {session.checkpointer.directory}: run again to go on")
        return True
    return False
