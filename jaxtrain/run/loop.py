"""The training loop: dispatch step k + 1, then read what step k gave, so that the device never waits for the host."""

import time
from collections.abc import Mapping

import jax

from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config.schema import SpikeRule
from jaxtrain.data import prefetch
from jaxtrain.data.batches import queue_depth
from jaxtrain.errors import DataError, DivergedError, PreemptedError
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.checkpointing import is_due
from jaxtrain.run.session import Session, shown_metrics
from jaxtrain.run.signals import StoppedWaiting
from jaxtrain.runtime import host
from jaxtrain.train.state import TrainState
from jaxtrain.train.update import Metrics

_PROFILED_STEPS = 3
# Lines on bad steps of one process; after these the counts of skipped steps go on alone.
_MOST_SHOWN = 10


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


def train(session: Session) -> tuple[TrainState, int]:
    """Train to the last step, or until the run stops early; then evaluate, save, sample and report."""
    config, watch, done, state = session.run.config, session.watch, session.start, session.state
    last, sample = config.train.steps, None
    if not session.is_over:
        session.record.begin()
        was_due = done and (session.has_ended or is_due(done, config.evaluation.every))
        if was_due and from_process_0(lambda: int(session.checkpointer.info(done).eval_loss is None)):
            # A signal left no time for it.
            session.evaluate(done, state)
            session.add_evaluation(done)
        if not session.has_ended and watch.status is None:
            state, done = _run_steps(session)
            # The loop pauses after a step only if another one follows.
            if done > session.start and watch.status is None:
                with session.saving_on_failure(done, state):
                    watch.stepped(done, state)
            session.steps.end()  # before the evaluation of that step
        if done < last and watch.status is None:
            session.stop(done, state)
        session.evaluate(done, state)
        session.save(done, state)
        sample = _sampled(session, done, state)
    session.close("done" if done >= last else watch.status or "done")
    evaluated = {name: value for name, value in session.final_metrics().items() if name.startswith("eval_")}
    summary = [f"sample: {sample}"] if sample else []
    summary.append(", ".join([f"done: step {done}", *shown_metrics(evaluated)]))
    if watch.status is not None and done < last:
        summary.append(f"{watch.status} before step {last}: {watch.reason}")
    if config.logging.report:
        summary.append(f"report: {session.run_dir / 'report.html'}")
    session.progress.finish(summary)
    return state, done


def _sampled(session: Session, done: int, state: TrainState) -> str | None:
    """A sample of the state, which is saved: a signal leaves it for the next start."""
    spent, record = session.record.spent, session.record
    with session.interrupt.free_to_leave(lambda: session.close("preempted")):
        with spent.measure("saving"):
            session.saves.wait(hurry=True)  # what follows may fail, and the run is saved whatever it does
        with spent.measure("sampling"):
            from jaxtrain.run.sample import sample_text

            sample = sample_text(session.run, state, session.progress)
        if sample is not None:
            record.sample(done, sample)
    return sample


def _run_steps(session: Session) -> tuple[TrainState, int]:
    """Run the steps that are left; returns the state and the number of the last step that ran."""
    run, config, interrupt = session.run, session.run.config.train, session.interrupt
    start, state = session.start, session.state
    depth = queue_depth(run.batches.spec()) if config.prefetch == "auto" else config.prefetch
    loaded = prefetch(run.step.loader(run.batches), start, config.steps, depth=depth)
    bad_steps = _BadSteps(run.config.spikes, session.progress)
    profile = _Profile(session)
    session.progress.start(config.steps, start)
    batches = session.activity.fed(interrupt.until_asked(loaded), first=start + 1)
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
        bad_steps.note(number, metrics)
        host.resume_collector()  # beside the next step, which is under way
        if in_a_row >= config.max_skipped_in_a_row:
            raise DivergedError(_given_up(in_a_row, number, metrics))

    try:
        for number in range(start + 1, config.steps + 1):
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
            state, metrics = run.step(state, batch)
            settle(waited)
            pending = number, metrics, waited
            if interrupt.requested() or number == config.steps:
                break
            wants_save = session.saves.is_due(number)
            if wants_save or is_due(number, run.config.evaluation.every) or session.watch.sees(number):
                settle()
                if _pause(session, number, state, wants_save):
                    break
        settle()
        return state, number
    except StoppedWaiting:
        if start:  # before the first step: the state is the one that they begin with
            return state, start
        raise PreemptedError(
            f"stopped before the first step of {config.steps}{interrupt.seconds_since()}; nothing is lost: run again "
            "to start"
        ) from None
    finally:
        loaded.close()
        profile.stop()


