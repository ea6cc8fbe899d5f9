"""Where the checkpoints of a run go, when its state is saved, and what happens where a save fails."""

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

# Of the run directory, beside the checkpoints: rows, by which early stopping goes on, and the numbers of a reference.
_KEPT_FILES = ("metrics.jsonl", "reference.npz")


def is_due(number: int, every: int | None) -> bool:
    """Whether a step is a multiple of an interval; None: no step is."""
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
    """Open the checkpoints of a run for this start alone; every process calls this."""

    def work() -> tuple[Place, Owner | None]:
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
                (run_dir / NOTE).unlink()  # it leads to where the checkpoints were
        if config.directory is None:
            return folder, None
        owner = take(folder, run_dir, name=name, identity=identity, takes_over=resume == "must", report=report)
        return folder, owner

    folder, owner = together(work)
    checkpointer = Checkpointer(
        folder,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        report=report,
    )
    return checkpointer, owner


def begin_folder(folder: Place, config: CheckpointConfig, run_dir: Path, report: Callable[[str], None]) -> None:
    """Move what an earlier run left aside; process 0 alone."""
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
    """Read what `RunSaves` keeps beside the checkpoints, if the run directory has less; every process calls this."""

    def work() -> None:
        for name in _KEPT_FILES if is_main_process() else ():
            with contextlib.suppress(FileNotFoundError):
                content = (folder / name).read_bytes()
                path = run_dir / name
                if not path.exists() or path.stat().st_size < len(content):
                    write_bytes_atomic(path, content)

    together(work)


class RunSaves:
    """Saves the states of a run; a save that fails stops the training only after several in a row.

    Every process calls every method, after the same steps. A failure counts at the next save, where all hear of it.
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
        """Whether the state after step `number` is to be saved; asked once after every step."""
        minutes = self._config.every_minutes
        # By the clock of process 0; with several processes an answer is a collective: it is asked every tenth step.
        return is_due(number, self._config.every) or (
            minutes is not None
            and is_due(number, 10 if self._several else 1)
            and bool(from_process_0(lambda: int(time.monotonic() - self._saved_at >= 60.0 * minutes)))
        )

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
        """Wait until the last save is complete; unless in a hurry also verified and copied. False where it failed."""
        failure = None
        try:
            self._checkpointer.settle() if hurry else self._checkpointer.wait()
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

    def _keep_files(self) -> None:
        """Copy what a start on another machine needs of the run directory to where the checkpoints are."""
        for name in _KEPT_FILES:
            with contextlib.suppress(OSError):  # the save that follows says what is wrong with the store
                places.write_bytes(self._checkpointer.directory / name, (self._run_dir / name).read_bytes())

    def _agree(self, failure: SaveError | None) -> None:
        """Note a failure of this process, or of another one."""
        if self._several and not everyone(failure is None) and failure is None:
            raise StorageError(f"another process cannot save checkpoints (see its message); {self._left()}")
        if failure is not None:
            self._note_failure(failure)

    def _note_failure(self, failure: SaveError) -> None:
        self._failure = failure
        self._pending = None
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
