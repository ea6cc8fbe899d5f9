"""Whose a `checkpoint.directory` is: two runs in one folder would delete and resume one another's steps. No jax here.

The run directory has a lock of the kernel, which a store has not. In its place the folder holds an object that names
the run, and the start of it that writes. It is written only where there is none, which S3 and Google's store ensure in
one operation; the emulator of the latter does not, so it is read again after it was written. Before each save the
process that writes looks whether it still is the one that is named. Between that look and the save another start may
take over: that moment, of a request's length, is not covered.

A copy of a run directory (`cp -r`) holds the identity of the run too. It is told from a run directory that was moved by
the one that the object names: of a copy it is still there.
"""

import contextlib
import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass, replace
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
        is_copy = found is not None and found.run == run and _is_elsewhere(found, folder, run_dir)
        if found is not None and (found.run != run or is_copy):
            if not takes_over:
                raise _refused(folder, found, copy=run_dir if is_copy else None)
            line = f"{folder} is taken over from {found.text()}"
            if is_copy:
                # The run that was copied must see whose the folder is even when the copy is deleted.
                run = uuid.uuid4().hex
                marker = replace(marker, run=run)
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


def other_run_line(run_dir: Path) -> str | None:
    """A line for people where the checkpoints that a run directory names are another run's.

    Args:
        run_dir: directory of a run that is read, and not locked.

    Returns:
        The line; None where they are its own, or nobody can tell.
    """
    try:
        noted = read_note(run_dir)
        found = None if noted is None else _read(noted[0])
    except (OSError, CheckpointError):
        return None  # what reads the checkpoints says what is wrong with them
    if noted is None or found is None or not noted[1]:
        return None
    if found.run == noted[1] and not _is_elsewhere(found, noted[0], run_dir):
        return None
    return f"the checkpoints of {run_dir} are in {noted[0]}, which is that of {found.text()}: they are of that run"


def _is_elsewhere(found: _Marker, folder: Place, run_dir: Path) -> bool:
    """Whether the run directory that a marker names is another one than this, on this host, and still notes the run.

    It does not where it was moved, or cannot be read: then the run is taken to be this one.
    """
    there = Path(found.run_dir)
    if found.host != socket.gethostname() or there == run_dir.absolute():
        return False
    try:
        # Not the device, which differs where a network file system is mounted at two paths.
        is_same = os.stat(there).st_ino == os.stat(run_dir).st_ino
        return not is_same and read_note(there) == (folder, found.run)
    except (OSError, CheckpointError):
        return False


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


def _refused(folder: Place, found: _Marker, *, copy: Path | None = None) -> ConfigError:
    whose = found.text() + ("" if copy is None else f", of which {copy} is a copy")
    if not list_steps(folder):
        # --resume must would find nothing to go on with.
        return ConfigError(
            f"checkpoint.directory: {folder} is that of {whose}, which has no checkpoint there; name another "
            f"folder, or delete {folder / MARKER} if that run is over"
        )
    return ConfigError(
        f"checkpoint.directory: {folder} holds the checkpoints of {whose}; name another folder, or go on with "
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
