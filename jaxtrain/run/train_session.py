"""The training of a session: its steps, what happens between them, and how it ends."""

from collections.abc import Callable, Mapping

import jax

from jaxtrain.data import prefetch
from jaxtrain.data.prefetch import queue_depth
from jaxtrain.errors import DataError, PreemptedError
from jaxtrain.models.model import Params
from jaxtrain.models.task import Batch
from jaxtrain.run.bad_steps import BadSteps
from jaxtrain.run.compared import gone_back
from jaxtrain.run.go_back import frozen_params, restored_before
from jaxtrain.run.held_out import shown_metrics
from jaxtrain.run.interrupt import StoppedWaiting
from jaxtrain.run.loop import Hooks, is_due, train_loop
from jaxtrain.run.mistakes import held_out_details
from jaxtrain.run.result import Result
from jaxtrain.run.roll_back import SpikeError, batch_of, recorded, with_spike
from jaxtrain.run.sample import sample_text
from jaxtrain.run.session import (
    Session,
    add_evaluation,
    close_session,
    evaluate_state,
    final_metrics,
    lacks_evaluation,
    save_state,
    saved_on_failure,
    saving_on_failure,
    stop_run,
)
from jaxtrain.runtime import host
from jaxtrain.train.assemble import Run
from jaxtrain.train.state import TrainState
from jaxtrain.train.update import Metrics


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
        stop_run(session, done, state)
    is_repeated = (session.start >= last or had_stopped) and not lacks_evaluation(session)
    evaluate_state(session, done, state, is_repeated=is_repeated)
    save_state(session, done, state)
    if done == session.start and not is_repeated:
        add_evaluation(session, done)
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
    return Result(session.run_dir, state, final_metrics(session), done)


def _make_up_evaluation(session: Session) -> None:
    """Evaluate the state that the run goes on from, where that was due and the run stopped before it."""
    start, config = session.start, session.run.config
    if not 0 < start < config.train.steps or not is_due(start, config.evaluation.every):
        return
    # Not when the run stops: a signal leaves little time, and the save comes first.
    if lacks_evaluation(session):
        evaluate_state(session, start, session.state)
        add_evaluation(session, start)


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
        start, state = _gone_back(session, spike, frozen)
    # The loop pauses after a step only if another one follows.
    if done > start and session.watch.status is None:
        with saving_on_failure(session, done, state):
            session.watch.stepped(done, state)
    if session.watch.status is not None:
        session.steps.end()  # before the evaluation of that step
    return state, done


def _gone_back(session: Session, spike: SpikeError, frozen: Params | None) -> tuple[int, TrainState]:
    """The step of an earlier checkpoint and its state; what was noted of the steps after it is forgotten."""
    spikes = session.run.config.spikes
    assert spikes is not None, "no step is a spike without the group"
    session.saves.settle()
    with session.record.spent.measure("creating state"):
        spike, state = restored_before(
            session.run.step, session.checkpointer, spike, frozen, report=session.progress.message
        )
    session.activity.begins_at(spike.to_step)
    session.metadata.update(with_spike(session.metadata, spike, skip_batches=spikes.skip_batches))
    session.metadata.update(gone_back(session.metadata, spike.to_step))
    session.record.go_back(spike.to_step, session.metadata)
    session.steps.go_back()
    session.watch.go_back(spike.to_step)
    session.held_out.go_back()
    return spike.to_step, state


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
        settle=session.saves.settle,
        metadata=session.metadata,
        progress=session.progress,
        spent=session.record.spent,
    )
    session.progress.start(train.steps, start)
    fed = session.activity.fed(session.interrupt.until_asked(batches), first=start + 1)
    try:
        return train_loop(
            _checked(run, start),
            state,
            session.watch.following(bad_steps.following(fed, start + 1), start + 1),
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


def _checked(run: Run, start: int) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step itself where nothing is compared, else one that also compares."""
    checks = run.config.checks
    if checks is None or (checks.replay_every is None and checks.replicas_every is None):
        return run.step
    from jaxtrain.run.replicas import CheckedStep

    return CheckedStep(run.step, checks, start=start)


def _hooks(session: Session, bad_steps: BadSteps) -> Hooks:
    """What happens around the steps."""
    evaluate_every, wants_save = session.run.config.evaluation.every, [False]  # after the last step

    def finished(number: int, metrics: Mapping[str, jax.Array], seconds: float, waited: float) -> float:
        session.activity.finished(number, seconds)
        session.profile.after_step(number)
        session.steps.note(number, metrics, seconds, waited)
        session.watch.note(metrics)
        looked = bad_steps.note(number, metrics)
        host.resume_collector()  # beside the next step, which is under way
        return looked

    def wants_pause(number: int) -> bool:
        session.saves.check()
        if not session.saves.is_writing:
            session.activity.writes(None)
        wants_save[0] = session.saves.is_due(number)
        return wants_save[0] or is_due(number, evaluate_every) or session.watch.is_due(number)

    def pause(number: int, state: TrainState) -> bool:
        with saving_on_failure(session, number, state):
            session.watch.stepped(number, state)
        if is_due(number, evaluate_every):
            evaluate_state(session, number, state)
        # A run that stops is saved at its end.
        if session.watch.status is None and (wants_save[0] or session.watch.wants_save(number)):
            save_state(session, number, state)
        return session.watch.status is not None

    def data_failed(number: int, state: TrainState, error: Exception) -> None:
        if isinstance(error, StoppedWaiting):
            stop_run(session, number, state)
        is_line = isinstance(error, DataError)
        if saved_on_failure(session, number, state, says=not is_line) and is_line:
            where = f"step {number} is saved in {session.checkpointer.directory}"
            raise DataError(f"{error}; {where}: run again with such data to go on") from error

    def stop_requested(number: int) -> bool:
        return session.interrupt.requested()

    return Hooks(session.profile.before_step, finished, wants_pause, pause, stop_requested, data_failed)


def _report(session: Session, done: int, sample: str | None) -> None:
    """Print the summary as the result of the command."""
    summary = [", ".join([f"done: step {done}", *shown_metrics(session.held_out.metrics)])]
    if session.watch.status is not None and done < session.run.config.train.steps:
        summary.append(f"{session.watch.status} before step {session.run.config.train.steps}: {session.watch.reason}")
    if session.run.config.logging.report:
        summary.append(f"report: {session.run_dir / 'report.html'}")
    session.progress.finish([*([f"sample: {sample}"] if sample else []), *summary])
