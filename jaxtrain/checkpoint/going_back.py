"""Going back to an earlier step: the steps after it are moved away once the first save of the new line is complete.

A line is a sequence of steps of one training. The order of operations makes a kill harmless: first a note is written,
then the new step, and only then are the abandoned steps moved. Until the new step is complete, the steps of the old
line are the valid ones; after that those of the new line are, whatever was already moved.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from jaxtrain.checkpoint import places
from jaxtrain.checkpoint.directory import list_steps, step_path
from jaxtrain.checkpoint.places import Place
from jaxtrain.errors import CheckpointError

NOTE = "going_back.json"
_ABANDONED = "abandoned-"


@dataclass(frozen=True)
class GoingBack:
    """A save that begins a new line of steps.

    Attributes:
        after: steps above this number are abandoned.
        step: number of the saved step, the first of the new line.
        folder: name of the directory, beside the steps, to which abandoned steps are moved.
        replaces: whether the old line has a step of the same number.
    """

    after: int
    step: int
    folder: str
    replaces: bool


def live_steps(directory: Place) -> list[int]:
    """Return the steps of the valid line in ascending order, without those that a new line has abandoned.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    # The note first: a listing that is older than the note would show both lines.
    noted = _read_note(directory)
    steps = list_steps(directory)
    try:
        if noted is None or not _is_complete(directory, noted, steps):
            return steps
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}: {error.strerror}") from error
    return [step for step in steps if step <= noted.after or step == noted.step]


def begin(directory: Place, *, after: int, step: int) -> None:
    """Write the note that the save of `step` abandons every step above `after`, and move away a step of that number.

    Raises:
        CheckpointError: a file cannot be written or renamed.
    """
    folder = f"{_ABANDONED}{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**6:06d}"
    replaces = step in list_steps(directory)
    noted = GoingBack(after, step, folder, replaces)
    try:
        places.write_json(directory / NOTE, asdict(noted))
        if replaces:
            _move(directory, [step], folder)
    except OSError as error:
        raise CheckpointError(f"cannot go back to step {after} in {directory}: {error.strerror}") from error


def settle(directory: Place, report: Callable[[str], None]) -> list[int]:
    """Carry out a note: move the abandoned steps away where the new step is complete, else undo the note.

    Args:
        directory: folder of the steps.
        report: called with one line when steps were abandoned.

    Returns:
        The numbers of the abandoned steps.

    Raises:
        CheckpointError: a step cannot be renamed.
    """
    noted = _read_note(directory)
    if noted is None:
        return []
    folder = directory / noted.folder
    try:
        places.finish_moves(directory)
        places.finish_moves(folder)  # of a step on its way back
        steps = list_steps(directory)
        if not _is_complete(directory, noted, steps):
            old, place = folder / str(noted.step), step_path(directory, noted.step)
            if noted.replaces and old.is_dir() and places.make_free(place):
                places.move(old, place)
            places.remove_if_empty(folder)
            places.delete_file(directory / NOTE)
            return []
        _move(directory, [step for step in steps if step > noted.after and step != noted.step], noted.folder)
        abandoned = list_steps(folder)
        places.delete_file(directory / NOTE)
    except OSError as error:
        raise CheckpointError(f"cannot move abandoned steps to {folder}: {error.strerror}") from error
    report(
        f"step {noted.step} was saved after going back: the abandoned {', '.join(map(str, abandoned))} of "
        f"{directory} moved to {folder.name}, which is kept until you delete it"
    )
    return abandoned


def abandoned_folders(directory: Place) -> list[Place]:
    """Return the directories of abandoned steps, oldest first; each can be opened as a checkpoint directory."""
    try:
        found = sorted(name for name in places.names(directory) if name.startswith(_ABANDONED))
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}: {error.strerror}") from error
    return [directory / name for name in found if (directory / name).is_dir()]


def _is_complete(directory: Place, noted: GoingBack, steps: Iterable[int]) -> bool:
    # Where the old line has a step of that number too, the new one is complete only if the old one was moved away.
    return noted.step in steps and (
        not noted.replaces or places.has_arrived(directory / noted.folder / str(noted.step))
    )


def _move(directory: Place, steps: Iterable[int], folder: str) -> None:
    target = directory / folder
    places.make_folder(target)
    for step in steps:
        places.move(step_path(directory, step), target / str(step))


def _read_note(directory: Place) -> GoingBack | None:
    try:
        return GoingBack(**json.loads(places.read_bytes(directory / NOTE)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {directory / NOTE}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{directory / NOTE} is damaged: move the steps that you do not want to another folder, then delete it"
        ) from error
