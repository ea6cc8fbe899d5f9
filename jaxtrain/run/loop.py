"""The training loop: dispatch step k + 1, then read what step k gave, so that the device never waits for the host."""

import time
from collections.abc import Callable

import jax

from jaxtrain.data import prefetch
from jaxtrain.data.batches import queue_depth
from jaxtrain.errors import DataError, DivergedError, PreemptedError
from jaxtrain.models.task import Batch
from jaxtrain.run.bad_steps import BadSteps, CheckedStep
from jaxtrain.run.evaluation import held_out_details
from jaxtrain.run.interrupt import StoppedWaiting
from jaxtrain.run.restore import frozen_params, restored_state
from jaxtrain.run.resume import SpikeError, batch_of, recorded, with_spike
from jaxtrain.run.sample import sample_text
from jaxtrain.run.saving import is_due
from jaxtrain.run.session import (
    Session,
    add_evaluation,
    close_session,
    evaluate_state,
    lacks_evaluation,
    save_on_failure,
    save_state,
    saving_on_failure,
    shown_metrics,
    stop_run,
)
from jaxtrain.runtime import host
from jaxtrain.train.assemble import Run
from jaxtrain.train.base import with_base
from jaxtrain.train.state import TrainState
from jaxtrain.train.update import Metrics


class StepClock:
    """Seconds of each step: its own wait for data and its own work, without the pauses between the steps."""

    def begin(self) -> None:
        """The work of a step begins, with no other step under way."""
        self._end = time.perf_counter()

    def done(self, waited: float, next_wait: float) -> float:
        """The seconds of the step that is done, which `waited` itself; the step after it has waited meanwhile too."""
        now = time.perf_counter()
        seconds, self._end = now - self._end - next_wait + waited, now
        return seconds

    def leave_out(self, seconds: float) -> None:
        """Seconds since the last step are of no step."""
        self._end += seconds


def _given_up(in_a_row: int, number: int, metrics: Metrics) -> str:
    if "spiked" in metrics and int(metrics["spiked"]):
        return (
            f"loss or gradient norm were spikes (or not finite) {in_a_row} steps in a row, up to step {number}; "
            "parameters are as before them: lower optimizer.learning_rate, look at the data from there on, raise "
            "spikes.sigmas, or set spikes=null"
        )
    return (
        f"gradients were not finite {in_a_row} steps in a row, up to step {number}; parameters are as "
        "before them: lower optimizer.learning_rate, add warmup_steps, lower optimizer.clip_norm, or use "
        "precision.policy=bf16 or fp32"
    )


def train(session: Session) -> tuple[TrainState, int]:
    """Train to the last step, or until the run stops early; then evaluate, save, sample and report."""
    last, watch, start, state = session.run.config.train.steps, session.watch, session.start, session.state
    had_ended, done = start >= last or watch.status is not None, start
    session.record.begin()
    if not had_ended:
        if start and is_due(start, session.run.config.evaluation.every) and lacks_evaluation(session):
            # It was due, and a signal left no time for it.
            evaluate_state(session, start, state)
            add_evaluation(session, start)
        if watch.status is None:
            state, done = _train_steps(session)
    if done < last and watch.status is None:
        stop_run(session, done, state)
    is_repeated = had_ended and not lacks_evaluation(session)
    evaluate_state(session, done, state, is_repeated=is_repeated)
    save_state(session, done, state)
    if done == start and not is_repeated:
        add_evaluation(session, done)
    sample = _finish(session, done, state)
    if had_ended:
        how, key = ("trained to", "train.steps") if start >= last else ("stopped early at", "the patience")
        session.progress.message(f"already {how} step {done}: raise {key} to go on, or start again with --resume never")
    close_session(session, "done" if done >= last else watch.status or "done")
    summary = [", ".join([f"done: step {done}", *shown_metrics(session.metrics)])]
    if watch.status is not None and done < last:
        summary.append(f"{watch.status} before step {last}: {watch.reason}")
    if session.run.config.logging.report:
        summary.append(f"report: {session.run_dir / 'report.html'}")
    session.progress.finish([*([f"sample: {sample}"] if sample else []), *summary])
    return state, done


def _finish(session: Session, done: int, state: TrainState) -> str | None:
    """Do what only reads the state, which is saved: a signal leaves it for the next start. Returns the sample."""
    spent, record = session.record.spent, session.record
    with session.interrupt.free_to_leave(lambda: close_session(session, "preempted")):
        if session.run.config.logging.report:
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
        session.saves.settle()
        with session.record.spent.measure("creating state"):
            # The next save abandons those after it.
            state = restored_state(session.run.step, session.checkpointer, spike.to_step)
            state = state if frozen is None else with_base(state, frozen)
        start = spike.to_step
        _go_back(session, spike)
    # The loop pauses after a step only if another one follows.
    if done > start and session.watch.status is None:
        with saving_on_failure(session, done, state):
            session.watch.stepped(done, state)
    if session.watch.status is not None:
        session.steps.end()  # before the evaluation of that step
    return state, done


