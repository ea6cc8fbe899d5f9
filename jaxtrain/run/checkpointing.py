"""Where the checkpoints of a run are saved, when, and what happens if a save fails."""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxtrain.checkpoint import Checkpointer, places
from jaxtrain.checkpoint.directory import SaveError, list_steps
from jaxtrain.checkpoint.run_folder import NOTE, Owner, checkpoint_folder, configured_folder, set_steps_aside, take
from jaxtrain.checkpoint.storage import everyone, from_process_0
from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.errors import CheckpointError, ConfigError, StorageError
from jaxtrain.run.directory import set_aside
from jaxtrain.runtime.distributed import is_main_process, together
from jaxtrain.runtime.files import write_bytes_atomic
from jaxtrain.train.state import TrainState

# Copied beside checkpoints that are elsewhere: early stopping resumes from it.
_METRICS = "metrics.jsonl"
Result = TypeVar("Result")


def is_due(number: int, every: int | None) -> bool:
    """Return whether a step is a multiple of an interval; with None, no step is."""
    return every is not None and number % every == 0


class RunSaves:
    """Saves the states of a run; training stops only after several failed saves in a row.

    Every process calls every method, after the same steps. A save continues in the background: its failure counts at
    the next call that waits for it, where all processes learn of it.

    Attributes:
        checkpointer: where the states are.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: Path,
        *,
        name: str,
        identity: str,
        resume: str | None,
        report: Callable[[str], None],
    ) -> None:
        """Open the checkpoints of a run.

        Args:
            config: where they are, when they are saved, and which are kept.
            run_dir: directory of the run, which is locked.
            name: name of the run.
            identity: `run_identity`, which is the same on every machine.
            resume: as in `run_config`.
            report: called with a line.

        Raises:
            ConfigError: the checkpoints are elsewhere, belong to another run, or cannot be written.
        """
        folder = configured_folder(config.directory, run_dir)

        def claim() -> Owner | None:
            """Make process 0 the owner of a folder elsewhere; the lock of the run directory is enough for its own."""
            if not is_main_process():
                return None
            former = checkpoint_folder(run_dir)
            if former != folder and resume != "never" and list_steps(former) and not list_steps(folder):
                raise ConfigError(
                    f"checkpoint.directory: this run has its checkpoints in {former}, and {folder} has none; set it "
                    "back, copy them there and add --resume must, or start again with --resume never"
                )
            if config.directory is None:
                (run_dir / NOTE).unlink(missing_ok=True)
                return None
            return take(folder, run_dir, name=name, identity=identity, takes_over=resume == "must", report=report)

        self._owner = together(claim)
        self.checkpointer = Checkpointer(
            folder,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            keep_best=config.keep_best,
            report=report,
        )
        self._config = config
        self._run_dir = run_dir
        self._report = report
        self._saved_at = time.monotonic()
        self._failures: list[SaveError] = []  # since the last complete save
        self._is_pending = False

    def set_earlier_aside(self) -> None:
        """Move the files and checkpoints of an earlier run aside; only process 0 calls this."""
        for previous in (set_aside(self._run_dir), set_steps_aside(self.checkpointer.directory)):
            if previous is not None:
                self._report(f"files of an earlier run were moved to {previous}")

    def restore_metrics(self) -> None:
        """Copy back the metrics that are beside checkpoints elsewhere, if the run directory has less of them."""
        path = self._run_dir / _METRICS
        if self._owner is None:
            return
        with contextlib.suppress(FileNotFoundError):
            content = (self.checkpointer.directory / _METRICS).read_bytes()
            if not path.exists() or path.stat().st_size < len(content):
                write_bytes_atomic(path, content)

    def is_due(self, number: int) -> bool:
        """Return whether the state after step `number` is to be saved; ask once after every step."""
        if is_due(number, self._config.every):
            return True
        minutes = self._config.every_minutes
        # The clock is that of process 0: with several processes the question is a collective, for every tenth step.
        if minutes is None or not is_due(number, 10 if jax.process_count() > 1 else 1):
            return False
        return bool(from_process_0(lambda: int(time.monotonic() - self._saved_at >= 60.0 * minutes)))

    def save(
        self, number: int, state: TrainState, *, metadata: Mapping[str, Any], loss: float | None, score: float | None
    ) -> bool:
        """Begin to save a state, as `Checkpointer.save`; return False if the step is saved already, or cannot be.

        Raises:
            StorageError: another process has taken over the folder, or too many saves failed in a row.
        """
        self._finish(self.checkpointer.settle)
        together(self._copy_metrics)
        began = self._attempt(
            lambda: self.checkpointer.save(number, state, metadata=metadata, eval_loss=loss, score=score)
        )
        self._is_pending = began is not None
        self._saved_at = time.monotonic()
        return bool(began)

    def wait(self, *, until_verified: bool = False) -> None:
        """Wait until the last save is complete.

        Args:
            until_verified: whether it is also read back, and older steps are deleted; else that continues in the
                background.

        Raises:
            StorageError: it failed.
        """
        self._finish(self.checkpointer.wait if until_verified else self.checkpointer.settle)
        if self._failures:
            raise StorageError(f"{self._failures[-1]}; {self._saved_step()}")

    def close(self) -> None:
        """Release the threads; a save that an error left pending is finished, and raises nothing beside that error."""
        with contextlib.suppress(SaveError):
            self.checkpointer.settle()
        self.checkpointer.release()

    def _copy_metrics(self) -> None:
        """Copy the metrics beside checkpoints that are elsewhere, unless another process has taken over the folder."""
        if self._owner is None:
            return
        other = self._owner.other()
        if other is not None:
            raise StorageError(
                f"{other} has taken over {self.checkpointer.directory}: this run stops and saves nothing more there; "
                f"{self._saved_step()}"
            )
        with contextlib.suppress(OSError):  # the save reports what is wrong with the store
            places.write_bytes(self.checkpointer.directory / _METRICS, (self._run_dir / _METRICS).read_bytes())

    def _finish(self, wait: Callable[[], None]) -> None:
        """Wait for the save that is pending, and count it as complete or failed."""
        self._attempt(wait)
        if self._is_pending:
            self._failures.clear()
        self._is_pending = False

    def _attempt(self, work: Callable[[], Result]) -> Result | None:
        """Do a part of a save; return its result, or None if it failed and training continues."""
        result = None
        failure = None
        try:
            result = work()
        except SaveError as error:
            failure = error
        if not everyone(failure is None) and failure is None:
            raise StorageError(f"another process cannot save checkpoints (see its message); {self._saved_step()}")
        if failure is None:
            return result
        self._is_pending = False
        self._failures.append(failure)
        remaining = self._config.max_failed_in_a_row - len(self._failures)
        if remaining <= 0:
            raise StorageError(
                f"{failure}; {len(self._failures)} saves in a row failed (checkpoint.max_failed_in_a_row), "
                f"{self._saved_step()}"
            )
        self._report(
            f"{failure}; training continues, {self._saved_step()}, and stops after {remaining} more such saves in a row"
        )
        return None

    def _saved_step(self) -> str:
        with contextlib.suppress(CheckpointError):
            step = self.checkpointer.latest_step()
            return "no step is saved" if step is None else f"step {step} is saved"
        return "the steps before it are unchanged"
