"""What checkpoints ask of the place where they are: a folder on this machine, or one in gs:// or s3://.

Everything that differs between the two is here. The difference is renaming. On a file system a step gets its name when
it is complete, and moving it is one operation. In a store a step is complete once the object `commit_success.txt` is in
it, and moving is copying and deleting, which a kill may interrupt anywhere: a note in the step says where it goes, so
that the next process that writes finishes the move. Both stores list what was written at once, so nothing is remembered
between two requests. No jax here.
"""

import contextlib
import errno
import functools
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, Self

from jaxtrain.config.arguments import is_store_address, local_path, store_address
from jaxtrain.errors import ConfigError, UserError
from jaxtrain.runtime.files import strict_json, write_bytes_atomic

RECORD_ITEM = "jaxtrain"
ARRAYS_ITEM = "state"  # what a step holds
COMMIT_FILE = "commit_success.txt"
TRASH = ".pruned"  # end of the names of steps that are being deleted on a file system
_MOVING_FILE = "jaxtrain_moving.json"
_ASK_SECONDS = 10.0  # between questions to a store whether a save is complete: each is a request
EXTRAS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
# A request that is not answered is tried again by the clients; longer waits would look like a run that stands still.
_CONNECT_SECONDS = 10
_READ_SECONDS = 60
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
}


class RemotePath:
    """A folder or an object of a store, used as a `Path` is; methods raise an OSError where the store refuses.

    It deliberately is no `os.PathLike`: a function for files of this machine would make a folder called `s3:`.
    """

    def __init__(self, address: str) -> None:
        self.scheme, self.bucket, self.key = store_address(address)  # a ValueError where it is none
        self._full = f"{self.bucket}/{self.key}".rstrip("/")

    def __str__(self) -> str:
        return f"{self.scheme}://{self._full}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> Self:
        return type(self)(f"{self}/{name}")

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self._full.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The folder that this one is in; the bucket is in itself."""
        return self if not self.key else type(self)(str(self).rpartition("/")[0])

    def names(self) -> list[str]:
        """Return the names of what is in this folder; empty where there is none."""
        with _in_words(self):
            try:
                entries = _client(self.scheme).ls(self._full, detail=False, refresh=True)
            except FileNotFoundError:
                return []
        start = f"{self._full}/"
        names = (entry.rstrip("/").removeprefix(start) for entry in entries if entry.startswith(start))
        return sorted({name for name in names if name and "/" not in name})

    def files(self) -> list[str]:
        """Return the names of all objects below this folder, relative to it."""
        with _in_words(self):
            found = _client(self.scheme).find(self._full, refresh=True)
        start = f"{self._full}/"
        return sorted(entry.removeprefix(start) for entry in found if entry.startswith(start) and entry[-1] != "/")

    def is_dir(self) -> bool:
        """Whether an object is below this folder."""
        return bool(self.names())

    def exists(self) -> bool:
        """Whether there is an object of this name, or one below it."""
        with _in_words(self), contextlib.suppress(FileNotFoundError):
            _client(self.scheme).info(self._full, refresh=True)
            return True
        return False

    def read_bytes(self) -> bytes:
        """Return the content of an object; a FileNotFoundError where there is none."""
        with _in_words(self):
            return _client(self.scheme).cat_file(self._full)

    def write_bytes(self, content: bytes) -> None:
        """Write an object whole, which readers see at once or not at all."""
        with _in_words(self):
            _client(self.scheme).pipe_file(self._full, content, mode="overwrite")

    def unlink(self, *, missing_ok: bool = True) -> None:
        """Delete an object; nothing happens where there is none."""
        with _in_words(self), contextlib.suppress(FileNotFoundError):
            _client(self.scheme).rm_file(self._full)

    def copy_to(self, target: "RemotePath") -> None:
        """Let the store copy an object to another name in the same store."""
        with _in_words(self):
            _client(self.scheme).cp_file(self._full, target._full)


# A folder of steps, a step, or a file in one.
Place = Path | RemotePath


@functools.cache
def _client(scheme: str) -> Any:
    """The client of a store: one of its own, without a memory of listings."""
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "s3":
        options["config_kwargs"] = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS}
        client = fsspec.filesystem("s3", **options)
        client.retries = 2  # rounds of botocore's five requests: with five, a silent server is waited for 25 minutes
        return client
    import importlib

    # It logs, with a traceback, what it raises too.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # Without a total: by default what takes five minutes is given up, however much has come.
    wait = importlib.import_module("aiohttp").ClientTimeout(
        total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
    )
    return fsspec.filesystem("gcs", requests_timeout=wait, **options)


def forget_listings(scheme: str) -> None:
    """Drop what the client remembers that Orbax uses: it was listed before others wrote."""
    import fsspec

    client = fsspec.filesystem("gcs", finalize_on_close=True) if scheme == "gs" else fsspec.filesystem("s3")
    client.invalidate_cache()


@contextlib.contextmanager
def _in_words(path: RemotePath) -> Iterator[None]:
    """Turn what the clients raise, of a dozen libraries, into an OSError whose `strerror` is one short reason."""
    try:
        yield
    except Exception as error:
        # By the number it becomes a FileNotFoundError or a FileExistsError again, which callers tell apart.
        raise OSError(*reason_of(path, error)) from error


def reason_of(path: RemotePath, error: BaseException) -> tuple[int, str]:
    """Return the number of the error that a file system would have given, and the reason in words."""
    kind = type(error).__name__
    text = " ".join(str(error).split())
    if isinstance(error, FileNotFoundError | FileExistsError):
        number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EEXIST
        return number, os.strerror(number)
    if "Credential" in kind or "RefreshError" in kind or "Credential" in text or "Anonymous caller" in text:
        return errno.EACCES, f"no credentials for {path.scheme}://: {_CREDENTIALS[path.scheme]}"
    if isinstance(error, PermissionError) or text.startswith(("Forbidden", "AccessDenied")):
        return errno.EACCES, f"access denied by {path.scheme}://{path.bucket}"
    reason = (error.strerror if isinstance(error, OSError) else None) or text or kind
    return errno.EIO, reason[:200]


def place_at(text: str | os.PathLike[str] | RemotePath, *, what: str, error: type[UserError] = ConfigError) -> Place:
    """Return the absolute path, or the gs://bucket/name or s3://bucket/name, that a text names.

    Where it is neither, or the package is missing that speaks to the store, an error of the given type says so.
    """
    if isinstance(text, RemotePath):
        return text
    if not isinstance(text, str | os.PathLike) or not is_store_address(os.fspath(text)):
        instead = "use a local folder, gs://bucket/name or s3://bucket/name"
        return local_path(text, what=what, error=error, instead=instead).expanduser().absolute()
    import importlib.util

    try:
        found = RemotePath(os.fspath(text))
    except ValueError as mistake:
        raise error(f"{what}: {mistake}") from None
    package, extra = EXTRAS[found.scheme]
    if importlib.util.find_spec(package) is None:
        raise error(f"{what}: {found} needs the package {package}: pip install '.[{extra}]'")
    return found


def names(folder: Place) -> list[str]:
    """Return the names of what is in a folder, none where it does not exist."""
    if isinstance(folder, RemotePath):
        return folder.names()
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def is_complete(step: Place) -> bool:
    """Whether there is a complete step, which is not on its way to another place."""
    if isinstance(step, RemotePath):
        found = step.names()
        return COMMIT_FILE in found and RECORD_ITEM in found and _MOVING_FILE not in found
    return not step.is_symlink() and (step / RECORD_ITEM).is_dir()


def is_incomplete(step: Place) -> bool:
    """Whether an interrupted save has left a part of a step under its name, which happens in a store alone."""
    if not isinstance(step, RemotePath) or not step.name.isdecimal():
        return False
    found = set(step.names())
    # Other content is somebody else's: it is set aside, not deleted.
    is_step = found & {RECORD_ITEM, ARRAYS_ITEM, "_CHECKPOINT_METADATA"}
    return bool(is_step) and not found & {COMMIT_FILE, _MOVING_FILE}


class SeenComplete:
    """Whether a save in the background is complete, asked after every step: a store is asked every ten seconds."""

    def __init__(self) -> None:
        self._asked_at = 0.0
        self._is_complete = False

    def __call__(self, step: Place, *, item: str = RECORD_ITEM) -> bool:
        """Whether a step is complete, as far as it is known."""
        if not isinstance(step, RemotePath):
            return (step / item).is_dir()
        if not self._is_complete and monotonic() - self._asked_at >= _ASK_SECONDS:
            self._asked_at = monotonic()
            with contextlib.suppress(OSError):  # the save itself says what is wrong
                self._is_complete = is_complete(step)
        return self._is_complete


def write_bytes(file: Place, content: bytes) -> None:
    """Write a small file atomically."""
    file.write_bytes(content) if isinstance(file, RemotePath) else write_bytes_atomic(file, content)


def write_json(file: Place, value: Any) -> None:
    """Write a value as JSON, atomically."""
    content = json.dumps(strict_json(value), indent=2, ensure_ascii=False) + "\n"
    write_bytes(file, content.encode(errors="backslashreplace"))


def make_folder(folder: Place) -> None:
    """Make a folder and those above it; a store needs none."""
    if not isinstance(folder, RemotePath):
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)


def remove_tree(folder: Place) -> None:
    """Delete a folder with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True) if isinstance(folder, Path) else _delete_objects(folder)


