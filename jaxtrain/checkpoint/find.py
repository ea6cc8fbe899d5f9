"""Finds the checkpoint that a path means: a run, its folder of checkpoints, or one step. No jax here."""

import os
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.checkpoint.directory import RECORD_ITEM
from jaxtrain.checkpoint.going_back import live_steps
from jaxtrain.config.local_path import local_path
from jaxtrain.errors import CheckpointError

_FOLDER = "checkpoints"  # of a run directory


@dataclass(frozen=True)
class Found:
    """A checkpoint that a path means.

    Attributes:
        directory: folder of the steps, as `Checkpointer` takes it.
        step: the step that the path names; None: the newest that is intact.
    """

    directory: Path
    step: int | None


def find_checkpoint(path: str | os.PathLike[str]) -> Found:
    """Finds the checkpoint that a path means, without reading it.

    Args:
        path: A run directory (`runs/x`), a folder of steps (`runs/x/checkpoints`, or any that a `Checkpointer` writes),
            or one step of it (`runs/x/checkpoints/400`).

    Returns:
        The folder and the step.

    Raises:
        CheckpointError: There is no checkpoint at that path.
    """
    folder = local_path(path, what="checkpoint", error=CheckpointError).absolute()
    wanted = "give a run (runs/<name>), its checkpoints folder, or one step of it (runs/<name>/checkpoints/400)"
    if not folder.exists():
        raise CheckpointError(f"no folder at {path}; {wanted}")
    if not folder.is_dir():
        raise CheckpointError(f"{path} is a file, not a checkpoint; {wanted}")
    if folder.name.isdecimal() and (folder / RECORD_ITEM).is_dir():
        return Found(folder.parent, int(folder.name))
    for steps in (folder, folder / _FOLDER):
        if live_steps(steps):
            return Found(steps, None)
    if (folder / "run.json").is_file():
        raise CheckpointError(f"the run {path} has no checkpoint yet; a run saves one at its end or on a signal")
    raise CheckpointError(f"{path} holds no checkpoint; {wanted}")
