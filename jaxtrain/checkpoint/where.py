"""Where the checkpoints of a run are, asked with nothing but its directory. No jax here.

A run whose checkpoints are elsewhere has a note in its directory: the config says it too, but `run.json` may be the
file that is damaged and written again from a checkpoint.
"""

import json
import time
from pathlib import Path

from jaxtrain.checkpoint import going_back
from jaxtrain.checkpoint.directory import clear_leftovers
from jaxtrain.checkpoint.places import Place, delete_file, make_folder, move, names, place_at
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.runtime.files import write_json_atomic

FOLDER = "checkpoints"  # of a run directory
NOTE = "checkpoints.json"
PREVIOUS = "previous"


def checkpoint_folder(run_dir: str | Path) -> Place:
    """Where the checkpoints of a run are: the place that its note names, or the folder in its directory.

    Raises:
        CheckpointError: the note is damaged.
    """
    noted = read_note(Path(run_dir))
    return Path(run_dir) / FOLDER if noted is None else noted[0]


def configured_folder(setting: str | None, run_dir: Path) -> Place:
    """Where a config puts the checkpoints of a run.

    Args:
        setting: `checkpoint.directory`.
        run_dir: directory of the run.

    Raises:
        ConfigError: the setting is no path and no address of a store.
    """
    if setting is None:
        return run_dir / FOLDER
    place = place_at(setting, what="checkpoint.directory")
    return place.expanduser().absolute() if isinstance(place, Path) else place


def read_note(run_dir: Path) -> tuple[Place, str] | None:
    """The place that the note of a run names, and the identity of the run there; None where there is no note.

    Raises:
        CheckpointError: the note is damaged.
    """
    path = run_dir / NOTE
    try:
        content = json.loads(path.read_bytes())
        return place_at(content["directory"], what=str(path)), str(content["run"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(
            f'{path} is damaged: write {{"directory": "<where the checkpoints are>", "run": ""}} into it'
        ) from None


def write_note(run_dir: Path, place: Place, identity: str) -> None:
    """Write where the checkpoints of a run are."""
    write_json_atomic(run_dir / NOTE, {"directory": str(place), "run": identity})


def identity_of_steps(folder: Place) -> int | None:
    """What changes when the steps of a folder are moved away as those of an earlier run; None where there is none.

    Raises:
        OSError: the folder cannot be read.
    """
    if not any(name.isdecimal() for name in names(folder)):
        return None
    # The folder of a run directory is moved as a whole. Elsewhere it stays, and its steps move into one of `previous`.
    number = folder.stat().st_ino if isinstance(folder, Path) else 0
    return hash((number, *sorted(names(folder / PREVIOUS))))


def set_steps_aside(folder: Place) -> Place | None:
    """Move the steps of an earlier run in a folder of their own, to `previous/<time>/`; None where there are none.

    Raises:
        CheckpointError: they cannot be moved.
    """
    target = folder / PREVIOUS / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}"
    try:
        clear_leftovers(folder)
        steps = [name for name in names(folder) if name.isdecimal() or name == going_back.NOTE]
        if not steps:
            return None
        make_folder(target)
        for name in sorted(steps, key=lambda name: name == going_back.NOTE):
            if name.isdecimal():
                move(folder / name, target / name)
            else:
                delete_file(folder / name)
    except OSError as error:
        raise CheckpointError(f"cannot move the checkpoints of an earlier run to {target}: {error.strerror}") from error
    return target
