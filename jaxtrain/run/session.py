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
from jaxtrain.metrics.evaluation import Evaluator, held_out_batches
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.writers import Scalars, flat_scalars
from jaxtrain.run.assemble import Run
from jaxtrain.run.callbacks import Watch
from jaxtrain.run.checkpointing import RunSaves
from jaxtrain.run.record import RunRecord, StepLog
from jaxtrain.run.resume import trained_leaves
from jaxtrain.run.signals import Interrupt, StoppedWaiting
from jaxtrain.run.watchdog import Activity
from jaxtrain.train.state import TrainState
from jaxtrain.weights.base import without_base


def shown_metrics(metrics: Scalars) -> list[str]:
    """Metrics as people read them: `eval loss 1.234`."""
    return [f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items() if value is not None]


@dataclass
class Session:
    """The parts of a run, made by `prepare_session` of `run.py`."""

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

    def final_metrics(self) -> Scalars:
        """The last logged row with the last evaluation."""
        return {**self.steps.row, **self.metrics}

    def close(self, status: str) -> None:
        """Finish the last save, then close the files of the run with its status; a second call does nothing."""
        self.steps.end()
        try:
            with self.record.spent.measure("saving"):
                # A run that failed in one process agrees on nothing: the others are elsewhere.
                agrees = status not in ("failed", "stopped")
                self.saves.close(hurry=status == "preempted", agrees=agrees)
        except StorageError:
            self.record.close("failed", self.final_metrics(), self.progress)
            raise
        with self.activity.during("report"):
            asked = self.interrupt.seconds_since
            self.record.close(status, self.final_metrics(), self.progress, is_asked=lambda: bool(asked()))

    def evaluate(self, number: int, state: TrainState) -> None:
        """Evaluate the state after a step on the run's held-out rows, unless that was done."""
        if self.run.data.validation is None or self.evaluated == number:
            return
        try:
            with self.record.spent.measure("evaluation"):
                self.metrics = self._evaluated(state)
            self.evaluated = number
            self.record.scalars(number, self.metrics)
            self.progress.message(f"step {number}: {'  '.join(shown_metrics(self.metrics))}")
            with self.activity.during("callback"):
                self.watch.evaluated(number, self.metrics, state)
        except StoppedWaiting:
            self.stop(number, state)
        except Exception:  # held-out rows that cannot be read, or do not fit; a callback
            self.save_on_failure(number, state)
            raise

    def _evaluated(self, state: TrainState) -> Scalars:
        config = self.run.config
        rows = self.run.data.validation
        assert rows is not None
        size = config.train.global_batch_size
        most = config.evaluation.max_batches
        batches = held_out_batches(config, rows, size=size, max_batches=most)
        loaded = prefetch(self.run.step.loader(batches), 0, len(batches), depth=1)
        try:
            ticking = self.activity.ticking(self.interrupt.until_asked(loaded))
            return flat_scalars(self.evaluator(state, ticking))
        finally:
            loaded.close()

    def add_evaluation(self, number: int) -> None:
        """Add the result of an evaluation to the checkpoint of its step, which was saved before."""
        loss = self.metrics.get("eval_loss") if self.evaluated == number else None
        # A save may have failed; the wait for it says so.
        if loss is not None and from_process_0(lambda: number in self.checkpointer.steps()):
            self.checkpointer.add_eval_loss(number, loss, score=self.watch.score_after(number))

    def save(self, number: int, state: TrainState) -> None:
        """Begin to save the state after a step, unless it was saved."""
        record = self.record
        score = self.watch.score_after(number)
        loss = self.metrics.get("eval_loss") if self.evaluated == number else None
        with record.spent.measure("saving"):
            saved = without_base(state, trained_leaves(self.run.step))
            began = self.saves.save(number, saved, metadata=self.metadata, loss=loss, score=score)
        if began:
            record.update()

    def stop(self, number: int, state: TrainState) -> NoReturn:
        """Save the state after a step and raise the error that ends the run with exit code 75."""
        began = time.monotonic()
        self.save(number, state)
        self.saves.wait(hurry=True)
        raise PreemptedError(
            f"stopped after step {number} of {self.run.config.train.steps}; saved in {self.checkpointer.directory} "
            f"in {time.monotonic() - began:.1f} s{self.interrupt.seconds_since()}: run again to resume"
        )

    @contextlib.contextmanager
    def saving_on_failure(self, number: int, state: TrainState) -> Iterator[None]:
        """Save the state where a callback fails, then raise its error."""
        try:
            with self.activity.during("callback"):
                yield
        except Exception:
            self.save_on_failure(number, state)
            raise

    def save_on_failure(self, number: int, state: TrainState, *, says: bool = True) -> bool:
        """Save the state after a step where something failed, and say so; False where that fails too."""
        if jax.process_count() > 1:  # the others may be in no save
            return False
        with contextlib.suppress(Exception):
            self.save(number, state)
            self.saves.wait(hurry=True)
            if says:
                self.progress.message(f"step {number} is saved in {self.checkpointer.directory}: run again to resume")
            return True
        return False
