"""Copies of the directory of a step in another place: made file by file, compared by digests, then given their name.

No jax here.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain.checkpoint import directory, places
from jaxtrain.checkpoint.directory import COPYING
from jaxtrain.checkpoint.places import COMMIT_FILE, Place
from jaxtrain.checkpoint.remote import RemotePath

_CHUNK_BYTES = 4 * 2**20


def copy_step(source: Place, target: Place, step: int, *, advance: Callable[[int], None]) -> None:
    """Copy the directory of a step, compare what was written, and only then make it a step.

    Args:
        source, target: directories of steps, each on this machine or in a store.
        step: in `source`, and not in `target`.
        advance: called with the bytes of each part that was copied or compared.

    Raises:
        OSError: a file cannot be read or written, or reads other than it was written.
    """
    origin, place = directory.step_path(source, step), directory.step_path(target, step)
    if isinstance(place, RemotePath):
        _copy_to_store(origin, place, advance)
        return
    assert isinstance(target, Path)
    partial = target / f"{step}{COPYING}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o750)
    try:
        digests: dict[str, str] = {}
        for name in _file_names(origin):
            written = partial / name
            for folder in reversed(Path(name).parents):  # `parents=True` would give those between other rights
                (partial / folder).mkdir(mode=0o750, exist_ok=True)
            digests[name] = _copy_file(origin / name, written, advance)
        for name, digest in digests.items():
            if _digest(partial / name, advance) != digest:
                raise OSError(f"{partial / name} reads other than it was written")
        partial.rename(place)
        places.sync_folder(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _copy_to_store(origin: Place, place: RemotePath, advance: Callable[[int], None]) -> None:
    """Copy a step to its name in a store; what makes it a step is written last, once all was read back."""
    with tempfile.TemporaryDirectory(prefix="jaxtrain-copy-") as folder:
        scratch = Path(folder) / "file"
        digests: dict[str, str] = {}
        for name in _file_names(origin):
            file = origin / name
            if isinstance(file, RemotePath):
                file.download(scratch, advance)
                digests[name] = _digest(scratch, advance)
                (place / name).upload(scratch, advance)
            else:
                digests[name] = _digest(file, advance)
                (place / name).upload(file, advance)
        for name, digest in digests.items():
            (place / name).download(scratch, advance)
            if _digest(scratch, advance) != digest:
                raise OSError(f"{place / name} reads other than it was written")
    (place / COMMIT_FILE).write_bytes(b"copied by jaxtrain")


def _file_names(step: Place) -> Iterator[str]:
    """The files of a step, relative to it, without the marker of stores.

    Raises:
        OSError: one is a link.
    """
    if isinstance(step, RemotePath):
        yield from (name for name in step.files() if name != COMMIT_FILE)
        return
    for entry in sorted(step.rglob("*")):
        if entry.is_symlink():
            raise OSError(f"{entry} is a link, which no checkpoint has")
        if not entry.is_dir() and entry.name != COMMIT_FILE:
            yield entry.relative_to(step).as_posix()


def _copy_file(origin: Place, target: Path, advance: Callable[[int], None]) -> str:
    if isinstance(origin, RemotePath):
        origin.download(target, advance)
        return _digest(target, advance)
    digest = hashlib.sha256()
    with origin.open("rb") as read, target.open("xb") as written:
        while part := read.read(_CHUNK_BYTES):
            digest.update(part)
            written.write(part)
            advance(len(part))
        written.flush()
        os.fsync(written.fileno())
        # What is compared afterwards should be what is on the disk, not what is still in memory, where that can be had.
        if sys.platform == "linux":
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


def _digest(path: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_CHUNK_BYTES):
            digest.update(part)
            advance(len(part))
    return digest.hexdigest()
