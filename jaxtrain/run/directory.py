"""The directory of a run: its path, its lock, and what a new run in it moves aside. No jax here."""

import contextlib
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from jaxtrain.checkpoint.directory import moment
from jaxtrain.config import Loaded
from jaxtrain.config.arguments import local_path
from jaxtrain.config.files import RUN_FILE
from jaxtrain.config.schema import check_run_name
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.host import drop_in_children
from jaxtrain.runtime.terminal import print_remark

LOCK_NAME = "lock"
_INSTEAD = "use a local folder; only checkpoints can be elsewhere: checkpoint.directory=gs://bucket/name (or s3://)"
_OF_A_RUN = (
    *("checkpoints", "metrics.jsonl", "tensorboard", RUN_FILE, "report.html", "sample.txt"),
    *("profile", "trackers", "tokenizer.json", "tokenizer_config.json"),
)


def run_folder(run_dir: str | Path | None, name: str) -> Path:
    """The directory of a run: the one that was given, or runs/<name>."""
    if run_dir is not None:
        return local_path(run_dir, what="run directory", instead=_INSTEAD)
    folder = local_path(name, what="name", instead=_INSTEAD)
    try:
        check_run_name(name)
    except ValueError as error:
        raise ConfigError(f"name: {error}") from None
    return Path("runs") / folder


def folder_of(loaded: Loaded, run_dir: str | Path | None) -> Path:
    """The directory of the run of a config: that which was given, the run that the config is of, or runs/<name>."""
    if run_dir is None and loaded.run_dir is not None:
        return loaded.run_dir
    return run_folder(run_dir, loaded.name)


def numbered_folder(name: str) -> Path:
    """A new directory runs/<name>-<number>, the same for all processes; every process calls this."""
    from jaxtrain.checkpoint.storage import from_process_0

    name = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:60] or "run"
    endings = [path.name.removeprefix(f"{name}-") for path in Path("runs").glob(f"{name}-*")]
    number = 1 + max((int(ending) for ending in endings if ending.isdecimal()), default=0)
    return Path("runs") / f"{name}-{from_process_0(lambda: number)}"


class RunLock:
    """Holds a run directory for this process, and creates it if need be; the kernel releases it when its holder dies.

    With several processes, process 0 takes it for all.
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
        except OSError as error:
            in_the_way = isinstance(error, (FileExistsError, NotADirectoryError))
            reason = "is a file" if in_the_way else f"cannot be used: {error.strerror}"
            raise ConfigError(f"run directory {self.run_dir} {reason}; use another --run-dir") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise ConfigError(
                f"run directory {self.run_dir} is in use by {holder}; use another --run-dir or stop it"
            ) from error
        except OSError:  # some network file systems are mounted without locks
            print_remark(f"no locks on the file system of {self.run_dir}: start only one run there")
        self._descriptor = descriptor
        # A worker that outlives its parent would hold the directory.
        self._keep_in_children = drop_in_children(self._close)
        content = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # what it says is for people alone
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(content).encode(), 0)
        return self

    def __exit__(self, *exception: object) -> None:
        # The file stays: if deleted, one process could hold it and another a new file of the same name.
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
        self._keep_in_children()
        self._close()

    def _close(self) -> None:
        descriptor = self._descriptor
        self._descriptor = None
        if descriptor is not None:
            os.close(descriptor)


def _holder(descriptor: int) -> str:
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {content['pid']} on {content['host']} since {content['since']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def set_aside(run_dir: Path) -> Path | None:
    """Move what an earlier run left in the directory to `previous/<time>/`; None where there was nothing."""
    old = [run_dir / name for name in _OF_A_RUN if (run_dir / name).exists()]
    if not old:
        return None
    folder = run_dir / "previous" / moment()
    folder.mkdir(parents=True)
    for path in old:
        path.rename(folder / path.name)
    return folder