def remove_steps(folder: Place, steps: Iterable[int]) -> None:
    """Delete steps, so that a kill leaves no incomplete one under its name."""
    for step in steps:
        path = folder / str(step)
        if isinstance(path, Path):
            with contextlib.suppress(FileNotFoundError):
                path = path.rename(path.with_name(f"{step}{TRASH}"))
        remove_tree(path)


def move(source: Place, target: Place) -> None:
    """Give a folder another name; of a store that fails, `finish_moves` goes on with it."""
    if isinstance(source, RemotePath):
        write_json(source / _MOVING_FILE, {"to": str(target)})
        _finish_move(source)
    else:
        source.rename(str(target))


def finish_moves(folder: Place) -> None:
    """Finish the moves of steps that a kill interrupted; a file system has none."""
    if isinstance(folder, RemotePath):
        for name in folder.names():
            if name.isdecimal() and _MOVING_FILE in (folder / name).names():
                _finish_move(folder / name)


def _finish_move(source: RemotePath) -> None:
    """Copy what is left, what makes it complete last; then delete it, the note last."""
    target = RemotePath(json.loads((source / _MOVING_FILE).read_bytes())["to"])
    left = [name for name in source.files() if name != _MOVING_FILE]
    for name in sorted(left, key=lambda name: name == COMMIT_FILE):
        (source / name).copy_to(target / name)
    _delete_objects(source)


def _delete_objects(folder: RemotePath) -> None:
    """Delete all objects of a folder: what makes a step complete first, the note of a move last."""
    order = {COMMIT_FILE: 0, _MOVING_FILE: 2}
    for name in sorted(folder.files(), key=lambda name: order.get(name, 1)):
        (folder / name).unlink()


def sync_folder(folder: Place) -> None:
    """Flush a folder and what is in it to the disk: Orbax flushes files alone, and no entries of folders."""
    if isinstance(folder, RemotePath):
        return  # what a store has confirmed is durable
    for path in (*folder.rglob("*"), folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
