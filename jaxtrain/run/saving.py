"""Where the checkpoints of a run go, when its state is saved, and what happens where a save fails."""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import SaveError, list_steps
from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.run_folder import NOTE, Owner, checkpoint_folder, configured_folder, set_steps_aside, take
from jaxtrain.checkpoint.storage import everyone, from_process_0
from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.errors import CheckpointError, ConfigError, StorageError
from jaxtrain.runtime.distributed import is_main_process, together
from jaxtrain.train.state import TrainState


def is_due(number: int, every: int | None) -> bool:
    """Whether a step is a multiple of an interval; None: no step is."""
    return every is not None and number % every == 0


def take_folder(
    keep: CheckpointConfig,
    run_dir: Path,
    *,
    name: str,
    resume: str | None,
    report: Callable[[str], None],
) -> tuple[Place, Owner | None]:
    """The folder of a run's checkpoints, for this start alone; every process calls this."""
    main = is_main_process()

    def work() -> tuple[Place, Owner | None]:
        folder, former = configured_folder(keep.directory, run_dir), checkpoint_folder(run_dir)
        if main and former != folder and resume != "never" and not list_steps(folder) and list_steps(former):
            raise ConfigError(
                f"checkpoint.directory: this run has its checkpoints in {former}, and {folder} has none; set it "
                "back, copy them there and add --resume must, or start again with --resume never"
            )
        if not main:
            return folder, None
        if keep.directory is None:
            if former != folder and resume != "never":
                (run_dir / NOTE).unlink()  # it leads to where the checkpoints were
            return folder, None
        owner, line = take(folder, run_dir, name=name, takes_over=resume == "must")
        if line is not None:
            report(line)
        return folder, owner

    return together(work)


def begin_folder(folder: Place, keep: CheckpointConfig, run_dir: Path, report: Callable[[str], None]) -> None:
    """Move what an earlier run left in `checkpoint.directory` away; process 0 alone."""
    if keep.directory is None:
        (run_dir / NOTE).unlink(missing_ok=True)
    elif (moved := set_steps_aside(folder)) is not None:
        report(f"the checkpoints of an earlier run were moved to {moved}")


class RunSaves:
    """Saves the states of a run; a save that fails stops the training only after several in a row.

    Every process calls every method, after the same steps. A failure counts at the next save, where all hear of it.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        *,
        report: Callable[[str], None],
        owner: Owner | None = None,
    ) -> None:
        self._checkpointer, self._owner, self._config, self._report = checkpointer, owner, config, report
        self._several = jax.process_count() > 1
        self._saved_at = time.monotonic()
        self._failed_in_a_row = 0
        self._failure: SaveError | None = None  # of the last save that was tried
        self._pending: int | None = None
        self._complete = checkpointer.latest_step()

    def is_due(self, number: int) -> bool:
        """Whether the state after step `number` is to be saved; asked once after every step."""
        minutes, by_clock = self._config.every_minutes, False
        # By the clock of process 0; with several processes an answer is a collective: it is asked every tenth step.
        if minutes is not None and is_due(number, 10 if self._several else 1):
            by_clock = bool(from_process_0(lambda: int(time.monotonic() - self._saved_at >= 60.0 * minutes)))
        return by_clock or is_due(number, self._config.every)

    def save(
        self, number: int, state: TrainState, *, metadata: Mapping[str, Any], loss: float | None, score: float | None
    ) -> bool:
        """Begin to save a state; see `Checkpointer.save`. False where the step is saved already, or cannot be."""
        self.settle(hurry=True)
        other = None if self._owner is None else self._owner.other()
        if self._config.directory is not None and not everyone(other is None):
            raise StorageError(
                f"{other or 'another start'} has taken over {self._checkpointer.directory}: this run stops and saves "
                f"nothing more there; {self._left()}"
            )
        failure, began = None, False
        try:
            began = self._checkpointer.save(number, state, metadata=metadata, eval_loss=loss, score=score)
        except SaveError as error:
            failure = error
        self._agree(failure)
        self._saved_at = time.monotonic()
        if failure is None:
            self._pending, self._failure = number, None
        return began

    def settle(self, *, hurry: bool = False) -> bool:
        """Wait until the last save is complete; unless in a hurry also verified and copied. False where it failed."""
        failure = None
        try:
            self._checkpointer.settle() if hurry else self._checkpointer.wait()
        except SaveError as error:
            failure = error
        pending, self._pending = self._pending, None
        self._agree(failure)
        if pending is not None and failure is None:
            self._complete, self._failed_in_a_row = pending, 0
        return self._failure is None

    def wait(self, *, hurry: bool = False) -> None:
        """Wait until the last save is complete: what follows relies on it."""
        if not self.settle(hurry=hurry):
            raise StorageError(f"{self._failure}; {self._left()}")

    def close(self, *, hurry: bool = False, agrees: bool = True) -> None:
        """Finish the last save, then release the threads; a second call raises nothing."""
        try:
            if agrees or not self._several:
                self.wait(hurry=hurry)
            else:
                with contextlib.suppress(SaveError):  # another failure ends the run
                    self._checkpointer.settle()
        finally:
            self._failure = None  # it is said once: what ends after it must end
            self._checkpointer.release()

    def _agree(self, failure: SaveError | None) -> None:
        """Note a failure of this process, or of another one."""
        if self._several and not everyone(failure is None) and failure is None:
            raise StorageError(f"another process cannot save checkpoints (see its message); {self._left()}")
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
        self._report(f"{failure}; training continues, {self._left()}, and stops after {more} more such saves in a row")

    def _left(self) -> str:
        return "no step is saved" if self._complete is None else f"step {self._complete} is saved"
