"""Whether the files of a run are where they were: a run directory may be deleted, moved or unmounted under a run.

So may the lock alone, which people take for one that a killed process left: then another run can start beside this one.
"""

from collections.abc import Callable
from pathlib import Path

from jaxtrain.errors import ConfigError, StorageError
from jaxtrain.metrics.writers import LastingWriter
from jaxtrain.run.lock import LOCK_NAME, InUseError, RunLock
from jaxtrain.runtime.files import identity


class InPlace:
    """Notices that the directory of a run, or one of its files, is gone, and takes the directory again.

    Args:
        run_dir: exists, and this process holds it.
        lock: by which it does; None: it is not looked after.
        metrics: writes metrics.jsonl.
        report: called with one line for people.

    Attributes:
        is_lost: whether another run was found in the directory: this one writes nothing more there.
    """

    def __init__(
        self, run_dir: Path, *, lock: RunLock | None, metrics: LastingWriter, report: Callable[[str], None]
    ) -> None:
        self._run_dir, self._metrics, self._report = run_dir, metrics, report
        self._directory = identity(run_dir)
        self._first_lock = lock
        self._lock: RunLock | None = None
        self._is_refused = False
        self.is_lost = False

    def look(self, files: dict[str, Callable[[], None]]) -> None:
        """Write again what is gone, and say so; does nothing where all is there.

        Args:
            files: names of files that the run needs, with what writes each.

        Raises:
            StorageError: another run holds the directory; said once.
        """
        if self.is_lost:
            return
        here = identity(self._run_dir)
        is_gone = here != self._directory
        missing = [name for name in files if not (self._run_dir / name).is_file()]
        lock = self._lock or self._first_lock
        is_unlocked = lock is not None and not lock.is_in_place()
        if not is_gone and not is_unlocked and not missing and self._metrics.is_in_place():
            return
        if (is_gone or is_unlocked) and not self._take_again():
            return
        found = [f"{LOCK_NAME} is written again"] if is_unlocked and not is_gone else []
        if not self._metrics.is_in_place():
            found.append(self._metrics.write_again())
        for name in missing:
            try:
                files[name]()
                found.append(f"{name} is written again")
            except OSError as error:
                found.append(f"{name} cannot be written again: {error.strerror}")
        what = f"{self._run_dir} was deleted, moved or unmounted" if is_gone else f"files of {self._run_dir} are gone"
        self._report(f"{what} while the run goes on: {', '.join(found)}")

    def follow(self, metrics: LastingWriter) -> None:
        """Take note of the writer of a metrics.jsonl that was opened anew."""
        self._metrics = metrics

    def close(self) -> None:
        """Release the directory, where it was taken again."""
        if self._lock is not None:
            self._lock.__exit__()
            self._lock = None

    def _take_again(self) -> bool:
        """Make the directory and hold it; False where that cannot be.

        Raises:
            StorageError: another process holds it.
        """
        lock = RunLock(self._run_dir)
        try:
            # Our own lock is a file of another inode: it went with the directory.
            lock.__enter__()
        except InUseError as error:
            self.is_lost = True
            raise StorageError(
                f"{self._run_dir} is in use by {error.holder}, which began there after its lock was deleted or moved: "
                "this run stops and saves nothing more there"
            ) from None
        except ConfigError as error:
            if not self._is_refused:
                self._report(f"{self._run_dir} was deleted, moved or unmounted and cannot be written again: {error}")
            self._is_refused = True
            return False
        self.close()
        self._lock, self._directory, self._is_refused = lock, identity(self._run_dir), False
        return True
