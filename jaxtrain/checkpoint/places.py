"""What checkpoints ask of the place where they are: of a folder on this machine, or of one in an object store.

Everything that differs between the two is here; the other files of this folder do not know which one they have. The
difference is renaming. On a file system a step gets its name when it is complete, and moving it is one operation. In a
store a step is complete once the object `commit_success.txt` is in it, and moving is copying and deleting, which a kill
may interrupt anywhere: a note in the step says where it goes, so that the next process that writes finishes the move.
No jax here.
"""

import errno
import json
import os
import shutil
from pathlib import Path
from time import monotonic as _monotonic
from typing import Any

from jaxtrain.checkpoint.remote import RemotePath, check_client
from jaxtrain.config.arguments import is_store_address, local_path
from jaxtrain.errors import ConfigError, UserError
from jaxtrain.runtime.files import strict_json, write_bytes_atomic

# A folder of steps, a step, or a file in one.
Place = Path | RemotePath

COMMIT_FILE = "commit_success.txt"
_MOVING_FILE = "jaxtrain_moving.json"
# A store is asked this seldom whether a save in the background is complete: each question is a request.
_ASK_SECONDS = 10.0


def place_at(text: str | os.PathLike[str] | RemotePath, *, what: str, error: type[UserError] = ConfigError) -> Place:
    """Return the place that a text names: a path of this machine, gs://bucket/name or s3://bucket/name.

    Args:
        text: what the user gave.
        what: its name in a message.
        error: type of the error.

    Raises:
        UserError: it is neither, or the package is missing that speaks to the store.
    """
    if isinstance(text, RemotePath):
        return text
    if isinstance(text, str | os.PathLike) and is_store_address(os.fspath(text)):
        try:
            found = RemotePath(os.fspath(text))
            check_client(found)
        except ConfigError as mistake:
            raise error(f"{what}: {mistake}") from None
        return found
    instead = "use a local folder, gs://bucket/name or s3://bucket/name"
    return local_path(text, what=what, error=error, instead=instead)


def absolute_place(text: str | os.PathLike[str] | RemotePath, *, what: str) -> Place:
    """Return the place that a text names, as `place_at` does, a path of this machine as an absolute one."""
    place = place_at(text, what=what)
    return place.absolute() if isinstance(place, Path) else place


def is_remote(place: Place) -> bool:
    """Whether a place is in an object store."""
    return isinstance(place, RemotePath)


