"""Going back to an earlier step: the steps after it are moved away once the first save of the new line is complete.

A line is a sequence of steps of one training. The order of operations makes a kill harmless: first a note is written,
then the new step, and only then are the abandoned steps moved. Until the new step is complete, the steps of the old
line are the valid ones; after that those of the new line are, whatever was already moved.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxtrain.checkpoint.directory import list_steps, step_path
from jaxtrain.errors import CheckpointError
from jaxtrain.runtime.files import write_json_atomic

_NOTE = "going_back.json"
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


def live_steps(directory: Path) -> list[int]:
    """Return the steps of the valid line in ascending order, without those that a new line has abandoned.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    # The note first: a listing that is older than the note would show both lines.
    noted = _read_note(directory)
    steps = list_steps(directory)
    if noted is None or not _is_complete(directory, noted, steps):
        return steps
    return [step for step in steps if step <= noted.after or step == noted.step]


def begin(directory: Path, *, after: int, step: int) -> None:
    """Write the note that the save of `step` abandons every step above `after`, and move away a step of that number.

    Raises:
        CheckpointError: a file cannot be written or renamed.
    """
    folder = f"{_ABANDONED}{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**6:06d}"
    replaces = step in list_steps(directory)
    noted = GoingBack(after, step, folder, replaces)
    try:
        write_json_atomic(directory / _NOTE, asdict(noted))
        if replaces:
            _move(directory, [step], folder)
    except OSError as error:
        raise CheckpointError(f"cannot go back to step {after} in {directory}: {error.strerror}") from error


def settle(directory: Path, report: Callable[[str], None]) -> list[int]:
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
    steps = list_steps(directory)
    folder = directory / noted.folder
    try:
        if not _is_complete(directory, noted, steps):
            if noted.replaces and (folder / str(noted.step)).is_dir() and not step_path(directory, noted.step).exists():
                (folder / str(noted.step)).rename(step_path(directory, noted.step))
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
            (directory / _NOTE).unlink(missing_ok=True)
            return []
        _move(directory, [step for step in steps if step > noted.after and step != noted.step], noted.folder)
        abandoned = list_steps(folder)
        (directory / _NOTE).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot move abandoned steps to {folder}: {error.strerror}") from error
    report(
        f"step {noted.step} was saved after going back: the abandoned {', '.join(map(str, abandoned))} of "
        f"{directory} moved to {folder.name}, which is kept until you delete it"
    )
    return abandoned


def abandoned_folders(directory: Path) -> list[Path]:
    """Return the directories of abandoned steps, oldest first; each can be opened as a checkpoint directory."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if path.name.startswith(_ABANDONED) and path.is_dir()]
    return sorted(found, key=lambda path: path.name)


def _is_complete(directory: Path, noted: GoingBack, steps: Iterable[int]) -> bool:
    # Where the old line has a step of that number too, the new one is complete only if the old one was moved away.
    return noted.step in steps and (not noted.replaces or (directory / noted.folder / str(noted.step)).is_dir())


def _move(directory: Path, steps: Iterable[int], folder: str) -> None:
    target = directory / folder
    target.mkdir(mode=0o750, exist_ok=True)
    for step in steps:
        step_path(directory, step).rename(target / str(step))


def _read_note(directory: Path) -> GoingBack | None:
    try:
        return GoingBack(**json.loads((directory / _NOTE).read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {directory / _NOTE}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{directory / _NOTE} is damaged: move the steps that you do not want to another folder, then delete it"
        ) from error
