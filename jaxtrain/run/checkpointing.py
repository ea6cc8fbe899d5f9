"""Where the checkpoints of a run are saved, when, and what happens if a save fails."""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer, places
from jaxtrain.checkpoint.directory import SaveError, list_steps
from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.run_folder import NOTE, Owner, checkpoint_folder, configured_folder, set_steps_aside, take
from jaxtrain.checkpoint.storage import everyone, from_process_0
from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.errors import CheckpointError, ConfigError, StorageError
from jaxtrain.run.directory import set_aside
from jaxtrain.runtime.distributed import is_main_process, together
from jaxtrain.runtime.files import write_bytes_atomic
from jaxtrain.train.state import TrainState

# Files of the run directory that are copied beside checkpoints elsewhere: the metrics, from which early stopping
# resumes.
_KEPT_FILES = ("metrics.jsonl",)


def is_due(number: int, every: int | None) -> bool:
    """Return whether a step is a multiple of an interval; with None, no step is."""
    return every is not None and number % every == 0


def open_checkpoints(
    config: CheckpointConfig,
    run_dir: Path,
    *,
    name: str,
    identity: str,
    resume: str | None,
    report: Callable[[str], None],
) -> tuple[Checkpointer, Owner | None]:
    """Open the checkpoints of a run; every process calls this.

    Returns:
        The checkpointer, and this process as the owner of `checkpoint.directory`; None: in the run directory, whose
        lock is enough, and in processes other than 0.

    Raises:
        ConfigError: the checkpoints are elsewhere, belong to another run, or cannot be written.
    """

    def own_folder() -> tuple[Place, Owner | None]:
        folder = configured_folder(config.directory, run_dir)
        if not is_main_process():
            return folder, None
        former = checkpoint_folder(run_dir)
        if former != folder and resume != "never":
            if list_steps(former) and not list_steps(folder):
                raise ConfigError(
                    f"checkpoint.directory: this run has its checkpoints in {former}, and {folder} has none; set it "
                    "back, copy them there and add --resume must, or start again with --resume never"
                )
            if config.directory is None:
                (run_dir / NOTE).unlink()  # it names where the checkpoints were
        if config.directory is None:
            return folder, None
        owner = take(folder, run_dir, name=name, identity=identity, takes_over=resume == "must", report=report)
        return folder, owner

    folder, owner = together(own_folder)
    checkpointer = Checkpointer(
        folder,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        report=report,
    )
    return checkpointer, owner


def begin_folder(folder: Place, config: CheckpointConfig, run_dir: Path, report: Callable[[str], None]) -> None:
    """Move the files and checkpoints of an earlier run aside; only process 0 calls this."""
    previous = set_aside(run_dir)
    if previous is not None:
        report(f"the files of an earlier run were moved to {previous}")
    if config.directory is None:
        (run_dir / NOTE).unlink(missing_ok=True)
        return
    previous_steps = set_steps_aside(folder)
    if previous_steps is not None:
        report(f"the checkpoints of an earlier run were moved to {previous_steps}")


def take_up_files(folder: Place, run_dir: Path) -> None:
    """Copy back what `RunSaves` copied beside the checkpoints if the run directory has less; every process calls it."""

    def copy_back() -> None:
        if not is_main_process():
            return
        for name in _KEPT_FILES:
            with contextlib.suppress(FileNotFoundError):
                content = (folder / name).read_bytes()
                path = run_dir / name
                if not path.exists() or path.stat().st_size < len(content):
                    write_bytes_atomic(path, content)

    together(copy_back)


