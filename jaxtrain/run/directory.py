"""The directory of a run: its path, its lock, and what a new run in it moves aside. No jax here."""

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

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
_RUN_FILES = (
    RUN_FILE,
    "checkpoints",
    "metrics.jsonl",
    "profile",
    "report.html",
    "sample.txt",
    "tensorboard",
    "tokenizer.json",
    "tokenizer_config.json",
    "trackers",
)


def run_folder(run_dir: str | Path | None, name: str) -> Path:
    """Return the directory of a run: `run_dir`, or runs/<name>."""
    if run_dir is not None:
        return local_path(run_dir, what="run directory", instead=_INSTEAD)
    try:
        check_run_name(name)
    except ValueError as error:
        raise ConfigError(f"name: {error}") from None
    return Path("runs") / name


def folder_of(loaded: Loaded, run_dir: str | Path | None) -> Path:
    """Return the directory of a config's run: `run_dir`, the run that the config was read from, or runs/<name>."""
    if run_dir is None and loaded.run_dir is not None:
        return loaded.run_dir
    return run_folder(run_dir, loaded.name)


def numbered_folder(name: str) -> Path:
    """Return a new directory runs/<name>-<number>, the same in all processes; every process calls this."""
    from jaxtrain.checkpoint.storage import from_process_0

    name = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "run"
    number = 1
    while Path("runs", f"{name}-{number}").exists():
        number += 1
    return Path("runs") / f"{name}-{from_process_0(lambda: number)}"


@contextlib.contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for this process, and create it if need be; the kernel releases it if its holder dies.

    With several processes, process 0 holds it for all.

    Raises:
        ConfigError: another process holds it, or it cannot be used.
    """
    try:
        run_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o640)
    except OSError as error:
        raise ConfigError(f"run directory {run_dir} cannot be used: {error.strerror}; use another --run-dir") from error
    # A worker that outlives its parent would hold the directory.
    keep_in_children = drop_in_children(lambda: os.close(lock))
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock, 4096, 0).decode(errors="replace") or "another process"
            raise ConfigError(
                f"run directory {run_dir} is in use by {holder}; use another --run-dir or stop it"
            ) from error
        except OSError:  # some network file systems are mounted without locks
            print_remark(f"no locks on the file system of {run_dir}: start only one run there")
        holder = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        with contextlib.suppress(OSError):  # the disk may be full
            os.ftruncate(lock, 0)
            os.pwrite(lock, holder.encode(), 0)
        yield
    finally:
        # The file stays: if deleted, one process could hold it and another a new file of the same name.
        keep_in_children()
        os.close(lock)


def set_aside(run_dir: Path) -> Path | None:
    """Move the files of an earlier run to `previous/<time>/`; return that folder, or None if there are no files."""
    paths = [run_dir / name for name in _RUN_FILES if (run_dir / name).exists()]
    if not paths:
        return None
    folder = run_dir / "previous" / moment()
    folder.mkdir(parents=True)
    for path in paths:
        path.rename(folder / path.name)
    return folder
