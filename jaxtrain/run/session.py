"""One run, ready to train: its steps, what happens between them, and how it ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.arrays import from_process_0
from jaxtrain.data import prefetch
from jaxtrain.data.prefetch import queue_depth
from jaxtrain.errors import PreemptedError
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.held_out import HeldOut, shown_metrics
from jaxtrain.run.interrupt import Interrupt
from jaxtrain.run.loop import Hooks, train_loop
from jaxtrain.run.mistakes import held_out_details
from jaxtrain.run.profile import ProfileWindow
from jaxtrain.run.record import RunRecord
from jaxtrain.run.result import Result
from jaxtrain.run.sample import sample_text
from jaxtrain.run.step_log import StepLog
from jaxtrain.runtime import collector
from jaxtrain.train.assemble import Run
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
        record: the files that grow with the run.
        steps: measures and logs the steps.
        held_out: evaluates.
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
    record: RunRecord
    steps: StepLog
    held_out: HeldOut
    profile: ProfileWindow
    progress: Progress
    interrupt: Interrupt


def train_session(session: Session) -> Result:
    """Train to the last step, then evaluate, save, sample and report.

    Raises:
        PreemptedError: stopped by a signal; the state is saved.
        DivergedError: non-finite steps in a row.
        CheckpointError: a save failed.
    """
    last = session.run.config.train.steps
    session.record.begin(session.run)
    _make_up_evaluation(session)
    state, done = _train_steps(session) if session.start < last else (session.state, session.start)
    if done < last:
        _save(session, done, state)
        session.checkpointer.wait()
        raise PreemptedError(
            f"stopped after step {done} of {last}; saved in {session.run_dir / 'checkpoints'}: run again to go on"
        )
    spent = session.record.spent
    session.held_out.evaluate(done, state)
    _save(session, done, state)
    if session.record.draws_report:
        with spent.measure("saving"):
            session.checkpointer.wait()  # what follows may fail, and the run is saved whatever it does
        with spent.measure("evaluation"):
            session.record.held_out(held_out_details(session.run, state, done, session.progress))
    with spent.measure("sampling"):
        sample = sample_text(session.run, state, session.progress)
    if sample is not None:
        session.record.sample(last, sample)
    if session.start >= last:
        session.progress.message(
            f"already trained to step {session.start}: raise train.steps to go on, or start again with --resume never"
        )
    close_session(session, "done")
    _report(session, done, sample)
    return Result(session.run_dir, state, _final_metrics(session), done)


def close_session(session: Session, status: str) -> None:
    """Finish the last save, then close the files of the run with its status; a second call does nothing."""
    with session.record.spent.measure("saving"):
        session.checkpointer.close()
    session.record.close(status, _final_metrics(session), session.progress)


def _make_up_evaluation(session: Session) -> None:
    """Evaluate the state that the run goes on from, where that was due and the run stopped before it."""
    checkpointer, start, config = session.checkpointer, session.start, session.run.config
    if not 0 < start < config.train.steps or not _is_due(start, config.evaluation.every):
        return
    # Not when the run stops: a signal leaves little time, and the save comes first.
    if from_process_0(lambda: checkpointer.info(start).eval_loss is None):
        session.held_out.evaluate(start, session.state)
        loss = session.held_out.loss_after(start)
        if loss is not None:
            checkpointer.add_eval_loss(start, loss)


def _train_steps(session: Session) -> tuple[TrainState, int]:
    """Run the steps that are left; returns the state and the number of the last step that ran."""
    run, train, start = session.run, session.run.config.train, session.start
    depth = queue_depth(run.batches.spec()) if train.prefetch == "auto" else train.prefetch
    batches = prefetch(run.step.loader(run.batches), start, train.steps, depth=depth)
    session.progress.start(train.steps, start)
    try:
        return train_loop(
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


def _hooks(session: Session) -> Hooks:
    """What happens around the steps."""
    evaluate_every = session.run.config.evaluation.every
    save_every = session.run.config.checkpoint.every

    def finished(number: int, metrics: Mapping[str, jax.Array], seconds: float, waited: float) -> None:
        session.profile.after_step(number)
        session.steps.note(number, metrics, seconds, waited)
        collector.resume()  # beside the next step, which is under way

    def wants_pause(number: int) -> bool:
        session.checkpointer.check()
        return _is_due(number, save_every) or _is_due(number, evaluate_every)

    def pause(number: int, state: TrainState) -> None:
        if _is_due(number, evaluate_every):
            session.held_out.evaluate(number, state)
        if _is_due(number, save_every):
            _save(session, number, state)

    return Hooks(session.profile.before_step, finished, wants_pause, pause, session.interrupt.requested)


def _is_due(number: int, every: int | None) -> bool:
    return every is not None and number % every == 0


def _save(session: Session, number: int, state: TrainState) -> None:
    record, loss = session.record, session.held_out.loss_after(number)
    with record.spent.measure("saving"):
        session.checkpointer.save(number, state, metadata=session.metadata, eval_loss=loss)
    record.keep_time()


def _final_metrics(session: Session) -> dict[str, float | int | None]:
    """The last logged row with the last evaluation."""
    return {**session.steps.row, **session.held_out.metrics}


def _report(session: Session, done: int, sample: str | None) -> None:
    """Print the summary as the result of the command."""
    summary = [", ".join([f"done: step {done}", *shown_metrics(session.held_out.metrics)])]
    if session.run.config.logging.report:
        summary.append(f"report: {session.run_dir / 'report.html'}")
    session.progress.finish([*([f"sample: {sample}"] if sample else []), *summary])
