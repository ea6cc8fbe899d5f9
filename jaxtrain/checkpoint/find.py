"""Finds the checkpoint that a path means: a run, its folder of checkpoints, or one step. No jax here."""

import os
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.checkpoint import places
from jaxtrain.checkpoint.directory import RECORD_ITEM
from jaxtrain.checkpoint.going_back import live_steps
from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.remote import RemotePath
from jaxtrain.checkpoint.where import checkpoint_folder
from jaxtrain.errors import CheckpointError


@dataclass(frozen=True)
class Found:
    """A checkpoint that a path means.

    Attributes:
        directory: folder of the steps, as `Checkpointer` takes it.
        step: the step that the path names; None: the newest that is intact.
        run_dir: directory of the run that saved it, as far as the path tells; None: it is in a store.
    """

    directory: Place
    step: int | None
    run_dir: Path | None


def find_checkpoint(path: str | os.PathLike[str]) -> Found:
    """Finds the checkpoint that a path means, without reading it.

    Args:
        path: A run directory (`runs/x`), a folder of steps (`runs/x/checkpoints`, or any that a `Checkpointer` writes,
            on gs:// or s3:// too), or one step of it (`runs/x/checkpoints/400`).

    Returns:
        The folder and the step.

    Raises:
        CheckpointError: There is no checkpoint at that path.
    """
    place = places.place_at(path, what="checkpoint", error=CheckpointError)
    if isinstance(place, RemotePath):
        return _find_in_store(place)
    folder = place.absolute()
    wanted = "give a run (runs/<name>), its checkpoints folder, or one step of it (runs/<name>/checkpoints/400)"
    if not folder.exists():
        raise CheckpointError(f"no folder at {path}; {wanted}")
    if not folder.is_dir():
        raise CheckpointError(f"{path} is a file, not a checkpoint; {wanted}")
    if folder.name.isdecimal() and (folder / RECORD_ITEM).is_dir():
        return Found(folder.parent, int(folder.name), folder.parent.parent)
    for steps, run_dir in ((folder, folder.parent), (checkpoint_folder(folder), folder)):
        if live_steps(steps):
            return Found(steps, None, run_dir)
    if (folder / "run.json").is_file():
        raise CheckpointError(f"the run {path} has no checkpoint yet; a run saves one at its end or on a signal")
    raise CheckpointError(f"{path} holds no checkpoint; {wanted}")


def _find_in_store(place: RemotePath) -> Found:
    try:
        if place.name.isdecimal() and places.is_complete(place, item=RECORD_ITEM):
            return Found(place.parent, int(place.name), None)
    except OSError as error:
        raise CheckpointError(f"cannot read {place}: {error.strerror}") from error
    if live_steps(place):
        return Found(place, None, None)
    raise CheckpointError(f"{place} holds no checkpoint; give the folder of the steps, as in checkpoint.directory")
