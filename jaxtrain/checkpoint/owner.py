"""Whose a `checkpoint.directory` is: two runs in one folder would delete and resume one another's steps. No jax here.

The run directory has a lock of the kernel, which a store has not. In its place the folder holds an object that names
the run, and the start of it that writes. It is written only where there is none, which S3 and Google's store ensure in
one operation; the emulator of the latter does not, so it is read again after it was written. Before each save the
process that writes looks whether it still is the one that is named. Between that look and the save another start may
take over: that moment, of a request's length, is not covered.
"""

import contextlib
import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxtrain.checkpoint import places
from jaxtrain.checkpoint.directory import list_steps
from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.where import FOLDER, NOTE, read_note, write_note
from jaxtrain.errors import CheckpointError, ConfigError

MARKER = "jaxtrain_run.json"


@dataclass(frozen=True)
class _Marker:
    """What the object in the folder says.

    Attributes:
        run: identity of the run, which its directory keeps.
        start: identity of the process that writes.
        name, run_dir, host, since: for people.
    """

    run: str
    start: str
    name: str
    run_dir: str
    host: str
    since: str

    def text(self) -> str:
        """The run as people read it."""
        return f"the run {self.name} ({self.run_dir} on {self.host}, started {self.since})"


class Owner:
    """The hold of this process on the folder of the checkpoints of its run.

    Args:
        folder: the folder.
        marker: as this process wrote it.
    """

    def __init__(self, folder: Place, marker: _Marker) -> None:
        self._folder, self._marker = folder, marker

    def other(self) -> str | None:
        """Who has taken the folder over; None where it is still this process's, or nobody can tell."""
        try:
            found = _read(self._folder)
        except OSError:
            return None  # the save that follows says what is wrong with the store
        except CheckpointError:
            return f"a start that the damaged {self._folder / MARKER} does not name"
        return None if found is None or found.start == self._marker.start else found.text()


def take(folder: Place, run_dir: Path, *, name: str, takes_over: bool) -> tuple[Owner, str | None]:
    """Make a folder that of a run, for this process, and note it in the run directory.

    Args:
        folder: `checkpoint.directory`.
        run_dir: directory of the run, which is locked.
        name: of the run.
        takes_over: whether the folder of another run becomes that of this one.

    Returns:
        The hold, and a line for people where another run's folder was taken over.

    Raises:
        ConfigError: another run has it, or it cannot be written.
        CheckpointError: the note in the run directory is damaged.
    """
    noted = read_note(run_dir)
    known = noted[1] if noted is not None and noted[0] == folder else ""
    run = known or uuid.uuid4().hex
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    marker = _Marker(run, uuid.uuid4().hex, name, str(run_dir.absolute()), socket.gethostname(), since)
    try:
        places.make_folder(folder)
        found = _read(folder)
        line = None
        if found is not None and found.run != run:
            if not takes_over:
                raise _refused(folder, found)
            line = f"{folder} is taken over from {found.text()}"
        if found is None and run != known and not takes_over:
            _check_nobodys(folder, run_dir)
        # Before the marker: a kill between the two must not leave a folder that its own run takes for another's.
        before = _noted(run_dir)
        write_note(run_dir, folder, run)
        try:
            if found is None:
                with contextlib.suppress(FileExistsError):
                    places.write_first(folder / MARKER, asdict(marker))
                found = _read(folder)
                if found is not None and found.start != marker.start:
                    raise _refused(folder, found)
            else:
                places.write_json(folder / MARKER, asdict(marker))
        except (ConfigError, FileNotFoundError, PermissionError):
            # Nothing was written. After another error it may have been, and the note is what tells that it is ours.
            _note_again(run_dir, before)
            raise
    except OSError as error:
        raise ConfigError(f"checkpoint.directory: {folder} cannot be used: {_reason(error, folder)}") from error
    return Owner(folder, marker), line


def _check_nobodys(folder: Place, run_dir: Path) -> None:
    """Refuse a folder whose steps somebody else saved who wrote no marker, such as that of another run's directory."""
    steps = [] if folder == run_dir.absolute() / FOLDER else list_steps(folder)
    if steps:
        raise ConfigError(
            f"checkpoint.directory: {folder} holds checkpoints (the newest is step {steps[-1]}) and does not say of "
            "which run; name another folder, or go on with them in this directory with --resume must"
        )


def _reason(error: OSError, folder: Place) -> str:
    if isinstance(error, FileNotFoundError) and isinstance(folder, places.RemotePath):
        return f"there is no bucket {folder.bucket}, or it is not yours; make it, or name another"
    return error.strerror or str(error)


def _refused(folder: Place, found: _Marker) -> ConfigError:
    if not list_steps(folder):
        # --resume must would find nothing to go on with.
        return ConfigError(
            f"checkpoint.directory: {folder} is that of {found.text()}, which has no checkpoint there; name another "
            f"folder, or delete {folder / MARKER} if that run is over"
        )
    return ConfigError(
        f"checkpoint.directory: {folder} holds the checkpoints of {found.text()}; name another folder, or go on with "
        "that run in this directory with --resume must"
    )


def _noted(run_dir: Path) -> bytes | None:
    try:
        return (run_dir / NOTE).read_bytes()
    except FileNotFoundError:
        return None


def _note_again(run_dir: Path, before: bytes | None) -> None:
    if before is None:
        os.unlink(run_dir / NOTE)
    else:
        (run_dir / NOTE).write_bytes(before)


def _read(folder: Place) -> _Marker | None:
    path = folder / MARKER
    try:
        return _Marker(**json.loads(places.read_bytes(path)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise CheckpointError(
            f"{path} is damaged: it says whose the checkpoints are; delete it if they are of this run"
        ) from None
