"""A run of a second, and a hook that does something to its files between two of its steps."""

import contextlib
import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jaxtrain as jt
from jaxtrain.metrics.progress import Progress

SMALL: dict[str, Any] = {
    "name": "small",
    "task": "classification",
    "model": dict(kind="mlp", hidden_dims=[16]),
    "data": dict(kind="digits"),
    "optimizer": dict(kind="adamw", learning_rate=1e-3, schedule=dict(kind="constant")),
    "train": dict(steps=12, global_batch_size=8),
    "evaluation": dict(max_batches=1),
    "checkpoint": dict(every=None),
    "logging": dict(every=1, tensorboard=False, report=False),
}


class At(Progress):
    """Does something once a step is shown, and keeps every line that people see."""

    def __init__(self, actions: Mapping[int, Callable[[], None]]) -> None:
        super().__init__(live=False)
        self._actions, self.lines = actions, []

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        super().update(step, values)
        if step in self._actions:
            self._actions[step]()

    def message(self, text: str) -> None:
        self.lines.append(text)
        super().message(text)

    def said(self, *words: str) -> list[str]:
        """The lines that hold all of these words."""
        return [line for line in self.lines if all(word in line for word in words)]


def train(
    run_dir: Path,
    actions: Mapping[int, Callable[[], None]] | None = None,
    *,
    resume: str | None = "auto",
    **changes: Any,
) -> tuple[jt.Result, At]:
    """Train SMALL with dotted changes (`checkpoint__every=2`)."""
    shown = At(actions or {})
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    return jt.run_config(SMALL, run_dir=run_dir, resume=resume, overrides=overrides, progress=shown), shown


@contextlib.contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A file system of a few MiB in memory; the test is skipped where nobody may mount one."""
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting a small disk takes root")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path, *, leave: int = 0) -> Path:
    """Fill the disk of a folder up to some bytes; returns the file that takes the space."""
    path = folder / "ballast"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 20, 1 << 12, 1):
        with contextlib.suppress(OSError):
            while os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize - leave >= size:
                if os.write(descriptor, bytes(size)) < size:
                    raise OSError(errno.ENOSPC, "full")
    os.close(descriptor)
    return path