def _given_up(in_a_row: int, number: int, metrics: Metrics) -> str:
    what, try_this = "gradients were not finite", "add warmup_steps, or use precision.policy=bf16 or fp32"
    if "spiked" in metrics and int(metrics["spiked"]):
        what, try_this = "loss or gradient norm were spikes (or not finite)", "raise spikes.sigmas, or set spikes=null"
    return (
        f"{what} {in_a_row} steps in a row, up to step {number}; parameters are as before them: lower "
        f"optimizer.learning_rate, {try_this}"
    )


def _pause(session: Session, number: int, state: TrainState, wants_save: bool) -> bool:
    """Callbacks, evaluation and save between two steps, with nothing in flight; whether the run stops here."""
    with session.saving_on_failure(number, state):
        session.watch.stepped(number, state)
    if is_due(number, session.run.config.evaluation.every):
        session.evaluate(number, state)
    # A run that stops is saved at its end.
    if session.watch.status is None and (wants_save or session.watch.wants_save(number)):
        session.save(number, state)
    return session.watch.status is not None


def _data_failed(session: Session, number: int, state: TrainState, error: Exception) -> None:
    """Save the state after the last step that had a batch."""
    if isinstance(error, StoppedWaiting):
        session.stop(number, state)
    is_line = isinstance(error, DataError)
    if session.save_on_failure(number, state, says=not is_line) and is_line:
        where = f"step {number} is saved in {session.checkpointer.directory}"
        raise DataError(f"{error}; {where}: run again with such data to resume") from error


class _BadSteps:
    """Says which steps were skipped, by their metrics once they are done."""

    def __init__(self, spikes: SpikeRule | None, progress: Progress) -> None:
        self._spikes, self._progress, self._shown = spikes, progress, 0

    def note(self, number: int, metrics: Mapping[str, jax.Array]) -> None:
        """Look at the metrics of a step that is done."""
        is_spike = self._spikes is not None and bool(metrics["spiked"])
        # A batch without weight is skipped without a fault.
        is_empty = float(metrics["weight"]) == 0 and float(metrics["grad_norm"]) == 0
        if not (is_spike or (int(metrics["skipped_in_a_row"]) and not is_empty)) or self._shown >= _MOST_SHOWN:
            return
        self._shown += 1
        numbers = f"loss {float(metrics['loss']):.4g}, gradient norm {float(metrics['grad_norm']):.4g}"
        what = "is not finite"
        if is_spike and self._spikes is not None:
            what = (
                f"is a spike, more than {self._spikes.sigmas:g} deviations above the last {self._spikes.window} steps"
            )
        self._progress.message(f"step {number} {what}: {numbers}; batch {number - 1} is skipped")


class _Profile:
    """Traces the steps that `profile` of the config asks for into `profile/` of the run directory."""

    def __init__(self, session: Session) -> None:
        self._start, self._folder = session.run.config.profile.start_step, session.run_dir / "profile"
        self._progress, self._is_running = session.progress, False

    def before_step(self, number: int) -> None:
        if number - 1 == self._start:
            jax.profiler.start_trace(str(self._folder))
            self._is_running = True

    def after_step(self, number: int) -> None:
        if self._start is not None and number == self._start + _PROFILED_STEPS:
            self.stop()

    def stop(self) -> None:
        if self._is_running:
            self._is_running = False
            jax.profiler.stop_trace()
            self._progress.message(f"profile: {self._folder}")
