"""One run, ready to train: its steps, what happens between them, and how it ends."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.arrays import from_process_0
from jaxtrain.checkpoint.directory import step_path
from jaxtrain.data import prefetch
from jaxtrain.data.prefetch import queue_depth
from jaxtrain.errors import DataError, PreemptedError
from jaxtrain.metrics.progress import Progress
from jaxtrain.models.model import Params
from jaxtrain.run.activity import Activity
from jaxtrain.run.bad_steps import BadSteps
from jaxtrain.run.base import trained_leaves
from jaxtrain.run.checked_step import checked_step
from jaxtrain.run.go_back import frozen_params, restored_before
from jaxtrain.run.held_out import HeldOut, shown_metrics
from jaxtrain.run.interrupt import Interrupt, StoppedWaiting
from jaxtrain.run.loop import Hooks, train_loop
from jaxtrain.run.mistakes import held_out_details
from jaxtrain.run.profile import ProfileWindow
from jaxtrain.run.record import RunRecord
from jaxtrain.run.result import Result
from jaxtrain.run.roll_back import SpikeError, batch_of, recorded, with_spike
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
        _stop(session, done, state)
    is_repeated = (session.start >= last or had_stopped) and not _lacks_evaluation(session)
    _evaluate(session, done, state, is_repeated=is_repeated)
    _save(session, done, state)
    if done == session.start and not is_repeated:
        _add_evaluation(session, done)
    sample = _finish(session, done, state)
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
    session.activity.writes(None)
    with session.activity.during("report"):
        session.record.close(status, _final_metrics(session), session.progress)


def _make_up_evaluation(session: Session) -> None:
    """Evaluate the state that the run goes on from, where that was due and the run stopped before it."""
    start, config = session.start, session.run.config
    if not 0 < start < config.train.steps or not _is_due(start, config.evaluation.every):
        return
    # Not when the run stops: a signal leaves little time, and the save comes first.
    if _lacks_evaluation(session):
        _evaluate(session, start, session.state)
        _add_evaluation(session, start)


def _lacks_evaluation(session: Session) -> bool:
    """Whether the checkpoint that the run goes on from was saved without the result of an evaluation."""
    return bool(from_process_0(lambda: session.checkpointer.info(session.start).eval_loss is None))


def _add_evaluation(session: Session, number: int) -> None:
    """Add the result of an evaluation to the checkpoint of its step, which was saved before."""
    loss = session.held_out.loss_after(number)
    # A save may have failed; the wait for it says so.
    if loss is not None and from_process_0(lambda: number in session.checkpointer.steps()):
        session.checkpointer.add_eval_loss(number, loss, score=session.watch.score_after(number))


def _finish(session: Session, done: int, state: TrainState) -> str | None:
    """Do what only reads the state, which is saved: a signal leaves it for the next start. Returns the sample."""
    spent, record = session.record.spent, session.record

    with session.interrupt.free_to_leave(lambda: close_session(session, "preempted")):
        if record.draws_report:
            with spent.measure("saving"):
                session.saves.wait(hurry=True)  # what follows may fail, and the run is saved whatever it does
            with spent.measure("evaluation"):
                record.held_out(held_out_details(session.run, state, done, session.progress))
        with spent.measure("sampling"):
            sample = sample_text(session.run, state, session.progress)
        if sample is not None:
            record.sample(done, sample)
    return sample


def _train_steps(session: Session) -> tuple[TrainState, int]:
    """Run the steps that are left; returns the state and the number of the last step that ran."""
    start, state = session.start, session.state
    while True:
        try:
            state, done = _run_steps(session, start, state)
            break
        except SpikeError as error:
            # The traceback holds the state that is given up.
            spike, frozen = error.with_traceback(None), frozen_params(session.run.step)
        start, state = spike.to_step, _gone_back(session, spike, frozen)
    # The loop pauses after a step only if another one follows.
    if done > session.start and session.watch.status is None:
        with _saving_on_failure(session, done, state):
            session.watch.stepped(done, state)
    return state, done


def _gone_back(session: Session, spike: SpikeError, frozen: Params | None) -> TrainState:
    """The state of an earlier checkpoint; what was noted of the steps after it is forgotten."""
    spikes = session.run.config.spikes
    assert spikes is not None, "no step is a spike without the group"
    with session.record.spent.measure("creating state"):
        state = restored_before(session.run.step, session.checkpointer, spike, frozen)
    session.metadata.update(with_spike(session.metadata, spike, skip_batches=spikes.skip_batches))
    session.record.go_back(spike.to_step, session.metadata)
    session.watch.go_back(spike.to_step)
    session.held_out.go_back()
    return state


def _run_steps(session: Session, start: int, state: TrainState) -> tuple[TrainState, int]:
    """Run the steps from a state on; returns the state and the number of the last step that ran.

    Raises:
        SpikeError: the run is to go back.
    """
    run, train = session.run, session.run.config.train
    depth = queue_depth(run.batches.spec()) if train.prefetch == "auto" else train.prefetch
    load, rolled_back = run.step.loader(run.batches), recorded(session.metadata)
    batches = prefetch(lambda k: load(batch_of(k, rolled_back)), start, train.steps, depth=depth)
    bad_steps = BadSteps(
        run,
        session.run_dir,
        checkpointer=session.checkpointer,
        metadata=session.metadata,
        progress=session.progress,
        spent=session.record.spent,
    )
    session.progress.start(train.steps, start)
    asked = session.interrupt.until_asked(batches)
    try:
        return train_loop(
            checked_step(run.step, run.config.checks, start=start),
            state,
            bad_steps.following(session.activity.fed(asked, first=start + 1), start + 1),
            first=start + 1,
            last=train.steps,
            max_skipped_in_a_row=train.max_skipped_in_a_row,
            hooks=_hooks(session, bad_steps),
        )
    except StoppedWaiting:
        # Before the first step: the state is the one that they begin with.
        if start:
            return state, start
        raise PreemptedError(
            f"stopped before the first step of {train.steps}{session.interrupt.seconds_since()}; nothing is lost: "
            "run again to start"
        ) from None
    finally:
        batches.close()
        session.profile.stop()


def _hooks(session: Session, bad_steps: BadSteps) -> Hooks:
    """What happens around the steps."""
    evaluate_every = session.run.config.evaluation.every
    wants_save = [False]  # after the last step

    def finished(number: int, metrics: Mapping[str, jax.Array], seconds: float, waited: float) -> None:
        session.activity.finished(number, seconds, waited)
        session.profile.after_step(number)
        session.steps.note(number, metrics, seconds, waited)
        session.watch.note(metrics)
        bad_steps.note(number, metrics)
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
        if isinstance(error, StoppedWaiting):
            _stop(session, number, state)
        if _saved_on_failure(session, number, state):
            folder = session.run_dir / "checkpoints"
            raise DataError(
                f"{error}; step {number} is saved in {folder}: run again with such data to go on"
            ) from error

    def stop_requested(number: int) -> bool:
        return session.interrupt.requested()

    return Hooks(session.profile.before_step, finished, wants_pause, pause, stop_requested, data_failed)


def _is_due(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0


def _evaluate(session: Session, number: int, state: TrainState, *, is_repeated: bool = False) -> None:
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
                with _saving_on_failure(session, number, state):
                    session.watch.evaluated(number, session.held_out.metrics, state)
        except StoppedWaiting:
            was_left = True
    if was_left:
        _stop(session, number, state)


def _stop(session: Session, number: int, state: TrainState) -> NoReturn:
    """Save the state after a step and raise the error that ends the run with exit code 75."""
    began = time.monotonic()
    _save(session, number, state)
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
        f"{session.run_dir / 'checkpoints'} in {seconds:.1f} s{session.interrupt.seconds_since()}: run again to go on"
    )


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
    if began:
        session.activity.writes(step_path(session.checkpointer.directory, number))
    record.keep_time(number)
    return began


@contextlib.contextmanager
def _saving_on_failure(session: Session, number: int, state: TrainState) -> Iterator[None]:
    """Save the state where a callback fails, then raise its error."""
    try:
        with session.activity.during("callback"):
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
