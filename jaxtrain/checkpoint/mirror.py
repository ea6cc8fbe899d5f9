"""A second copy of checkpoints in another folder: made file by file, compared by digests, then renamed. No jax here."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import directory, places
from jaxtrain.checkpoint.directory import DamagedError
from jaxtrain.checkpoint.places import COMMIT_FILE, COPYING, Place, RemotePath, place_at
from jaxtrain.errors import CheckpointError, ConfigError

_OWNER = "mirror_of.json"
_CHUNK_BYTES = 4 * 2**20


def mirror_folder(mirror: str | None, run_dir: Path) -> Place | None:
    """Where the second copies of a run's checkpoints are: a folder named as the run in `checkpoint.mirror`."""
    return None if mirror is None else place_at(mirror, what="checkpoint.mirror") / run_dir.absolute().name


class Mirror:
    """The second folder of the steps of the checkpoint directory `source`; process 0 alone writes there.

    `copied_bytes` grows while a copy is made, so that a copy that stands still is noticed.
    """

    def __init__(self, folder: Place, source: Place) -> None:
        self.folder, self._source = folder, source
        self.copied_bytes = 0
        place, here = (str(one.resolve() if isinstance(one, Path) else one) for one in (folder, source))
        # The second is that of `checkpoint.mirror=runs`: copies beside run.json go with the run's directory.
        if f"{place}/".startswith(f"{here}/") or place == str(source.parent):
            raise ConfigError(f"checkpoint.mirror: {folder} overlaps {source}; use a folder on another disk")

    def check_owner(self) -> None:
        """Raise a ConfigError where the folder holds the copies of another run."""
        try:
            owner = json.loads((self.folder / _OWNER).read_bytes())["checkpoints"]
        except FileNotFoundError:
            return
        if owner != str(self._source):
            raise ConfigError(
                f"checkpoint.mirror: {self.folder} holds the copies of {owner}, not of {self._source}; name another "
                f"folder, or delete {self.folder / _OWNER} if both are the same run"
            )

    def steps(self) -> list[int]:
        """Return the steps that have a copy, in ascending order; none where the folder cannot be read."""
        with contextlib.suppress(CheckpointError):
            return directory.list_steps(self.folder)
        return []

    def is_same(self, step: int) -> bool:
        """Whether the copy of a step is of the step which is there; true where that one is gone or damaged."""
        try:
            here = directory.read_info(self._source, step)
        except DamagedError:
            return True  # this copy is all that is left of it
        with contextlib.suppress(DamagedError):
            there = directory.read_info(self.folder, step)
            return (here.digests, here.leaves) == (there.digests, there.leaves)
        return False

    def copy(self, step: int, *, keep: Callable[[Place, Iterable[int]], set[int]]) -> None:
        """Copy the newest step, complete; delete the copies that `keep` does not name, and set abandoned ones aside."""
        places.make_folder(self.folder)
        if not (self.folder / _OWNER).exists():
            places.write_json(self.folder / _OWNER, {"checkpoints": str(self._source)})
        # With each copy: two runs may have begun before either had made one.
        self.check_owner()
        directory.clear_leftovers(self.folder)
        # A step of a line that was given up is kept beside the copies, as it is beside the steps.
        directory.move_steps(self.folder, [other for other in self.steps() if other > step or not self.is_same(other)])
        if step not in self.steps():
            self._copy(self._source, self.folder, step)
        steps = self.steps()
        places.remove_steps(self.folder, set(steps) - keep(self.folder, steps) - {step})

    def bring_back(self, step: int) -> None:
        """Copy a step from the mirror to its place, where nothing of that name may be."""
        self.check_owner()
        directory.read_info(self.folder, step)
        places.make_folder(self._source)
        self._copy(self.folder, self._source, step)

    def set_aside(self) -> None:
        """Move all copies to a folder `abandoned-<time>`: a run that starts anew makes copies of its own."""
        directory.move_steps(self.folder, self.steps())

    def _copy(self, source: Place, target: Place, step: int) -> None:
        """Copy the directory of a step, compare what was written, and only then make it a step."""
        origin, place = source / str(step), target / str(step)
        partial = place if isinstance(place, RemotePath) else place.with_name(f"{step}{COPYING}")
        places.remove_tree(partial)
        places.make_folder(partial)
        digests = {}
        for name in _files(origin):
            places.make_folder((partial / name).parent)
            with (origin / name).open("rb") as read, (partial / name).open("wb") as written:
                digests[name] = self._digest(read, written.write)
        for name, digest in digests.items():
            with (partial / name).open("rb") as read:
                if self._digest(read, len) != digest:
                    raise OSError(f"{partial / name} does not read back as written")
        if isinstance(place, RemotePath):
            (place / COMMIT_FILE).write_bytes(b"copied by jaxtrain")
        else:
            places.move(partial, place)
            places.sync_folder(place)

    def _digest(self, file: Any, take: Callable[[bytes], object]) -> str:
        digest = hashlib.sha256()
        while part := file.read(_CHUNK_BYTES):
            digest.update(part)
            take(part)
            self.copied_bytes += len(part)
        return digest.hexdigest()


def _files(step: Place) -> list[str]:
    """The names of the files of a step, relative to it, without the marker of stores."""
    if isinstance(step, RemotePath):
        return [name for name in step.files() if name != COMMIT_FILE]
    return [path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()]
