"""What follows a step that left the state as it was: a spike is said or undone, a non-finite one is looked into."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config.spikes import SpikesConfig
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.time_spent import TimeSpent
from jaxtrain.run.nonfinite import Diagnosis
from jaxtrain.run.roll_back import SpikeError, batch_of, recorded
from jaxtrain.train.assemble import Run

# Lines and files of one process; after these the counts of skipped steps go on alone.
_MOST_SHOWN = 10


class BadSteps:
    """Looks at the metrics of every step once it is done. Every process calls it, in the same order.

    Args:
        run: what is trained.
        run_dir: of the run.
        checkpointer: of the run.
        settle: waits for the save that is under way.
        metadata: of the next checkpoint, with the roll backs of the run.
        progress: what people see.
        spent: where the time goes.
    """

    def __init__(
        self,
        run: Run,
        run_dir: Path,
        *,
        checkpointer: Checkpointer,
        settle: Callable[[], object],
        metadata: Mapping[str, Any],
        progress: Progress,
        spent: TimeSpent,
    ) -> None:
        self._spent, self._settle = spent, settle
        self._run, self._checkpointer, self._metadata, self._progress = run, checkpointer, metadata, progress
        self._diagnosis = Diagnosis(run, run_dir, batch=lambda number: batch_of(number - 1, recorded(metadata)))
        self._shown = 0

    def following(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """The batches of the steps from `first` on; of an iterable, which gives none twice, the last two are kept."""
        return self._diagnosis.following(batches, first)

    def note(self, number: int, metrics: Mapping[str, jax.Array]) -> float:
        """Look at the metrics of a step that is done.

        Returns:
            Seconds of it that count as compiling, and as no step.

        Raises:
            SpikeError: it was a spike, and the run is to go back.
        """
        spikes = self._run.config.spikes
        if spikes is not None and int(metrics["spiked"]):
            self._spiked(spikes, number, float(metrics["loss"]), float(metrics["grad_norm"]))
        elif int(metrics["skipped_in_a_row"]) and self._shown < _MOST_SHOWN and not _is_empty(metrics):
            self._shown += 1
            began = time.monotonic()
            with self._spent.measure("compiling"):
                line = self._diagnosis(number, metrics)
            self._progress.message(line)
            return time.monotonic() - began
        return 0.0

    def _spiked(self, spikes: SpikesConfig, number: int, loss: float, grad_norm: float) -> None:
        done = len(recorded(self._metadata))
        what = (
            f"step {number} is a spike: loss {loss:.4g}, gradient norm {grad_norm:.4g}, more than {spikes.sigmas:g} "
            f"deviations above the last {spikes.window} steps"
        )
        why = ""
        if spikes.action == "roll_back" and done >= spikes.max_roll_backs:
            why = f" (spikes.max_roll_backs={spikes.max_roll_backs} are done)"
        elif spikes.action == "roll_back":
            to_step = self._step_before(number - spikes.roll_back_steps)
            if to_step is not None:
                self._progress.message(f"{what}; going back to step {to_step}")
                raise SpikeError(number, loss, grad_norm, to_step=to_step)
            why = f" (no checkpoint is {spikes.roll_back_steps} steps before it)"
        batch = batch_of(number - 1, recorded(self._metadata))
        self._shown += 1
        if self._shown <= _MOST_SHOWN:
            self._progress.message(f"{what}; batch {batch} is skipped{why}")

    def _step_before(self, last: int) -> int | None:
        """The newest checkpoint of this line of steps up to a step; None: there is none."""
        # A save that is still being written counts: which step a run goes back to must not depend on the disk.
        self._settle()
        rolled_back = recorded(self._metadata)
        after = rolled_back[-1].to_step if rolled_back else 0

        def newest() -> int:
            for step in reversed(self._checkpointer.steps()):
                # Steps of an abandoned line are there until the first save of the one that took its place.
                is_ours = step <= after or recorded(self._checkpointer.metadata(step)) == rolled_back
                if step <= last and (not rolled_back or is_ours):
                    return step
            return -1

        found = from_process_0(newest)
        return None if found < 0 else found


def _is_empty(metrics: Mapping[str, jax.Array]) -> bool:
    """Whether the batch of a step had no weight, which is skipped without a fault; it ends no row of bad steps."""
    return float(metrics["weight"]) == 0 and float(metrics["grad_norm"]) == 0
