"""What follows a complete save, in the background of training: the step is flushed, read back, copied to the mirror.

A step counts as verified once every array of it was read from the disk and has the digest that it had in memory. Only
then are older steps deleted, so that a verified one is there at any time.
"""

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import monotonic as _monotonic

import numpy as np

from jaxtrain.checkpoint import digest, directory
from jaxtrain.checkpoint.directory import CheckpointInfo, DamagedError
from jaxtrain.checkpoint.failures import ReadError
from jaxtrain.checkpoint.line import Marks
from jaxtrain.checkpoint.mirror import Mirror
from jaxtrain.checkpoint.places import Place, sync_folder
from jaxtrain.checkpoint.storage import read_on_host
from jaxtrain.checkpoint.tree import shown_name
from jaxtrain.errors import CheckpointError, ConfigError

# Arrays that are read at once: small ones together, because each read has a cost of its own.
_READ_BYTES = 64 * 2**20
# What stands still for this long is left behind when a run ends: a network file system may never answer.
_PATIENCE_SECONDS = 60.0
# Arrays that are read back are seen to move only once they are read: such a read may take as long as a slow disk takes.
_SLOW_BYTES_PER_SECOND = 20e6
_LOOK_SECONDS = 0.5
# At its end the interpreter waits this long for a read: 64 MiB of a slow disk.
_LEAVING_SECONDS = 10.0


@dataclass(frozen=True)
class _Job:
    step: int
    verify: bool
    keep: Callable[[Marks], set[int]]


