"""Where the checkpoints of a run are, and which run owns them, found out from a path alone. No jax here.

A run whose checkpoints are elsewhere (`checkpoint.directory`) has a note in its directory. The config says it too, but
`run.json` may be the file that is damaged and written again from a checkpoint.

A run directory is locked by the kernel, which an object store is not. Instead the folder of the steps holds a marker
that names the run, and the process that writes. A run is identified by its name, config and data, so that it resumes on
a machine that has nothing else of it. Before each save the process that writes checks whether the marker still names
it: of two processes the later one continues.
"""

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
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
PREVIOUS = "previous"  # in a folder of steps
_MARKER_KEYS = ("run", "start", "name", "run_dir", "host", "since")


@dataclass(frozen=True)
class CheckpointPath:
    """A checkpoint that a path means.

    Attributes:
        directory: folder of the steps, as `Checkpointer` takes it.
        step: the step that the path names; None: the newest intact one.
        run_dir: directory of the run, as far as the path tells; None: the checkpoint is in a store.
    """

    directory: Place
    step: int | None
    run_dir: Path | None


def find_checkpoint(path: str | os.PathLike[str]) -> CheckpointPath:
    """Find the checkpoint that a path means, without reading it.

    Args:
        path: a run directory (`runs/x`), a folder of steps (`runs/x/checkpoints`, or any that a `Checkpointer` writes,
            on gs:// or s3:// too), or one step of it (`runs/x/checkpoints/400`).

    Raises:
        CheckpointError: there is none.
    """
    folder = place_at(path, what="checkpoint", error=CheckpointError)
    step = None
    if folder.name.isdecimal() and int(folder.name) in list_steps(folder.parent):
        step = int(folder.name)
        folder = folder.parent
    if list_steps(folder):
        return CheckpointPath(folder, step, folder.parent if isinstance(folder, Path) else None)
    if isinstance(folder, Path):
        steps = checkpoint_folder(folder)
        if list_steps(steps):
            return CheckpointPath(steps, None, folder)
    raise CheckpointError(
        f"no checkpoint at {path}; give a run (runs/<name>), which saves one at its end or on a signal, a folder of "
        "checkpoints, or one step of it (runs/<name>/checkpoints/400)"
    )


def checkpoint_folder(run_dir: str | Path) -> Place:
    """Return where the checkpoints of a run are: the place that its note names, or the folder in its directory."""
    return _read_note(Path(run_dir)) or Path(run_dir) / FOLDER


def configured_folder(setting: str | None, run_dir: Path) -> Place:
    """Return where a config puts the checkpoints of a run: `checkpoint.directory`, or the folder in its directory."""
    return run_dir / FOLDER if setting is None else place_at(setting, what="checkpoint.directory")


def _read_note(run_dir: Path) -> Place | None:
    note = _read(run_dir / NOTE, ("directory",))
    return None if note is None else place_at(note["directory"], what="checkpoint.directory")


def set_steps_aside(folder: Place) -> Place | None:
    """Move the steps of an earlier run to `previous/<time>/` and return that folder, or None if there are no steps."""
    target = folder / PREVIOUS / directory.moment()
    with directory.failing(f"cannot move the checkpoints of an earlier run to {target}"):
        directory.clear_leftovers(folder)
        steps = [int(name) for name in places.names(folder) if name.isdecimal()]
        for step in steps:
            places.make_folder(target)
            places.move(folder / str(step), target / str(step))
    return target if steps else None


@dataclass(frozen=True)
class Owner:
    """A process that owns the folder of the checkpoints of its run, as long as the marker there names it."""

    folder: Place
    start: str  # name of this process in the marker

    def other(self) -> str | None:
        """Describe who has taken the folder over, or return None if nobody has, or the marker cannot be read."""
        with contextlib.suppress(OSError, CheckpointError):  # the next save reports what is wrong with the store
            marker = _read(self.folder / MARKER, _MARKER_KEYS)
            if marker is not None and marker["start"] != self.start:
                return _text(marker)
        return None


def take(
    folder: Place,
    run_dir: Path,
    *,
    name: str,
    identity: str,
    takes_over: bool,
    report: Callable[[str], None],
) -> Owner:
    """Make this process the owner of a folder of checkpoints, and note the folder in the locked run directory.

    Args:
        folder: where the checkpoints are.
        run_dir: directory of the run.
        name: name of the run.
        identity: `run_identity`, which is the same on every machine.
        takes_over: whether the folder may belong to another run.
        report: called with a line if the folder is taken over from another run directory.

    Raises:
        ConfigError: the folder belongs to another run, or cannot be written.
    """
    marker = {
        "run": identity,
        "start": uuid.uuid4().hex,  # of the process that writes
        "name": name,
        "run_dir": str(run_dir.absolute()),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    try:
        places.make_folder(folder)
        former = _read(folder / MARKER, _MARKER_KEYS)
        if former is None:
            if list_steps(folder) and folder != run_dir.absolute() / FOLDER and not takes_over:
                raise _refused(folder, "a run that it does not name")
        elif former["run_dir"] != marker["run_dir"] or _read_note(run_dir) != folder:
            if former["run"] != identity and not takes_over:
                raise _refused(folder, _text(former))
            report(f"{folder} is taken over from {_text(former)}")
        places.write_json(folder / MARKER, marker)
        write_json_atomic(run_dir / NOTE, {"directory": str(folder)})
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError) and isinstance(folder, places.RemotePath):
            reason = f"bucket {folder.bucket} does not exist, or is not yours; create it, or use another"
        raise ConfigError(f"checkpoint.directory: {folder} cannot be used: {reason}") from error
    return Owner(folder, marker["start"])


def _text(marker: dict[str, str]) -> str:
    return f"the run {marker['name']} ({marker['run_dir']} on {marker['host']}, started {marker['since']})"


def _refused(folder: Place, whose: str) -> ConfigError:
    return ConfigError(
        f"checkpoint.directory: {folder} holds the checkpoints of {whose}, another name, configuration or data; use "
        f"another folder, resume that run here with --resume must, or delete {folder / MARKER} if it has ended"
    )


def _read(file: Place, keys: Sequence[str]) -> dict[str, str] | None:
    """Return the texts under these keys of a JSON file, or None if there is no file."""
    try:
        content = json.loads(file.read_bytes())
        return {key: str(content[key]) for key in keys}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{file} is damaged; delete it, and start again with --resume must") from None