def names(folder: Place) -> list[str]:
    """Return the names of what is in a folder, none where it does not exist.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(folder, RemotePath):
        return folder.names()
    try:
        return [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []


def is_complete(step: Place, *, item: str) -> bool:
    """Whether a step is complete, which holds the item `item`.

    Raises:
        OSError: the store does not answer.
    """
    if isinstance(step, RemotePath):
        found = step.names()
        return COMMIT_FILE in found and item in found and _MOVING_FILE not in found
    return not step.is_symlink() and (step / item).is_dir()


def is_written(step: Place) -> bool:
    """Whether the write of a step is done: on a disk it gets its name then, in a store its commit object."""
    return (step / COMMIT_FILE).exists() if isinstance(step, RemotePath) else step.exists()


def read_bytes(file: Place) -> bytes:
    """Return the content of a file."""
    return file.read_bytes()


def write_bytes(file: Place, content: bytes) -> None:
    """Write a small file atomically."""
    file.write_bytes(content) if isinstance(file, RemotePath) else write_bytes_atomic(file, content)


def write_json(file: Place, value: Any) -> None:
    """Write a value as JSON, atomically."""
    text = json.dumps(strict_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(file, text.encode("utf-8", errors="backslashreplace"))


def write_first(file: Place, value: Any) -> None:
    """Write a value as JSON where no such file is.

    Raises:
        FileExistsError: there is one.
        OSError: it cannot be written.
    """
    content = (json.dumps(strict_json(value), indent=2, ensure_ascii=False) + "\n").encode()
    if isinstance(file, RemotePath):
        file.write_bytes(content, only_new=True)
        return
    with file.open("xb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def delete_file(file: Place) -> None:
    """Delete a file; nothing happens where there is none."""
    file.delete() if isinstance(file, RemotePath) else file.unlink(missing_ok=True)


def make_folder(folder: Place) -> None:
    """Make a folder and those above it; a store needs none."""
    if not isinstance(folder, RemotePath):
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)


def is_writable(folder: Place) -> bool:
    """Whether this user may write in a folder; a store says so at the first write."""
    return isinstance(folder, RemotePath) or os.access(folder, os.W_OK | os.X_OK)


def remove_tree(folder: Place) -> None:
    """Delete a folder with all that is in it.

    In a store what makes a step complete goes first, so that what a kill leaves is no step.
    """
    if not isinstance(folder, RemotePath):
        shutil.rmtree(folder, ignore_errors=True)
        return
    _delete_objects(folder)


def remove_step(step: Place, *, trash: str) -> None:
    """Delete a step so that a kill leaves no incomplete one under its name.

    Args:
        step: its folder.
        trash: the name that a file system gives it before anything is deleted.
    """
    if isinstance(step, RemotePath):
        _delete_objects(step)
        return
    renamed = step.with_name(trash)
    shutil.rmtree(renamed, ignore_errors=True)
    try:
        step.rename(renamed)
    except FileNotFoundError:
        return
    shutil.rmtree(renamed, ignore_errors=True)


def move(source: Place, target: Place) -> None:
    """Give a folder another name.

    Raises:
        OSError: it cannot be renamed, or what a store copied may be incomplete; `finish_moves` goes on with it.
    """
    if isinstance(source, RemotePath) and isinstance(target, RemotePath):
        (source / _MOVING_FILE).write_bytes(json.dumps({"to": str(target)}).encode())
        _finish_move(source)
        return
    assert isinstance(source, Path)
    assert isinstance(target, Path)
    source.rename(target)


def has_arrived(step: Place) -> bool:
    """Whether a step was moved here whole, and is not on its way to another place.

    Raises:
        OSError: the store does not answer.
    """
    if not isinstance(step, RemotePath):
        return step.is_dir()
    found = step.names()
    return COMMIT_FILE in found and _MOVING_FILE not in found


def finish_moves(folder: Place) -> None:
    """Finish the moves of steps that a kill interrupted; a file system has none."""
    if isinstance(folder, RemotePath):
        for name in folder.names():
            if name.isdecimal() and _MOVING_FILE in (folder / name).names():
                _finish_move(folder / name)


def _finish_move(source: RemotePath) -> None:
    """Copy what is left, what makes it complete last; then delete it, the note last."""
    try:
        target = RemotePath(json.loads((source / _MOVING_FILE).read_bytes())["to"])
    except (ValueError, KeyError, TypeError, ConfigError):
        raise OSError(errno.EIO, f"{source / _MOVING_FILE} is damaged; delete it, and what is incomplete") from None
    left = [name for name in source.files() if name != _MOVING_FILE]
    for name in sorted(left, key=lambda name: name == COMMIT_FILE):
        (source / name).copy_to(target / name)
    _delete_objects(source)


def _delete_objects(folder: RemotePath) -> None:
    """Delete all objects of a folder: what makes a step complete first, the note of a move last."""
    order = {COMMIT_FILE: 0, _MOVING_FILE: 2}
    for name in sorted(folder.files(), key=lambda name: order.get(name, 1)):
        (folder / name).delete()
    if folder.names():  # what some tools make of a folder: an object whose name ends in a slash
        folder.delete_marks()


def make_free(step: Place) -> bool:
    """Whether nothing is at the path of a step; what a save left incomplete in a store is deleted first."""
    if not isinstance(step, RemotePath):
        return not step.exists()
    if COMMIT_FILE in step.names():
        return False
    _delete_objects(step)
    return True


def is_leftover(folder: Place, *, is_temporary: bool, items: tuple[str, ...]) -> bool:
    """Whether a folder is what an interrupted save, copy or removal left.

    Args:
        folder: of a name that begins with the number of a step.
        is_temporary: whether its name is that of an unfinished save, copy or removal.
        items: names of what a step holds.
    """
    if not isinstance(folder, RemotePath):
        return is_temporary and folder.is_dir() and not folder.is_symlink()
    if is_temporary:
        return True
    found = folder.names()
    # Other content is somebody else's: it is set aside, not deleted.
    is_step = set(found) & {*items, "_CHECKPOINT_METADATA", COMMIT_FILE}
    return folder.name.isdecimal() and bool(is_step) and COMMIT_FILE not in found and _MOVING_FILE not in found


class SeenComplete:
    """Whether a save in the background is complete, asked after every step of the training.

    A file system is asked each time. A store is asked every ten seconds, and never again once it said yes.
    """

    def __init__(self, *, ask_seconds: float = _ASK_SECONDS) -> None:
        self._ask_seconds, self._asked_at, self._known = ask_seconds, 0.0, {}

    def __call__(self, step: Place, *, item: str) -> bool:
        """Whether a step is complete, as far as it is known."""
        if not isinstance(step, RemotePath):
            return (step / item).is_dir()
        if self._known.get(step):
            return True
        moment = _monotonic()
        if moment - self._asked_at < self._ask_seconds:
            return False
        self._asked_at = moment
        try:
            found = is_complete(step, item=item)
        except OSError:
            return False  # the save itself says what is wrong
        self._known = {step: found}
        return found


def remove_if_empty(folder: Place) -> None:
    """Remove a folder that has nothing in it; a store has none of that kind."""
    if isinstance(folder, Path) and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def sync_folder(folder: Place) -> None:
    """Flush the files of a folder, and the entries of it and of what holds it, to the disk: Orbax flushes files alone.

    What a store has confirmed is durable.

    Raises:
        OSError: something cannot be flushed.
    """
    if isinstance(folder, RemotePath):
        return
    for path in (*folder.rglob("*"), folder, folder.parent):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