class Aftercare:
    """Looks after the complete steps of one checkpoint directory; process 0 alone has one.

    One thread works on one step at a time; of steps that wait only the newest is taken. It never raises: what it finds
    is asked for by the methods, which the thread of the training calls.

    Args:
        folder: the checkpoint directory.
        mirror: where copies go; None: nowhere.

    Attributes:
        verified: steps that are known to be intact.
    """

    def __init__(self, folder: Place, mirror: Mirror | None) -> None:
        self.mirror = mirror
        self.verified: set[int] = set()
        self._folder = folder
        self._condition = threading.Condition()
        self._waiting: _Job | None = None
        self._busy = False
        self._thread: threading.Thread | None = None
        self._reading = threading.Lock()
        self._is_over = False
        self._lines: list[str] = []
        self._damaged: dict[int, str] = {}
        self._mirror_fails = False
        self._read_bytes = 0
        self._reading_bytes = 0
        self._stands_at: int | None = None

    def begin(self, step: int, *, verify: bool, keep: Callable[[Marks], set[int]]) -> None:
        """Flush a complete step to the disk, read it back, and copy it.

        Args:
            step: its number.
            verify: whether it is read back; a step that is copied always is.
            keep: of the steps that have a copy, with their marks, those that stay.
        """
        with self._condition:
            self._waiting = _Job(step, verify or self.mirror is not None, keep)
            if self._thread is None:
                # Orbax asks jax for its backend in each read. Where jax was shut down at the end of the interpreter it
                # would start a second one, and abort a process that is one of several. (A run that is told to stop does
                # not wait for its last step to be read back.)
                atexit.unregister(self._keep_from_reading)
                atexit.register(self._keep_from_reading)
                # A daemon, because a file system that never answers must not keep the process from ending.
                self._thread = threading.Thread(target=self._work, name="jaxtrain-checkpoints", daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Wait until nothing is left to do, or what is done has stood still for a minute."""
        done, moved_at = self._done(), _monotonic()
        while not self._is_idle():
            # In this order: what moves on meanwhile is seen below.
            looked_at, patience = _monotonic(), _PATIENCE_SECONDS + self._reading_bytes / _SLOW_BYTES_PER_SECOND
            if self._done() != done:
                done, moved_at = self._done(), _monotonic()
            elif done == self._stands_at:
                return  # this was said before
            elif looked_at - moved_at > patience:
                self._stands_at = done
                with self._condition:
                    self._lines.append(f"{self._work_in_words()} stands still: it is left behind")
                return
        atexit.unregister(self._keep_from_reading)

    def _keep_from_reading(self) -> None:
        """Wait for the read that is under way, and let no further one begin."""
        self._is_over = True
        if self._reading.acquire(timeout=_LEAVING_SECONDS):
            self._reading.release()

    def _is_idle(self) -> bool:
        """Whether nothing is left to do, or will be within a moment."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._busy and self._waiting is None, timeout=_LOOK_SECONDS)

    def lines(self) -> list[str]:
        """Return what people should read of the work since the last call."""
        with self._condition:
            found, self._lines = self._lines, []
        return found

    def damaged(self) -> dict[int, str]:
        """Return the steps that read otherwise than they were saved, with the reason, since the last call."""
        with self._condition:
            found, self._damaged = self._damaged, {}
        return found

    def _done(self) -> int:
        """Grows with what is read back and copied."""
        return self._read_bytes + (0 if self.mirror is None else self.mirror.copied_bytes)

    @contextlib.contextmanager
    def _reads(self, num_bytes: int) -> Iterator[None]:
        with self._reading:
            if self._is_over:
                raise CheckpointError("the program ends")
            self._reading_bytes = num_bytes
            yield
            self._read_bytes, self._reading_bytes = self._read_bytes + num_bytes, 0

    def _work_in_words(self) -> str:
        if self.mirror is None or self._reading_bytes:
            return f"reading a checkpoint of {self._folder} back"
        return f"the copy of a checkpoint to {self.mirror.folder}"

    def _work(self) -> None:
        while True:
            with self._condition:
                job, self._waiting = self._waiting, None
                self._busy = job is not None
                if job is None:
                    self._thread = None
                    self._condition.notify_all()
                    return
            try:
                self._care_for(job)
            except Exception as error:  # nobody hears of it here; the step stays unverified, and older ones stay
                with self._condition:
                    self._lines.append(f"step {job.step} cannot be looked after: {type(error).__name__}: {error}")

    def _care_for(self, job: _Job) -> None:
        with contextlib.suppress(OSError):  # a step that was deleted meanwhile; what else fails shows in reading it
            sync_folder(directory.step_path(self._folder, job.step))
        if job.verify and job.step not in self.verified:
            try:
                verify_on_host(directory.read_info(self._folder, job.step), self._reads)
            except DamagedError as error:
                # Deleted meanwhile, or by somebody else: that is no damage of what was written.
                if directory.step_path(self._folder, job.step).is_dir():
                    with self._condition:
                        self._damaged[job.step] = str(error)
                return
            except (CheckpointError, OSError, MemoryError):
                return  # it stays unverified, and older steps stay too
            finally:
                self._reading_bytes = 0
            with self._condition:
                self.verified.add(job.step)
        if self.mirror is not None:
            self._copy(self.mirror, job)

    def _copy(self, mirror: Mirror, job: _Job) -> None:
        try:
            mirror.copy(job.step, keep=job.keep)
        except (OSError, CheckpointError, ConfigError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            line = (
                f"step {job.step} has no copy in {mirror.folder}: {reason}; training goes on, the next save tries again"
            )
            failed, self._mirror_fails = self._mirror_fails, True
        else:
            line = f"step {job.step} has a copy in {mirror.folder}: it can be written again"
            failed, self._mirror_fails = not self._mirror_fails, False
        if not failed:
            with self._condition:
                self._lines.append(line)


def verify_on_host(info: CheckpointInfo, reads: Callable[[int], AbstractContextManager[None]]) -> None:
    """Read every array of a step into the memory of this process, a few at a time, and compare it with its digest.

    No device and no other process takes part, so that a thread beside the training can do it.

    Args:
        info: record of the step.
        reads: what each read of that many bytes is made in.

    Raises:
        DamagedError: an array is missing or differs.
        CheckpointError: the files cannot be read for another reason.
    """
    waiting: list[str] = []
    num_bytes = 0
    names = list(info.digests)
    for name in names:
        waiting.append(name)
        num_bytes += info.bytes_of(name)
        if num_bytes >= _READ_BYTES or name == names[-1]:
            with reads(num_bytes):
                _compare(info, waiting)
            waiting, num_bytes = [], 0


def _compare(info: CheckpointInfo, names: list[str]) -> None:
    try:
        found = read_on_host(info.path, names)
    except ReadError as error:
        kind = CheckpointError if error.of_this_machine else DamagedError
        raise kind(f"checkpoint {info.path} cannot be read back: {error}") from None
    arrays = {name: array for name, array in found.items() if isinstance(array, np.ndarray) and array.dtype != object}
    values = digest.digests(arrays)
    altered = [name for name in names if values.get(name) != info.digests[name]]
    if altered:
        first = shown_name(altered[0])
        raise DamagedError(f"checkpoint {info.path} is damaged: {first} of step {info.step} is not what was saved")
