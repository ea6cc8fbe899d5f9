"""The saves of a run: when one is due, and what one that fails means for the training."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import RECORD_ITEM, SaveError
from jaxtrain.checkpoint.places import SeenComplete, is_remote
from jaxtrain.checkpoint.run_folder import Owner
from jaxtrain.checkpoint.storage import everyone
from jaxtrain.config.checkpoint import CheckpointConfig
from jaxtrain.errors import CheckpointError, StorageError
from jaxtrain.run.loop import is_due
from jaxtrain.run.save_clock import SaveClock
from jaxtrain.runtime.files import identity
from jaxtrain.train.state import TrainState

# How a run may end in one process while the others are elsewhere, so that they agree on nothing.
OF_ONE_PROCESS = ("failed", "stopped")


class RunSaves:
    """Saves the states of a run; a save that fails stops the training only after several in a row.

    The checkpoints that are complete stay whatever happens. Every process calls every method, after the same steps;
    with several processes a failure counts at the next save, where all of them hear of it.

    Args:
        checkpointer: of the run.
        run_dir: its directory.
        config: when a save is due, and how many may fail.
        report: called with one line for people.
        clock: for `every_minutes`.
        owner: of `checkpoint.directory`, in the process that writes; None: the checkpoints are in the run directory,
            whose lock is held.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        run_dir: Path,
        config: CheckpointConfig,
        *,
        report: Callable[[str], None],
        clock: SaveClock | None = None,
        owner: Owner | None = None,
    ) -> None:
        self._checkpointer, self._run_dir, self._owner = checkpointer, run_dir, owner
        self._config, self._report = config, report
        self._clock = clock or SaveClock(config.every_minutes)
        self._several = jax.process_count() > 1
        self._failed_in_a_row = 0
        self._failure: SaveError | None = None  # of the last save that was tried; None: it did not fail
        self._unheard: SaveError | None = None
        self._pending: int | None = None
        self._complete = checkpointer.latest_step()
        self._place = identity(run_dir)
        self._is_wanted = False
        self._seen = SeenComplete()

    @property
    def is_writing(self) -> bool:
        """Whether a save was under way at the last `check`, so that the watchdog counts its time."""
        return self._pending is not None and self._unheard is None and self._complete != self._pending

    def is_due(self, number: int) -> bool:
        """Whether the state after step `number` is to be saved; asked once after every step."""
        by_clock = self._clock.is_due(number)
        wanted, self._is_wanted = self._is_wanted, False
        return by_clock or wanted or is_due(number, self._config.every)

    def check(self) -> None:
        """Look whether a save has failed, or what was saved is gone; called after every step.

        Raises:
            StorageError: as many saves in a row failed as may.
        """
        try:
            self._checkpointer.check()
        except SaveError as error:
            if self._several:
                self._unheard = error
            else:
                self._note_failure(error)
        self._look_for_steps()

    def save(
        self,
        number: int,
        state: TrainState,
        *,
        metadata: Mapping[str, Any],
        eval_loss: float | None,
        score: float | None,
    ) -> bool:
        """Begin to save a state; see `Checkpointer.save`.

        Returns:
            Whether a save began; False where the step is saved already, or cannot be.

        Raises:
            StorageError: as many saves in a row failed as may.
        """
        self._settle(hurry=True)
        self._check_owner()
        failure, began = None, False
        try:
            began = self._checkpointer.save(number, state, metadata=metadata, eval_loss=eval_loss, score=score)
        except SaveError as error:
            failure = error
        self._agree(failure)
        self._clock.saved()
        if failure is None:
            self._pending, self._failure, self._seen = number, None, SeenComplete()
        return began

    def settle(self) -> bool:
        """Wait until the last save is complete, verified and copied; False where it failed."""
        self._settle(hurry=False)
        return self._failure is None

    def wait(self, *, hurry: bool = False) -> None:
        """Wait until the last save is complete: what follows relies on it.

        Args:
            hurry: whether it is not waited for to be verified and copied.

        Raises:
            StorageError: it failed, whatever came before it.
        """
        self._settle(hurry=hurry)
        if self._failure is not None:
            raise StorageError(f"{self._failure}; {self._left()}")

    def close(self, *, hurry: bool = False, agrees: bool = True) -> None:
        """Finish the last save, then release the threads; a second call raises nothing.

        Args:
            hurry: see `wait`.
            agrees: whether the other processes close too, so that all can hear of a failure.

        Raises:
            StorageError: the last save failed.
        """
        try:
            if agrees or not self._several:
                self.wait(hurry=hurry)
            else:
                with contextlib.suppress(SaveError):  # another failure ends the run
                    self._checkpointer.settle()
        finally:
            self._failure = None  # it is said once: what ends after it must end
            self._checkpointer.release()

    def _settle(self, *, hurry: bool) -> None:
        failure, self._unheard = self._unheard, None
        try:
            self._checkpointer.settle() if hurry else self._checkpointer.wait()
        except SaveError as error:
            failure = error
        pending, self._pending = self._pending, None
        self._agree(failure)
        if pending is not None and failure is None:
            self._complete, self._failed_in_a_row = pending, 0

    def _agree(self, failure: SaveError | None) -> None:
        """Note a failure of this process, or of another one.

        Raises:
            StorageError: another process cannot save and this one can, or as many saves in a row failed as may.
        """
        if self._several and not everyone(failure is None) and failure is None:
            raise StorageError(f"another process cannot save checkpoints, its message says why; {self._left()}")
        if failure is not None:
            self._note_failure(failure)

    def _note_failure(self, failure: SaveError) -> None:
        self._failure, self._pending = failure, None
        self._failed_in_a_row += 1
        with contextlib.suppress(CheckpointError):  # a store that does not answer: what was known stays known
            self._complete = self._checkpointer.latest_step()
        most = self._config.max_failed_in_a_row
        if self._failed_in_a_row >= most:
            count = "1 save" if most == 1 else f"{most} saves in a row"
            raise StorageError(f"{failure}; {count} failed (checkpoint.max_failed_in_a_row), {self._left()}")
        more = most - self._failed_in_a_row
        self._report(f"{failure}; training goes on, {self._left()}, and stops after {more} more such saves in a row")

    def _check_owner(self) -> None:
        """Raise in every process where another start has taken the checkpoints over: two runs must not mix.

        Raises:
            StorageError: it has.
        """
        if self._config.directory is None:
            return
        other = None if self._owner is None else self._owner.other()
        if not everyone(other is None):
            raise StorageError(
                f"{other or 'another start'} has taken over {self._checkpointer.directory}: this run stops and saves "
                f"nothing more there; {self._left()}"
            )

    def _left(self) -> str:
        return "no step is saved" if self._complete is None else f"step {self._complete} is saved"

    def _look_for_steps(self) -> None:
        """Want a save at once where the directory of the run, or its last checkpoint, is gone."""
        folder = self._checkpointer.directory
        if self._pending is not None and self._seen(folder / str(self._pending), item=RECORD_ITEM):
            self._complete = self._pending
        place = identity(self._run_dir)
        is_gone = self._complete is not None and self._complete != self._pending
        # A store is not asked after every step, and loses no folder as a disk does that is taken away.
        is_gone = is_gone and not is_remote(folder) and not (folder / str(self._complete)).is_dir()
        if not is_gone and place == self._place:
            return
        if is_gone:
            left = self._checkpointer.steps()
            shown = f"; left: {', '.join(map(str, left))}" if left else ""
            self._report(
                f"the checkpoint of step {self._complete} in {folder} is gone{shown}; the state is saved again"
            )
            self._complete = max(left, default=None)
        # With several processes all must save at the same step: there the next save that is due has to do.
        self._place, self._is_wanted = place, not self._several
