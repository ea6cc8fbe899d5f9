"""One writer per run directory: a lock that the kernel releases when its holder dies, however it dies."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from jaxtrain.errors import ConfigError
from jaxtrain.runtime.forks import drop_in_children
from jaxtrain.runtime.remarks import print_remark

LOCK_NAME = "lock"
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


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
        self._descriptor = descriptor
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
        if descriptor is not None:
            os.close(descriptor)

    def __exit__(self, *exception: object) -> None:
        self._keep_in_children()
        if self._descriptor is not None:
            # The file stays: if deleted, one process could hold it and another a new file of the same name.
            descriptor, self._descriptor = self._descriptor, None
            # The file system may be gone, or its handle stale: the run is over all the same.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            with contextlib.suppress(OSError):
                os.close(descriptor)


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
