"""One run, ready to train: its steps, what happens between them, and how it ends."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.arrays import from_process_0
from jaxtrain.data import prefetch
from jaxtrain.data.prefetch import queue_depth
from jaxtrain.errors import DataError, PreemptedError
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.base import trained_leaves
from jaxtrain.run.held_out import HeldOut, shown_metrics
from jaxtrain.run.interrupt import Interrupt
from jaxtrain.run.loop import Hooks, train_loop
from jaxtrain.run.mistakes import held_out_details
from jaxtrain.run.profile import ProfileWindow
from jaxtrain.run.record import RunRecord
from jaxtrain.run.result import Result
from jaxtrain.run.sample import sample_text
from jaxtrain.run.saves import RunSaves
from jaxtrain.run.step_log import StepLog
from jaxtrain.run.watch import Watch
from jaxtrain.runtime import collector
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
        metadata: what each checkpoint says of the run that wrote it.
        checkpointer: of the run directory.
        saves: through it.
        record: the files that grow with the run.
        steps: measures and logs the steps.
        held_out: evaluates.
        watch: calls the callbacks, and knows whether the run stops early.
        profile: the profiler's window.
        progress: what people see.
        interrupt: says when to stop.
    """

    run: Run
    run_dir: Path
    start: int
    state: TrainState
    metadata: Mapping[str, Any]
    checkpointer: Checkpointer
    saves: RunSaves
    record: RunRecord
    steps: StepLog
    held_out: HeldOut
    watch: Watch
    profile: ProfileWindow
    progress: Progress
    interrupt: Interrupt


def train_session(session: Session) -> Result:
    """Train to the last step, or until the run stops early; then evaluate, save, sample and report.

    Raises:
        PreemptedError: stopped by a signal; the state is saved.
        DivergedError: non-finite steps in a row.
        StorageError: the last save failed, or several in a row.
        DataError: the data gave no further batch; the state is saved.
    """
    last, watch = session.run.config.train.steps, session.watch
    had_stopped = watch.status is not None
    session.record.begin(session.run)
    if not had_stopped:
        _make_up_evaluation(session)
    is_over = session.start >= last or watch.status is not None
    state, done = (session.state, session.start) if is_over else _train_steps(session)
    if done < last and watch.status is None:
        _save(session, done, state)
        session.saves.wait(hurry=True)
        raise PreemptedError(
            f"stopped after step {done} of {last}; saved in {session.run_dir / 'checkpoints'}: run again to go on"
        )
    spent = session.record.spent
    _evaluate(session, done, state, is_repeated=session.start >= last or had_stopped)
    _save(session, done, state)
    if session.record.draws_report:
        with spent.measure("saving"):
            session.saves.wait(hurry=True)  # what follows may fail, and the run is saved whatever it does
        with spent.measure("evaluation"):
            session.record.held_out(held_out_details(session.run, state, done, session.progress))
    with spent.measure("sampling"):
        sample = sample_text(session.run, state, session.progress)
    if sample is not None:
        session.record.sample(done, sample)
    if session.start >= last:
        session.progress.message(
            f"already trained to step {session.start}: raise train.steps to go on, or start again with --resume never"
        )
    elif had_stopped:
        session.progress.message(
            f"already stopped early at step {done}: raise evaluation.early_stopping.patience to go on, or start again "
            "with --resume never"
        )
    close_session(session, "done" if done >= last else watch.status or "done")
    _report(session, done, sample)
    return Result(session.run_dir, state, _final_metrics(session), done)


def close_session(session: Session, status: str) -> None:
    """Finish the last save, then close the files of the run with its status; a second call does nothing."""
    with session.record.spent.measure("saving"):
        session.saves.close(hurry=status == "preempted")
    session.record.close(status, _final_metrics(session), session.progress)


def _make_up_evaluation(session: Session) -> None:
    """Evaluate the state that the run goes on from, where that was due and the run stopped before it."""
    checkpointer, start, config = session.checkpointer, session.start, session.run.config
    if not 0 < start < config.train.steps or not _is_due(start, config.evaluation.every):
        return
    # Not when the run stops: a signal leaves little time, and the save comes first.
    if from_process_0(lambda: checkpointer.info(start).eval_loss is None):
        _evaluate(session, start, session.state)
        loss = session.held_out.loss_after(start)
        if loss is not None:
            checkpointer.add_eval_loss(start, loss, score=session.watch.score_after(start))


