"""Where the checkpoints of a run are, and whose: asked with nothing but a path. No jax here.

A run whose checkpoints are elsewhere (`checkpoint.directory`) has a note in its directory: the config says it too, but
`run.json` may be the file that is damaged and written again from a checkpoint.

The run directory has a lock of the kernel, which a store has not. In its place the folder of the steps holds an object
that names the run, and the start of it that writes. It is written only where there is none, which S3 and Google's store
ensure in one operation; the emulator of the latter does not, so it is read again after it was written. Before each save
the process that writes looks whether it still is the one that is named.
"""

import contextlib
import json
import os
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.checkpoint import directory, places
from jaxtrain.checkpoint.directory import list_steps
from jaxtrain.checkpoint.places import Place, place_at
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.runtime.files import write_json_atomic

FOLDER = "checkpoints"  # of a run directory
NOTE = "checkpoints.json"  # in a run directory
MARKER = "jaxtrain_run.json"  # in a folder of steps
PREVIOUS = "previous"


@dataclass(frozen=True)
class Found:
    """A checkpoint that a path means."""

    directory: Place  # of the steps, as `Checkpointer` takes it
    step: int | None  # that the path names; None: the newest that is intact
    run_dir: Path | None  # of the run that saved it, as far as the path tells; None: it is in a store


def find_checkpoint(path: str | os.PathLike[str]) -> Found:
    """Find the checkpoint that a path means, without reading it; a CheckpointError where there is none.

    Args:
        path: a run directory (`runs/x`), a folder of steps (`runs/x/checkpoints`, or any that a `Checkpointer` writes,
            on gs:// or s3:// too), or one step of it (`runs/x/checkpoints/400`).
    """
    folder = place_at(path, what="checkpoint", error=CheckpointError)
    if folder.name.isdecimal() and int(folder.name) in list_steps(folder.parent):
        return Found(folder.parent, int(folder.name), folder.parent.parent if isinstance(folder, Path) else None)
    candidates: list[tuple[Place, Path | None]] = [(folder, folder.parent if isinstance(folder, Path) else None)]
    if isinstance(folder, Path):
        candidates.append((checkpoint_folder(folder), folder))
    for steps, run_dir in candidates:
        if list_steps(steps):
            return Found(steps, None, run_dir)
    raise CheckpointError(
        f"no checkpoint at {path}; give a run (runs/<name>), which saves one at its end or on a signal, a folder of "
        "checkpoints, or one step of it (runs/<name>/checkpoints/400)"
    )


def checkpoint_folder(run_dir: str | Path) -> Place:
    """Where the checkpoints of a run are: the place that its note names, or the folder in its directory."""
    noted = read_note(Path(run_dir))
    return Path(run_dir) / FOLDER if noted is None else noted[0]


def configured_folder(setting: str | None, run_dir: Path) -> Place:
    """Where a config puts the checkpoints of a run: `checkpoint.directory`, or the folder in its directory."""
    return run_dir / FOLDER if setting is None else place_at(setting, what="checkpoint.directory")


def read_note(run_dir: Path) -> tuple[Place, str] | None:
    """The place that the note of a run names, and the identity of the run there; None where there is no note."""
    try:
        content = json.loads((run_dir / NOTE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return place_at(content["directory"], what="checkpoint.directory"), str(content["run"])


def write_note(run_dir: Path, place: Place, identity: str) -> None:
    """Write where the checkpoints of a run are."""
    write_json_atomic(run_dir / NOTE, {"directory": str(place), "run": identity})


def set_steps_aside(folder: Place) -> Place | None:
    """Move the steps of an earlier run in a folder of their own, to `previous/<time>/`; None where there are none."""
    target = folder / PREVIOUS / directory.moment()
    with directory.failing(f"cannot move the checkpoints of an earlier run to {target}"):
        directory.clear_leftovers(folder)
        steps = [int(name) for name in places.names(folder) if name.isdecimal()]
        directory.move_steps(folder, steps, target)
    return target if steps else None


class Owner:
    """The hold of this process on the folder of the checkpoints of its run, with the marker that it wrote there."""

    def __init__(self, folder: Place, marker: dict[str, str]) -> None:
        self._folder, self._marker = folder, marker

    def other(self) -> str | None:
        """Who has taken the folder over; None where it is still this process's, or nobody can tell."""
        with contextlib.suppress(OSError):  # the save that follows says what is wrong with the store
            found = _read(self._folder)
            return None if found is None or found["start"] == self._marker["start"] else _text(found)
        return None


def take(folder: Place, run_dir: Path, *, name: str, takes_over: bool) -> tuple[Owner, str | None]:
    """Make a folder that of the run in a locked directory, for this process, and note it there.

    Returns:
        The hold, and a line for people where another run's folder was taken over, if it may be.

    Raises:
        ConfigError: another run has it, or it cannot be written.
    """
    noted = read_note(run_dir)
    known = noted[1] if noted is not None and noted[0] == folder else ""
    marker = {
        "run": known or uuid.uuid4().hex,  # identity of the run, which its directory keeps
        "start": uuid.uuid4().hex,  # of the process that writes
        "name": name,
        "run_dir": str(run_dir.absolute()),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    try:
        places.make_folder(folder)
        found = _read(folder)
        is_own = known or folder == run_dir.absolute() / FOLDER
        whose = None
        if found is not None and (found["run"] != marker["run"] or _is_copy(found, run_dir)):
            whose = _text(found)
            marker["run"] = uuid.uuid4().hex  # a copy of a run directory becomes a run of its own
        elif found is None and not is_own and list_steps(folder):
            whose = "a run that it does not name"
        if whose is not None and not takes_over:
            raise _refused(folder, whose)
        # Before the marker: a kill between the two must not leave a folder that its own run takes for another's.
        write_note(run_dir, folder, marker["run"])
        with contextlib.suppress(FileExistsError):
            places.write_json(folder / MARKER, marker, only_new=found is None)
        written = _read(folder) or marker
        if written["start"] != marker["start"]:
            raise _refused(folder, _text(written))
    except OSError as error:
        if noted is None:
            (run_dir / NOTE).unlink(missing_ok=True)
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError) and isinstance(folder, places.RemotePath):
            reason = f"bucket {folder.bucket} does not exist, or is not yours; create it, or use another"
        raise ConfigError(f"checkpoint.directory: {folder} cannot be used: {reason}") from error
    return Owner(folder, marker), None if whose is None else f"{folder} is taken over from {whose}"


def _is_copy(found: dict[str, str], run_dir: Path) -> bool:
    """Whether a run directory is a copy (`cp -r`) of the one that a marker names, which still is there on this host."""
    there = Path(found["run_dir"])
    is_here = found["host"] == socket.gethostname() and (there / NOTE).exists()
    return is_here and not there.samefile(run_dir)


def _text(marker: dict[str, str]) -> str:
    return f"the run {marker['name']} ({marker['run_dir']} on {marker['host']}, started {marker['since']})"


def _refused(folder: Place, whose: str) -> ConfigError:
    return ConfigError(
        f"checkpoint.directory: {folder} holds the checkpoints of {whose}; use another folder, resume that run in "
        f"this directory with --resume must, or delete {folder / MARKER} if that run has ended and has no checkpoints"
    )


def _read(folder: Place) -> dict[str, str] | None:
    with contextlib.suppress(FileNotFoundError):
        return json.loads((folder / MARKER).read_bytes())
    return None
