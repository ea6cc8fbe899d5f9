"""One run, read from top to bottom: open the data, build, start or restore, train, evaluate, save, report, close.

`train` holds what a run needs around it: signals, the lock of its directory, the watchdog. `Trainer` has the phases in
the order in which a run passes them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config.kinds import check_kinds
from jaxtrain.config.schema import limits
from jaxtrain.data import prefetch
from jaxtrain.data.batches import queue_depth
from jaxtrain.data.configured import open_run_data
from jaxtrain.errors import ConfigError, DivergedError, PreemptedError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.rules import config_degrees
from jaxtrain.metrics.evaluation import TO_HOLD_OUT
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.runinfo import read_run_info, run_text
from jaxtrain.metrics.throughput import StepClock, TimeSpent
from jaxtrain.metrics.trackers import check_trackers
from jaxtrain.metrics.utilization import step_meter
from jaxtrain.metrics.writers import Scalars
from jaxtrain.run.agreement import run_facts, spec_facts
from jaxtrain.run.assemble import Run, assemble
from jaxtrain.run.callbacks import EARLY_STOPPED, Watch
from jaxtrain.run.checkpointing import RunSaves, is_due
from jaxtrain.run.compiling import TracedStep, compile_step
from jaxtrain.run.directory import lock_run
from jaxtrain.run.evaluation import HeldOut
from jaxtrain.run.messages import BadSteps, diverged, first_lines, last_lines, shown_metrics
from jaxtrain.run.profiling import Profile
from jaxtrain.run.record import RunRecord, StepLog
from jaxtrain.run.resume import (
    check_code,
    check_resumed,
    choose_start,
    run_identity,
    run_metadata,
)
from jaxtrain.run.sample import sample_text
from jaxtrain.run.signals import Interrupt, StoppedWaiting, handle_signals
from jaxtrain.run.spec import RunSpec
from jaxtrain.run.start import describe_start, resumed_state, start_notes, start_of, trained_leaves
from jaxtrain.run.watchdog import Activity, watched
from jaxtrain.runtime import host
from jaxtrain.runtime.distributed import check_devices, is_main_process, on_main_process, together
from jaxtrain.train.state import TrainState
from jaxtrain.train.update import Metrics
from jaxtrain.weights.base import BaseRecord, without_base
from jaxtrain.weights.load import load_weights

_STATUS: dict[type[BaseException], str] = {
    PreemptedError: "preempted",
    DivergedError: "diverged",
    KeyboardInterrupt: "stopped",
}


@dataclass(frozen=True)
class Result:
    """How a run ended; where a path of a run is taken, so is the result.

    Attributes:
        run_dir: where everything was written.
        state: the last state, on the mesh.
        metrics: last logged row and evaluation.
        step: steps done.

    Example:
        >>> overrides = {"train.steps": 2, "logging.report": False}
        >>> result = jt.run_config("digits_mlp", overrides=overrides, run_dir="runs/two")
        done: step 2, eval accuracy ..., eval loss ...
        >>> result.step, "eval_loss" in result.metrics
        (2, True)
    """

    run_dir: Path
    state: TrainState
    metrics: Mapping[str, float | int | None]
    step: int

    def __fspath__(self) -> str:
        return str(self.run_dir)

    def __repr__(self) -> str:
        return f"Result of {run_text(self.run_dir)}"


def train(spec: RunSpec) -> Result:
    """Train a run to its end, in a process that has started; every process of the run calls this.

    Raises:
        ConfigError, DataError, CheckpointError: before training starts.
        DivergedError: non-finite steps in a row.
        PreemptedError: stopped by a signal; the state is saved.
    """
    if jax.process_count() > 1:
        check_devices()
        together(lambda: None, says=lambda _: spec_facts(spec))
    else:  # of several, only the main process needs the packages
        check_trackers(spec.config.logging)
    progress = spec.progress or Progress(process_index=0 if is_main_process() else 1)
    with (
        handle_signals() as interrupt,
        progress,
        on_main_process(lock_run(spec.run_dir)),
        watched(limits(spec.config.watchdog), spec.run_dir) as activity,
    ):
        with interrupt.free_to_leave():
            trainer = Trainer(spec, progress, interrupt, activity)
        with _closing_on_failure(trainer.close):
            return trainer.train()


@contextlib.contextmanager
def _closing_on_failure(close: Callable[[str], None]) -> Iterator[None]:
    """Close with the status of what went wrong (preempted, diverged, stopped or failed), and raise that."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):
            close(_STATUS.get(type(error), "failed"))
        raise