def _go_back(session: Session, spike: SpikeError) -> None:
    """Forget what was noted of the steps after the one that the run goes back to."""
    spikes, metadata, step = session.run.config.spikes, session.metadata, spike.to_step
    assert spikes is not None, "no step is a spike without the group"
    session.activity.begins_at(step)
    metadata.update(with_spike(metadata, spike, skip_batches=spikes.skip_batches))
    session.record.go_back(step, metadata)
    session.steps.go_back()
    session.watch.go_back(step)
    session.metrics, session.evaluated = {}, None


def _run_steps(session: Session, start: int, state: TrainState) -> tuple[TrainState, int]:
    """Run the steps from a state on, which is donated; a SpikeError says that the run is to go back."""
    run, train, interrupt = session.run, session.run.config.train, session.interrupt
    step = _checked(run, start)
    depth = queue_depth(run.batches.spec()) if train.prefetch == "auto" else train.prefetch
    load, rolled_back = run.step.loader(run.batches), recorded(session.metadata)
    loaded = prefetch(lambda k: load(batch_of(k, rolled_back)), start, train.steps, depth=depth)
    bad_steps = BadSteps(
        run,
        session.run_dir,
        checkpointer=session.checkpointer,
        settle=session.saves.settle,
        metadata=session.metadata,
        progress=session.progress,
        spent=session.record.spent,
    )
    profile = _Profile(session)
    session.progress.start(train.steps, start)
    fed = session.activity.fed(interrupt.until_asked(loaded), first=start + 1)
    batches = session.watch.following(fed, start + 1)
    clock, pending = StepClock(), None  # a step that was dispatched and not yet read: number, metrics, its wait

    def settle(next_wait: float = 0.0) -> None:
        """Wait for the pending step and note it."""
        nonlocal pending
        if pending is None:
            return
        (number, metrics, waited), pending = pending, None
        in_a_row = int(metrics["skipped_in_a_row"])
        seconds = clock.done(waited, next_wait)
        session.activity.finished(number, seconds)
        profile.after_step(number)
        session.steps.note(number, metrics, seconds, waited)
        session.watch.metrics = metrics
        clock.leave_out(bad_steps.note(number, metrics))
        host.resume_collector()  # beside the next step, which is under way
        if in_a_row >= train.max_skipped_in_a_row:
            raise DivergedError(_given_up(in_a_row, number, metrics))

    try:
        for number in range(start + 1, train.steps + 1):
            profile.before_step(number)
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except PreemptedError:
                raise
            except Exception as error:
                settle()
                if number > start + 1:
                    _data_failed(session, number - 1, state, error)
                raise
            waited = time.perf_counter() - asked
            if pending is None:
                clock.begin()
            state, metrics = step(state, batch)
            settle(waited)
            pending = number, metrics, waited
            if interrupt.requested() or number == train.steps:
                break
            session.saves.check()
            if not session.saves.is_writing:
                session.activity.writes(None)
            wants_save = session.saves.is_due(number)
            if wants_save or is_due(number, run.config.evaluation.every) or session.watch.is_due(number):
                settle()
                if _pause(session, number, state, wants_save):
                    break
        settle()
        return state, number
    except StoppedWaiting:
        if start:  # before the first step: the state is the one that they begin with
            return state, start
        raise PreemptedError(
            f"stopped before the first step of {train.steps}{interrupt.seconds_since()}; nothing is lost: run again "
            "to start"
        ) from None
    finally:
        loaded.close()
        profile.stop()


def _checked(run: Run, start: int) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step itself where nothing is compared, else one that also compares."""
    every = None if run.config.checks is None else run.config.checks.replicas_every
    return run.step if every is None else CheckedStep(run.step, every, start=start)


def _pause(session: Session, number: int, state: TrainState, wants_save: bool) -> bool:
    """Callbacks, evaluation and save between two steps, with nothing in flight; whether the run stops here."""
    with saving_on_failure(session, number, state):
        session.watch.stepped(number, state)
    if is_due(number, session.run.config.evaluation.every):
        evaluate_state(session, number, state)
    # A run that stops is saved at its end.
    if session.watch.status is None and (wants_save or session.watch.wants_save(number)):
        save_state(session, number, state)
    return session.watch.status is not None


def _data_failed(session: Session, number: int, state: TrainState, error: Exception) -> None:
    """Save the state after the last step that had a batch."""
    if isinstance(error, StoppedWaiting):
        stop_run(session, number, state)
    is_line = isinstance(error, DataError)
    if save_on_failure(session, number, state, says=not is_line) and is_line:
        where = f"step {number} is saved in {session.checkpointer.directory}"
        raise DataError(f"{error}; {where}: run again with such data to go on") from error


_PROFILED_STEPS = 3


class _Profile:
    """Traces the steps that `profile` of the config asks for into `profile/` of the run directory."""

    def __init__(self, session: Session) -> None:
        self._window, self._folder = session.run.config.profile, session.run_dir / "profile"
        self._progress, self._is_running = session.progress, False

    def before_step(self, number: int) -> None:
        if number - 1 == self._window.start_step:
            jax.profiler.start_trace(str(self._folder))
            self._is_running = True

    def after_step(self, number: int) -> None:
        start = self._window.start_step
        if start is not None and number == start + _PROFILED_STEPS:
            self.stop()

    def stop(self) -> None:
        if self._is_running:
            self._is_running = False
            jax.profiler.stop_trace()
            self._progress.message(f"profile: {self._folder}")
