"""A second copy of checkpoints in another folder: made file by file, compared by digests, then renamed. No jax here.

Nothing here runs in the way of training: who copies does so in the background, and an `OSError` means that the copy is
made after a later save.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jaxtrain.checkpoint import directory
from jaxtrain.checkpoint.directory import COPYING, DamagedError
from jaxtrain.checkpoint.line import Marks, recorded_marks
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.files import write_json_atomic

_OWNER = "mirror_of.json"
_CHUNK_BYTES = 4 * 2**20


def mirror_folder(mirror: str | None, run_dir: Path) -> Path | None:
    """Where the second copies of a run's checkpoints are: a folder named as the run in `checkpoint.mirror`."""
    return None if mirror is None else Path(mirror).expanduser().absolute() / run_dir.absolute().name


class Mirror:
    """The second folder of the steps of one checkpoint directory; process 0 alone has one.

    Args:
        folder: where the copies are; made with the first one.
        source: the checkpoint directory.

    Attributes:
        copied_bytes: grows while a copy is made, so that a copy that stands still is noticed.
    """

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self._source = folder, source
        self.copied_bytes = 0

    def check_owner(self) -> None:
        """Raise where the folder holds the copies of another run.

        Raises:
            ConfigError: it does; names that run.
            OSError: it cannot be read.
        """
        try:
            owner = json.loads((self.folder / _OWNER).read_bytes()).get("checkpoints")
        except FileNotFoundError:
            return
        except (ValueError, AttributeError):
            owner = "a run that its damaged note does not name"
        if owner != str(self._source):
            raise ConfigError(
                f"checkpoint.mirror: {self.folder} holds the copies of {owner}, not of {self._source}; name another "
                f"folder, or delete {self.folder / _OWNER} if both are one run"
            )

    def steps(self) -> list[int]:
        """Return the steps that have a copy, in ascending order; none where the folder cannot be read."""
        try:
            return directory.list_steps(self.folder)
        except (directory.CheckpointError, OSError):
            return []

    def is_same(self, step: int) -> bool:
        """Whether the copy of a step is of the step which is there; true where that one is gone or damaged."""
        try:
            here = directory.read_info(self._source, step)
        except DamagedError:
            return True  # gone or damaged there: this copy is all that is left of it
        try:
            there = directory.read_info(self.folder, step)
        except DamagedError:
            return False
        return (here.digests, here.leaves) == (there.digests, there.leaves)

    def copy(self, step: int, *, keep: Callable[[Marks], set[int]]) -> None:
        """Copy a complete step, then delete and set aside what the copies hold beside the line of steps.

        Args:
            step: the newest step.
            keep: of the steps that have a copy, with their marks, those that stay.

        Raises:
            OSError: the folder cannot be reached or written, or a copy is not what was read.
            ConfigError: another run has made copies there.
        """
        self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        if not (self.folder / _OWNER).exists():
            write_json_atomic(self.folder / _OWNER, {"checkpoints": str(self._source)})
        # With each copy: two runs may have begun before either had made one.
        self.check_owner()
        directory.clear_leftovers(self.folder)
        # A step of a line that was given up is kept beside the copies, as it is beside the steps.
        self._abandon([other for other in self.steps() if other > step or not self.is_same(other)])
        if step not in self.steps():
            copy_step(self._source, self.folder, step, advance=self._advance)
        copies = {other: recorded_marks(self.folder, other) for other in self.steps()}
        directory.remove(self.folder, set(copies) - keep(copies) - {step})

    def bring_back(self, step: int) -> None:
        """Copy a step from the mirror to its place, where nothing of that name may be.

        Raises:
            OSError: it cannot be read or written.
        """
        self._source.mkdir(mode=0o750, parents=True, exist_ok=True)
        copy_step(self.folder, self._source, step, advance=self._advance)

    def set_aside(self) -> None:
        """Move all copies to a folder `abandoned-<time>`: a run that starts anew makes copies of its own.

        Raises:
            OSError: they cannot be moved.
        """
        self._abandon(self.steps())

    def _abandon(self, steps: list[int]) -> None:
        if not steps:
            return
        folder = self.folder / f"abandoned-{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**6:06d}"
        folder.mkdir(mode=0o750)
        for step in steps:
            directory.step_path(self.folder, step).rename(folder / str(step))

    def _advance(self, count: int) -> None:
        self.copied_bytes += count


def copy_step(source: Path, target: Path, step: int, *, advance: Callable[[int], None]) -> None:
    """Copy the directory of a step under a temporary name, compare what was written, and rename it.

    Args:
        source, target: directories of steps.
        step: in `source`, and not in `target`.
        advance: called with the bytes of each part that was copied or compared.

    Raises:
        OSError: a file cannot be read or written, or reads other than it was written.
    """
    origin, place = directory.step_path(source, step), directory.step_path(target, step)
    partial = target / f"{step}{COPYING}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o750)
    try:
        digests: dict[Path, str] = {}
        for entry in sorted(origin.rglob("*")):
            name = entry.relative_to(origin)
            if entry.is_symlink():
                raise OSError(f"{entry} is a link, which no checkpoint has")
            if entry.is_dir():
                (partial / name).mkdir(mode=0o750)
            else:
                digests[name] = _copy_file(entry, partial / name, advance)
        for name, digest in digests.items():
            if _digest(partial / name, advance) != digest:
                raise OSError(f"{partial / name} reads other than it was written")
        partial.rename(place)
        sync_folder(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _copy_file(origin: Path, target: Path, advance: Callable[[int], None]) -> str:
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


def sync_folder(folder: Path) -> None:
    """Flush the files of a folder, and the entries of it and of what holds it, to the disk: Orbax flushes files alone.

    Raises:
        OSError: something cannot be flushed.
    """
    for path in (*folder.rglob("*"), folder, folder.parent):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