def _train_steps(session: Session) -> tuple[TrainState, int]:
    """Run the steps that are left; returns the state and the number of the last step that ran."""
    run, train, start = session.run, session.run.config.train, session.start
    depth = queue_depth(run.batches.spec()) if train.prefetch == "auto" else train.prefetch
    batches = prefetch(run.step.loader(run.batches), start, train.steps, depth=depth)
    session.progress.start(train.steps, start)
    try:
        state, done = train_loop(
            run.step,
            session.state,
            batches,
            first=start + 1,
            last=train.steps,
            max_skipped_in_a_row=train.max_skipped_in_a_row,
            hooks=_hooks(session),
        )
    finally:
        batches.close()
        session.profile.stop()
    if session.watch.status is None:  # the loop pauses after a step only if another one follows
        with _saving_on_failure(session, done, state):
            session.watch.stepped(done, state)
    return state, done


def _hooks(session: Session) -> Hooks:
    """What happens around the steps."""
    evaluate_every = session.run.config.evaluation.every
    wants_save = [False]  # after the last step

    def finished(number: int, metrics: Mapping[str, jax.Array], seconds: float, waited: float) -> None:
        session.profile.after_step(number)
        session.steps.note(number, metrics, seconds, waited)
        session.watch.note(metrics)
        collector.resume()  # beside the next step, which is under way

    def wants_pause(number: int) -> bool:
        session.saves.check()
        wants_save[0] = session.saves.is_due(number)
        return wants_save[0] or _is_due(number, evaluate_every) or session.watch.is_due(number)

    def pause(number: int, state: TrainState) -> bool:
        watch = session.watch
        with _saving_on_failure(session, number, state):
            watch.stepped(number, state)
        if _is_due(number, evaluate_every):
            _evaluate(session, number, state)
        # A run that stops is saved at its end.
        if watch.status is None and (wants_save[0] or watch.wants_save(number)):
            _save(session, number, state)
        return watch.status is not None

    def data_failed(number: int, state: TrainState, error: DataError) -> None:
        if _saved_on_failure(session, number, state):
            folder = session.run_dir / "checkpoints"
            raise DataError(
                f"{error}; step {number} is saved in {folder}: run again with such data to go on"
            ) from error

    stop_requested = session.interrupt.requested
    return Hooks(session.profile.before_step, finished, wants_pause, pause, stop_requested, data_failed)


def _is_due(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0


def _evaluate(session: Session, number: int, state: TrainState, *, is_repeated: bool = False) -> None:
    """Evaluate the state after a step, unless that was done.

    Args:
        session: the run.
        number: of the step.
        state: after it.
        is_repeated: whether an earlier process did it, and called what is to be called.
    """
    if session.held_out.evaluate(number, state) and not is_repeated:
        with _saving_on_failure(session, number, state):
            session.watch.evaluated(number, session.held_out.metrics, state)


def _save(session: Session, number: int, state: TrainState) -> None:
    if not _write(session, number, state):
        return
    if session.watch.wants_complete_saves and session.saves.settle():
        session.watch.saved(number, state)


def _write(session: Session, number: int, state: TrainState) -> bool:
    """Begin a save; False where the step was saved already."""
    record, loss, score = session.record, session.held_out.loss_after(number), session.watch.score_after(number)
    with record.spent.measure("saving"):
        saved = without_base(state, trained_leaves(session.run.step))
        began = session.saves.save(number, saved, metadata=session.metadata, eval_loss=loss, score=score)
    record.keep_time(number)
    return began


@contextlib.contextmanager
def _saving_on_failure(session: Session, number: int, state: TrainState) -> Iterator[None]:
    """Save the state where a callback fails, then raise its error."""
    try:
        yield
    except Exception:
        _saved_on_failure(session, number, state)
        raise


def _saved_on_failure(session: Session, number: int, state: TrainState) -> bool:
    """Save the state after a step where something failed; False where that fails too."""
    if jax.process_count() > 1:  # the others may be in no save
        return False
    with contextlib.suppress(Exception):
        _write(session, number, state)
        session.saves.wait(hurry=True)
        return True
    return False


def _final_metrics(session: Session) -> dict[str, float | int | None]:
    """The last logged row with the last evaluation."""
    return {**session.steps.row, **session.held_out.metrics}


def _report(session: Session, done: int, sample: str | None) -> None:
    """Print the summary as the result of the command."""
    summary = [", ".join([f"done: step {done}", *shown_metrics(session.held_out.metrics)])]
    if session.watch.status is not None and done < session.run.config.train.steps:
        summary.append(f"{session.watch.status} before step {session.run.config.train.steps}: {session.watch.reason}")
    if session.run.config.logging.report:
        summary.append(f"report: {session.run_dir / 'report.html'}")
    session.progress.finish([*([f"sample: {sample}"] if sample else []), *summary])
