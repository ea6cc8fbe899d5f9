"""The training loop: dispatch step k + 1, then read what step k gave, so that the device never waits for the host."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxtrain.data import prefetch
from jaxtrain.data.prefetch import queue_depth
from jaxtrain.errors import DataError, DivergedError, PreemptedError
from jaxtrain.models.task import Batch
from jaxtrain.run.bad_steps import BadSteps, CheckedStep
from jaxtrain.run.interrupt import StoppedWaiting
from jaxtrain.run.mistakes import held_out_details
from jaxtrain.run.restore import frozen_params, state_before
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
from jaxtrain.run.spikes import SpikeError, batch_of, recorded, with_spike
from jaxtrain.run.step_log import ProfileWindow
from jaxtrain.runtime import host
from jaxtrain.train.assemble import Run
from jaxtrain.train.state import TrainState
from jaxtrain.train.update import Metrics


@dataclass(frozen=True)
class Hooks:
    """What happens around the steps; each is a plain function of the number of a step.

    Attributes:
        before_step: before the batch of this step is taken.
        finished: (number, metrics on the device, seconds, data wait), once a step is known to be done -> seconds of the
            call that are not to be counted as the time of the next step.
        wants_pause: whether `pause` is to run after this step (evaluation, a save).
        pause: with nothing in flight -> whether to stop after this step.
        stop_requested: whether to stop after this step; asked after every step.
        data_failed: before the error of the batch after this step is raised.
    """

    before_step: Callable[[int], None]
    finished: Callable[[int, Mapping[str, jax.Array], float, float], float | None]
    wants_pause: Callable[[int], bool]
    pause: Callable[[int, TrainState], bool]
    stop_requested: Callable[[int], bool]
    data_failed: Callable[[int, TrainState, Exception], None] = lambda number, state, error: None


def train_loop(
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]],
    state: TrainState,
    batches: Iterator[Any],
    *,
    first: int,
    last: int,
    max_skipped_in_a_row: int,
    hooks: Hooks,
) -> tuple[TrainState, int]:
    """Run steps `first` to `last` (counted from 1); returns the state and the number of the last step that ran.

    The state is donated; batches are on the mesh. After `max_skipped_in_a_row` non-finite steps or spikes training is
    given up; the state before them is intact.
    """
    pending: tuple[int, Metrics, float] | None = None  # a step that was dispatched and not yet read
    clock = time.perf_counter()

    def settle(next_wait: float = 0.0) -> None:
        """Wait for the pending step and report it; `next_wait` seconds since the step before were the next one's."""
        nonlocal pending, clock
        if pending is None:
            return
        (number, metrics, waited), pending = pending, None
        in_a_row = int(metrics["skipped_in_a_row"])
        now = time.perf_counter()
        seconds = now - clock - next_wait + waited
        clock = now + (hooks.finished(number, metrics, seconds, waited) or 0.0)
        if in_a_row >= max_skipped_in_a_row:
            raise DivergedError(_given_up(in_a_row, number, metrics))

    for number in range(first, last + 1):
        hooks.before_step(number)
        asked = time.perf_counter()
        try:
            batch = next(batches)
        except PreemptedError:
            raise
        except Exception as error:
            settle()
            if number > first:
                hooks.data_failed(number - 1, state, error)
            raise
        received = time.perf_counter()
        waited = received - asked
        if pending is None:
            clock = received
        state, metrics = step(state, batch)
        settle(waited)
        pending = number, metrics, waited
        stop = hooks.stop_requested(number)
        if stop or number == last or hooks.wants_pause(number):
            settle()
            if stop or number == last or hooks.pause(number, state):
                return state, number
    return state, first - 1


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
    had_ended = start >= last or watch.status is not None
    session.record.begin()
    done = start
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
            state = state_before(session.run.step, session.checkpointer, spike, frozen)
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
    """Run the steps from a state on; a SpikeError says that the run is to go back."""
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
    profile = ProfileWindow(run.config.profile, session.run_dir, session.progress)
    session.progress.start(train.steps, start)
    fed = session.activity.fed(session.interrupt.until_asked(batches), first=start + 1)
    try:
        return train_loop(
            _checked(run, start),
            state,
            session.watch.following(fed, start + 1),
            first=start + 1,
            last=train.steps,
            max_skipped_in_a_row=train.max_skipped_in_a_row,
            hooks=_hooks(session, bad_steps, profile),
        )
    except StoppedWaiting:
        if start:  # before the first step: the state is the one that they begin with
            return state, start
        raise PreemptedError(
            f"stopped before the first step of {train.steps}{session.interrupt.seconds_since()}; nothing is lost: "
            "run again to start"
        ) from None
    finally:
        batches.close()
        profile.stop()


def _checked(run: Run, start: int) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step itself where nothing is compared, else one that also compares."""
    every = None if run.config.checks is None else run.config.checks.replicas_every
    return run.step if every is None else CheckedStep(run.step, every, start=start)


def _hooks(session: Session, bad_steps: BadSteps, profile: ProfileWindow) -> Hooks:
    """What happens around the steps of a run."""
    evaluate_every, wants_save = session.run.config.evaluation.every, [False]  # after the last step

    def finished(number: int, metrics: Mapping[str, jax.Array], seconds: float, waited: float) -> float:
        session.activity.finished(number, seconds)
        profile.after_step(number)
        session.steps.note(number, metrics, seconds, waited)
        session.watch.metrics = metrics
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
        if save_on_failure(session, number, state, says=not is_line) and is_line:
            where = f"step {number} is saved in {session.checkpointer.directory}"
            raise DataError(f"{error}; {where}: run again with such data to go on") from error

    def stop_requested(number: int) -> bool:
        return session.interrupt.requested()

    return Hooks(profile.before_step, finished, wants_pause, pause, stop_requested, data_failed)