class RunSaves:
    """Saves the states of a run; training stops only after several failed saves in a row.

    Every process calls every method, after the same steps. A save continues in the background: its failure counts at
    the next call that waits for it, where all processes learn of it.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        run_dir: Path,
        *,
        report: Callable[[str], None],
        owner: Owner | None = None,
    ) -> None:
        self._checkpointer = checkpointer
        self._owner = owner
        self._config = config
        self._report = report
        self._run_dir = run_dir
        self._several = jax.process_count() > 1
        self._saved_at = time.monotonic()
        self._failed_in_a_row = 0
        self._failure: SaveError | None = None  # of the last save that was tried
        self._pending: int | None = None
        self._complete = checkpointer.latest_step()

    def is_due(self, number: int) -> bool:
        """Return whether the state after step `number` is to be saved; ask once after every step."""
        if is_due(number, self._config.every):
            return True
        minutes = self._config.every_minutes
        # The clock is that of process 0: with several processes the question is a collective, for every tenth step.
        if minutes is None or not is_due(number, 10 if self._several else 1):
            return False
        return bool(from_process_0(lambda: int(time.monotonic() - self._saved_at >= 60.0 * minutes)))

    def save(
        self, number: int, state: TrainState, *, metadata: Mapping[str, Any], loss: float | None, score: float | None
    ) -> bool:
        """Begin to save a state, as `Checkpointer.save`; return False if the step is saved already, or cannot be.

        Raises:
            StorageError: another process has taken over the folder, or too many saves failed in a row.
        """
        self.settle(hurry=True)
        other = None if self._owner is None else self._owner.other()
        if self._config.directory is not None and not everyone(other is None):
            raise StorageError(
                f"{other or 'another start'} has taken over {self._checkpointer.directory}: this run stops and saves "
                f"nothing more there; {self._saved_step()}"
            )
        if self._owner is not None:
            self._keep_files()
        failure = None
        began = False
        try:
            began = self._checkpointer.save(number, state, metadata=metadata, eval_loss=loss, score=score)
        except SaveError as error:
            failure = error
        self._agree(failure)
        self._saved_at = time.monotonic()
        if failure is None:
            self._pending = number
            self._failure = None
        return began

    def settle(self, *, hurry: bool = False) -> bool:
        """Wait until the last save is complete, unless in a hurry also verified and copied; return whether it was."""
        failure = None
        try:
            if hurry:
                self._checkpointer.settle()
            else:
                self._checkpointer.wait()
        except SaveError as error:
            failure = error
        pending = self._pending
        self._pending = None
        self._agree(failure)
        if pending is not None and failure is None:
            self._complete = pending
            self._failed_in_a_row = 0
        return self._failure is None

    def wait(self, *, hurry: bool = False) -> None:
        """Wait until the last save is complete, as `settle` does; a StorageError if it failed."""
        if not self.settle(hurry=hurry):
            raise StorageError(f"{self._failure}; {self._saved_step()}")

    def close(self, *, hurry: bool = False, agrees: bool = True) -> None:
        """Finish the last save, then release the threads; a second call raises nothing.

        Args:
            hurry: as in `settle`.
            agrees: whether the other processes call this too, and not only this one because of an error.
        """
        try:
            if agrees or not self._several:
                self.wait(hurry=hurry)
            else:
                with contextlib.suppress(SaveError):  # another failure ends the run
                    self._checkpointer.settle()
        finally:
            self._failure = None  # it is raised once, so that closing again succeeds
            self._checkpointer.release()

    def _keep_files(self) -> None:
        """Copy the files of the run directory that a start on another machine needs beside the checkpoints."""
        for name in _KEPT_FILES:
            with contextlib.suppress(OSError):  # the next save reports what is wrong with the store
                places.write_bytes(self._checkpointer.directory / name, (self._run_dir / name).read_bytes())

    def _agree(self, failure: SaveError | None) -> None:
        """Count a failure of this process; a StorageError if only another process failed."""
        if self._several and not everyone(failure is None) and failure is None:
            raise StorageError(f"another process cannot save checkpoints (see its message); {self._saved_step()}")
        if failure is not None:
            self._note_failure(failure)

    def _note_failure(self, failure: SaveError) -> None:
        self._failure = failure
        self._pending = None
        self._failed_in_a_row += 1
        with contextlib.suppress(CheckpointError):  # if the store does not answer, the last answer stays
            self._complete = self._checkpointer.latest_step()
        max_failed = self._config.max_failed_in_a_row
        if self._failed_in_a_row >= max_failed:
            count = "1 save" if max_failed == 1 else f"{max_failed} saves in a row"
            raise StorageError(f"{failure}; {count} failed (checkpoint.max_failed_in_a_row), {self._saved_step()}")
        more = max_failed - self._failed_in_a_row
        self._report(
            f"{failure}; training continues, {self._saved_step()}, and stops after {more} more such saves in a row"
        )

    def _saved_step(self) -> str:
        return "no step is saved" if self._complete is None else f"step {self._complete} is saved"
