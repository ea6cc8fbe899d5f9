"""Whether the files of a run are where they were: a run directory may be deleted, moved or unmounted under a run."""

from collections.abc import Callable
from pathlib import Path

from jaxtrain.errors import ConfigError
from jaxtrain.metrics.lasting import LastingWriter
from jaxtrain.run.lock import RunLock
from jaxtrain.runtime.files import identity


class InPlace:
    """Notices that the directory of a run, or one of its files, is gone, and takes the directory again.

    Args:
        run_dir: exists, and this process holds it.
        metrics: writes metrics.jsonl.
        report: called with one line for people.
    """

    def __init__(self, run_dir: Path, *, metrics: LastingWriter, report: Callable[[str], None]) -> None:
        self._run_dir, self._metrics, self._report = run_dir, metrics, report
        self._directory = identity(run_dir)
        self._lock: RunLock | None = None
        self._is_refused = False

    def look(self, files: dict[str, Callable[[], None]]) -> None:
        """Write again what is gone, and say so; does nothing where all is there.

        Args:
            files: names of files that the run needs, with what writes each.
        """
        here = identity(self._run_dir)
        is_gone = here != self._directory
        missing = [name for name in files if not (self._run_dir / name).is_file()]
        if not is_gone and not missing and self._metrics.is_in_place():
            return
        if is_gone and not self._take_again():
            return
        found = [] if self._metrics.is_in_place() else [self._metrics.write_again()]
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
        """Make the directory and hold it; False where another process does."""
        lock = RunLock(self._run_dir)
        try:
            # Our own lock is a file of another inode: it went with the directory.
            lock.__enter__()
        except ConfigError as error:
            if not self._is_refused:
                self._report(f"{self._run_dir} was deleted, moved or unmounted and cannot be written again: {error}")
            self._is_refused = True
            return False
        self.close()
        self._lock, self._directory, self._is_refused = lock, identity(self._run_dir), False
        return True
