"""One writer per run directory: a lock that the kernel releases when its holder dies, however it dies."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from jaxtrain.errors import ConfigError
from jaxtrain.runtime.cluster import environment_number, in_pod
from jaxtrain.runtime.host import drop_in_children
from jaxtrain.runtime.terminal import in_notebook, print_remark

LOCK_NAME = "lock"
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_JOIN_TIMEOUT = "JAXTRAIN_JOIN_TIMEOUT_SECONDS"
_JOIN_SECONDS = 300
_LOOK_SECONDS = 1.0
# Device and inode of the lock files that this process holds. The number of a process and the name of its host do not
# tell it from others: every pod has a process 1, and a pod that takes the place of another has its name.
_held: set[tuple[int, int]] = set()


class InUseError(ConfigError):
    """Another process holds the run directory.

    Args:
        run_dir: directory of the run.
        holder: the process, for people.
    """

    def __init__(self, run_dir: Path, holder: str) -> None:
        super().__init__(f"run directory {run_dir} is in use by {holder}; use another --run-dir or stop it")
        self.holder = holder


class RunLock:
    """Holds a run directory for this process, and creates it if need be; a context manager.

    With several processes, process 0 takes it for all.

    Args:
        run_dir: directory of the run.

    Raises:
        ConfigError: on entering, when another process holds it, or the path cannot be a directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self._descriptor: int | None = None
        self._identity = (-1, -1)
        self._keep_in_children: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        try:
            self.run_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self.run_dir / LOCK_NAME, flags, 0o640)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"run directory {self.run_dir} is {_in_the_way(self.run_dir)}") from error
        except OSError as error:
            raise ConfigError(
                f"run directory {self.run_dir} cannot be used: {error.strerror}; use another --run-dir"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise InUseError(self.run_dir, holder) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(descriptor)
                raise ConfigError(f"run directory {self.run_dir} cannot be locked: {error.strerror}") from error
            # Some network file systems are mounted without locks; refusing to train there would help nobody.
            print_remark(f"no locks on the file system of {self.run_dir}: start only one run there")
        self._descriptor, self._identity = descriptor, _identity(descriptor)
        _held.add(self._identity)
        # A worker that outlives its parent would hold the directory.
        self._keep_in_children = drop_in_children(self._forget)
        content = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        # What it says is for people alone: a full disk does not keep the lock from being held.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(content).encode(), 0)
        return self

    def is_in_place(self) -> bool:
        """Whether the file that is held is the one at its path; True where that cannot be found out."""
        if self._descriptor is None:
            return True
        try:
            there = os.stat(self.run_dir / LOCK_NAME, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return os.path.samestat(there, os.fstat(self._descriptor))

    def _forget(self) -> None:
        """In a forked child: the lock stays that of its parent."""
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self._identity)
        if descriptor is not None:
            os.close(descriptor)

    def __exit__(self, *exception: object) -> None:
        self._keep_in_children()
        _held.discard(self._identity)
        if self._descriptor is not None:
            # The file stays: if deleted, one process could hold it and another a new file of the same name.
            descriptor, self._descriptor = self._descriptor, None
            # The file system may be gone, or its handle stale: the run is over all the same.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            with contextlib.suppress(OSError):
                os.close(descriptor)


def wait_for_holder(run_dir: Path, *, looks: bool = True, goes_on: Callable[[bool], bool] = bool) -> None:
    """Waits until nobody holds a run directory, where a scheduler starts this process; elsewhere it returns at once.

    A job that is started again may begin while the pods of the one before it still save. The exit code of a directory
    that is in use would end it for good. It waits as long as for other processes to join, and `RunLock` then refuses.

    Args:
        run_dir: directory of the run.
        looks: whether this process looks who holds it; of several only process 0 does.
        goes_on: called after each look with whether this process has to wait; returns whether all processes wait.
    """
    end, is_told = time.monotonic() + _patience_seconds(), False
    while True:
        holder = _other_holder(run_dir) if looks and time.monotonic() < end else None
        if holder is not None and not is_told:
            is_told = True
            shown = f"waiting up to {end - time.monotonic():.0f} s for its end"
            print_remark(f"jaxtrain: run directory {run_dir} is in use by {holder}: {shown}")
        if not goes_on(holder is not None):
            return
        if looks:
            time.sleep(_LOOK_SECONDS)


def _other_holder(run_dir: Path) -> str | None:
    """Who holds a run directory, for people; None where nobody does, or this process, which would wait for itself."""
    try:
        descriptor = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if _identity(descriptor) in _held:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _holder(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _patience_seconds() -> int:
    """How long a held directory is waited for: not at all by who sees the line that it is held."""
    is_scheduled = in_pod() or "SLURM_JOB_ID" in os.environ or _JOIN_TIMEOUT in os.environ
    is_seen = in_notebook() or (sys.stderr is not None and sys.stderr.isatty())
    return (environment_number(_JOIN_TIMEOUT) or _JOIN_SECONDS) if is_scheduled and not is_seen else 0


def _in_the_way(run_dir: Path) -> str:
    """What a path is that cannot be a directory, and what to do."""
    for place in (run_dir, *run_dir.parents):
        if place.is_symlink() and not place.exists():
            below = "" if place == run_dir else f"below {place}, "
            there = os.readlink(place)
            return f"{below}a link to {there}, which is not there: make that folder, or use another --run-dir"
    return "a file: use another --run-dir"


def _holder(descriptor: int) -> str:
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {content['pid']} on {content['host']} since {content['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