class Trainer:
    """A run that is open: its step, its state, and what follows the steps.

    Attributes:
        state: the state after the last step that was dispatched.
        step: the number of that step; 0: none.
    """

    # --- Open the data, build the step, start or restore. ---

    def __init__(self, spec: RunSpec, progress: Progress, interrupt: Interrupt, activity: Activity) -> None:
        self.spec = spec
        self.progress = progress
        self.interrupt = interrupt
        self.activity = activity
        self.spent = TimeSpent(during=activity.during)
        with self.spent.measure("reading data"):
            self.run = together(self._open, says=run_facts)
        self.metadata = run_metadata(self.run)
        self.saves = RunSaves(
            self.run.config.checkpoint,
            spec.run_dir,
            name=spec.loaded.name,
            identity=run_identity(self.metadata),
            resume=spec.resume,
            report=progress.message,
        )
        self.checkpointer = self.saves.checkpointer
        with _closing_on_failure(lambda status: self.checkpointer.close()):
            self.record = RunRecord(spec.run_dir, self.spent, report=progress.message)
            self.evaluation = HeldOut(self.run)
            step = self.run.step
            self.meter = step_meter(
                self.run.config,
                step.model if spec.model is None else None,
                self.run.data,
                num_devices=step.mesh.size,
                reference=step.task.reads_reference,
            )
            resumed = choose_start(self.checkpointer, spec.resume)
            if resumed is None:
                base = self._begin()
            else:
                base = self._resume(resumed)
            self.metadata["base"] = None if base is None else base.as_json()
            is_closed = self._has_ended() and _has_closed(spec.run_dir)
            if not is_closed:
                self.record.open(self.run, self.metadata, start=self.step)
            self.is_closed = is_closed
            self.steps = StepLog(self.run, meter=self.meter, record=self.record, spent=self.spent, progress=progress)

    def _open(self) -> Run:
        """Read the data and build the step; degrees and kinds that do not fit fail before any data is read."""
        spec = self.spec
        config = spec.config
        if spec.mesh is None:
            make_mesh(**config_degrees(config.parallel), devices=None)
        if spec.model is None and spec.data is None:
            check_kinds(config, own_task=spec.task is not None)
        with self.progress.phase("reading data") as phase:
            data = open_run_data(config) if spec.data is None else spec.data
            phase.note(data.description[0] if data.description else "")
        if config.evaluation.early_stopping is not None and data.validation is None:
            raise ConfigError(f"evaluation.early_stopping needs held-out rows, and the data has none; {TO_HOLD_OUT}")
        return assemble(spec, data)

    def _trace(self, notes: list[str]) -> TracedStep:
        """Show what is going to run, and trace its step."""
        units = f"{self.meter.units_per_step:,.0f} {self.run.data.unit}"
        for line in first_lines(self.run, [*self.spec.loaded.notes, *notes], units=units):
            self.progress.message(line)
        with self.spent.measure("compiling"):
            traced = together(lambda: TracedStep(self.run, self.progress))
        self.metadata["code"] = traced.code
        return traced

    def _begin(self) -> BaseRecord | None:
        """Compile the step and create the first state; return the base of its adapters, if it has any."""
        run = self.run
        traced = self._trace(start_notes(run))
        start = start_of(run)
        with ThreadPoolExecutor(1) as pool:
            # Compiling the initialization takes about as long as compiling the step, so the two run side by side.
            created = pool.submit(lambda: run.step.init(run.config.seed, load_weights(run.step, **start)))
            with self.spent.measure("compiling"):
                compile_step(run, traced, self.progress, created)
            with self.progress.phase("creating state"), self.spent.measure("creating state"):
                self.state = jax.block_until_ready(created.result())
                base = describe_start(run, self.state, start)
        self.step = 0
        self._begin_watching()
        # Only once the step runs: a mistake that shows in compiling leaves an earlier run as it was.
        if is_main_process():
            self.saves.set_earlier_aside()
        return base

    def _resume(self, saved_step: int) -> BaseRecord | None:
        """Restore the newest state if this run may go on from it, and compile the step if one is left."""
        spec = self.spec
        changes = check_resumed(
            self.checkpointer,
            self.run.step,
            self.metadata,
            run_dir=spec.run_dir,
            may_change=spec.resume is not None,
        )
        together(self.saves.restore_metrics)
        traced = self._trace([])
        saved = self.checkpointer.metadata()
        may_change = spec.resume == "must"
        same = together(lambda: check_code(saved, self.metadata, changes, run_dir=spec.run_dir, may_change=may_change))
        self.progress.message(f"resuming step {saved_step} from {self.checkpointer.directory}: {same}")
        with self.progress.phase("restoring checkpoint"), self.spent.measure("creating state"):
            self.state, base = resumed_state(self.run, self.checkpointer)
        self.step = int(self.state.step)
        self._begin_watching()
        if self._has_ended():
            self.evaluation.take_logged(self.step)
            how = "stopped early at"
            key = "evaluation.early_stopping.patience"
            if self.step >= self.run.config.train.steps:
                how = "trained to"
                key = "train.steps"
            self.progress.message(
                f"already {how} step {self.step}: raise {key} to continue, or start again with --resume never"
            )
        else:
            with self.spent.measure("compiling"):
                compile_step(self.run, traced, self.progress)
        return base

    def _begin_watching(self) -> None:
        """Follow the steps after the one that the state is of."""
        spec = self.spec
        self.watch = Watch(self.run.config, spec.run_dir, spec.callbacks, start=self.step, log=self.record.log)

    def _has_ended(self) -> bool:
        """Return whether no step is left to train."""
        return self.step >= self.run.config.train.steps or self.watch.status is not None

    # --- Train, evaluate, save, report, close. ---

    def train(self) -> Result:
        """Train to the last step, or until the run stops early; then evaluate, save, sample and report."""
        sample = None
        if not self.is_closed:
            self.record.begin()
            self._evaluate_late()
            if not self._has_ended():
                self._train_steps()
            self._evaluate()
            self._save()
            sample = self._sample()
        status = "done"
        stopped = None
        last = self.run.config.train.steps
        if self.step < last and self.watch.status is not None:
            status = self.watch.status
            stopped = f"{status} before step {last}: {self.watch.reason}"
        self.close(status)
        metrics = self._final_metrics()
        self.progress.finish(last_lines(self.run, self.step, metrics, sample=sample, stopped=stopped))
        return Result(self.spec.run_dir, self.state, metrics, self.step)

    def _evaluate_late(self) -> None:
        """Evaluate the state that was restored, if its evaluation was due and a signal left no time for it."""
        if not self.step or not (self._has_ended() or is_due(self.step, self.run.config.evaluation.every)):
            return
        step = self.step
        if from_process_0(lambda: int(self.checkpointer.info(step).eval_loss is None)):
            self._evaluate()
            loss = self.evaluation.loss_after(step)
            # A save may have failed; the wait for it says so.
            if loss is not None and from_process_0(lambda: int(step in self.checkpointer.steps())):
                self.checkpointer.add_eval_loss(step, loss, score=self.watch.score_after(step))

    def _train_steps(self) -> None:
        """Run the steps that are left: dispatch a step, then read the one before, so that no device waits for the host.

        Raises:
            DivergedError: too many skipped steps in a row.
            PreemptedError: the run is to stop.
        """
        run = self.run
        settings = run.config.train
        first = self.step + 1
        depth = settings.prefetch
        if depth == "auto":
            depth = queue_depth(run.batches.spec())
        loaded = prefetch(run.step.loader(run.batches), self.step, settings.steps, depth=depth)
        batches = self.activity.fed(self.interrupt.until_asked(loaded), first=first)
        clock = StepClock()
        profile = Profile(run.config.profile.start_step, self.spec.run_dir / "profile", self.progress)
        bad_steps = BadSteps(run.config.spikes, self.progress)
        in_flight: tuple[int, Metrics, float] | None = None  # number, metrics and data wait of the dispatched step
        metrics: Metrics = {}
        self.progress.start(settings.steps, self.step)

        def finish_step(next_wait: float = 0.0) -> None:
            """Wait for the step in flight, if there is one, and log it."""
            nonlocal in_flight, metrics
            if in_flight is None:
                return
            number, metrics, waited = in_flight
            in_flight = None
            skipped_in_a_row = int(metrics["skipped_in_a_row"])  # blocks until the step is done
            seconds = clock.done(waited, next_wait)
            self.activity.step_seconds = seconds
            profile.after_step(number)
            self.steps.note(number, metrics, seconds, waited)
            bad_steps.note(number, metrics)
            host.resume_collector()  # beside the next step, which is under way
            if skipped_in_a_row >= settings.max_skipped_in_a_row:
                raise diverged(skipped_in_a_row, number, metrics)

        try:
            for number in range(first, settings.steps + 1):
                profile.before_step(number)
                wait_began = time.perf_counter()
                try:
                    batch = next(batches)
                except StoppedWaiting:
                    finish_step()
                    self._stop()
                except Exception:
                    finish_step()
                    if self.step >= first:
                        self._save_on_failure()  # of the last step that had a batch
                    raise
                waited = time.perf_counter() - wait_began
                if in_flight is None:
                    clock.begin()
                self.state, new_metrics = run.step(self.state, batch)
                self.step = number
                finish_step(waited)
                in_flight = (number, new_metrics, waited)
                if number == settings.steps:
                    break
                wants_save = self.saves.is_due(number)
                evaluates = is_due(number, run.config.evaluation.every)
                if wants_save or evaluates or self.watch.has_callback_at(number):
                    finish_step()
                    self._call_back(metrics)
                    if evaluates:
                        self._evaluate()
                    if self.watch.status is not None:
                        break  # saved at its end
                    if wants_save or self.watch.wants_save(number):
                        self._save()
            finish_step()
        finally:
            loaded.close()
            profile.stop()
        if self.watch.status is None:
            self._call_back(metrics)  # of the last step
        self.steps.end()  # before the evaluation of that step

    def _call_back(self, metrics: Metrics) -> None:
        """Call the callbacks that want to see the step that is done; where one fails, the state is saved first."""
        try:
            with self.activity.during("callback"):
                self.watch.after_step(self.step, metrics, self.state)
        except Exception:
            self._save_on_failure()
            raise

    def _evaluate(self) -> None:
        """Evaluate the state on the run's held-out rows, unless that was done."""
        if not self.evaluation.is_due(self.step):
            return

        def feed(batches: Iterator[Any]) -> Iterator[Any]:
            return self.activity.ticking(self.interrupt.until_asked(batches))

        try:
            with self.spent.measure("evaluation"):
                self.evaluation.evaluate(self.step, self.state, feed)
            metrics = self.evaluation.metrics
            self.record.scalars(self.step, metrics)
            self.progress.message(f"step {self.step}: {'  '.join(shown_metrics(metrics))}")
            with self.activity.during("callback"):
                self.watch.after_evaluation(self.step, metrics, self.state)
        except StoppedWaiting:
            self._stop()
        except Exception:  # held-out rows that cannot be read, or do not fit; a callback
            self._save_on_failure()
            raise

    def _save(self) -> None:
        """Begin to save the state, unless it was saved."""
        step = self.step
        with self.spent.measure("saving"):
            began = self.saves.save(
                step,
                without_base(self.state, trained_leaves(self.run.step)),
                metadata=self.metadata,
                loss=self.evaluation.loss_after(step),
                score=self.watch.score_after(step),
            )
        if began:
            self.record.update()

    def _save_on_failure(self) -> None:
        """Save the state where something failed, and report it, unless that fails too."""
        if jax.process_count() > 1:  # the others may be in no save
            return
        with contextlib.suppress(Exception):
            self._save()
            self.saves.wait()
            where = self.checkpointer.directory
            self.progress.message(f"step {self.step} is saved in {where}: run again to resume")

    def _stop(self) -> NoReturn:
        """Save the state and raise the error that ends the run with exit code 75."""
        last = self.run.config.train.steps
        asked = self.interrupt.seconds_since()
        if self.step == 0:
            raise PreemptedError(f"stopped before the first step of {last}{asked}; nothing is lost: run again to start")
        began = time.monotonic()
        self._save()
        self.saves.wait()
        raise PreemptedError(
            f"stopped after step {self.step} of {last}; saved in {self.checkpointer.directory} in "
            f"{time.monotonic() - began:.1f} s{self.interrupt.seconds_since()}: run again to resume"
        )

    def _sample(self) -> str | None:
        """Write a sample of the state, which is saved: a signal leaves it for the next start."""
        with self.spent.measure("saving"):
            self.saves.wait(until_verified=True)  # what follows may fail, and the run is saved whatever it does
        with self.interrupt.free_to_leave():
            with self.spent.measure("sampling"):
                sample = sample_text(self.run, self.state, self.progress)
            if sample is not None:
                self.record.sample(self.step, sample)
        return sample

    def _final_metrics(self) -> Scalars:
        """Return the last logged row with the last evaluation."""
        return {**self.steps.row, **self.evaluation.metrics}

    def close(self, status: str) -> None:
        """Release the saves, then close the files of the run with its status; a second call does nothing."""
        self.steps.end()
        with self.spent.measure("saving"):
            self.saves.close()
        with self.activity.during("report"):
            self.record.close(
                status,
                self._final_metrics(),
                self.progress,
                is_asked=lambda: bool(self.interrupt.seconds_since()),
            )


def _has_closed(run_dir: Path) -> bool:
    """Return whether run.json has the end of the run."""
    return bool(from_process_0(lambda: read_run_info(run_dir).get("status") in ("done", EARLY_STOPPED)))
