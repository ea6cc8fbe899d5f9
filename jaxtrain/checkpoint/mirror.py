"""A second copy of checkpoints in another folder: made file by file, compared by digests, then renamed. No jax here.

Nothing here runs in the way of training: who copies does so in the background, and an `OSError` means that the copy is
made after a later save.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

from jaxtrain.checkpoint import directory, places
from jaxtrain.checkpoint.copies import copy_step
from jaxtrain.checkpoint.directory import DamagedError
from jaxtrain.checkpoint.line import Marks, recorded_marks
from jaxtrain.checkpoint.places import Place, place_at
from jaxtrain.errors import ConfigError

_OWNER = "mirror_of.json"


def mirror_folder(mirror: str | None, run_dir: Path) -> Place | None:
    """Where the second copies of a run's checkpoints are: a folder named as the run in `checkpoint.mirror`."""
    if mirror is None:
        return None
    place = place_at(mirror, what="checkpoint.mirror")
    return (place.expanduser().absolute() if isinstance(place, Path) else place) / run_dir.absolute().name


class Mirror:
    """The second folder of the steps of one checkpoint directory; process 0 alone has one.

    Args:
        folder: where the copies are; made with the first one.
        source: the checkpoint directory.

    Attributes:
        copied_bytes: grows while a copy is made, so that a copy that stands still is noticed.
    """

    def __init__(self, folder: Place, source: Place) -> None:
        self.folder, self._source = folder, source
        self.copied_bytes = 0

    def check_owner(self) -> None:
        """Raise where the folder holds the copies of another run.

        Raises:
            ConfigError: it does; names that run.
            OSError: it cannot be read.
        """
        try:
            owner = json.loads(places.read_bytes(self.folder / _OWNER)).get("checkpoints")
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
        places.make_folder(self.folder)
        if not (self.folder / _OWNER).exists():
            places.write_json(self.folder / _OWNER, {"checkpoints": str(self._source)})
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
        places.make_folder(self._source)
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
        places.make_folder(folder)
        for step in steps:
            places.move(directory.step_path(self.folder, step), folder / str(step))

    def _advance(self, count: int) -> None:
        self.copied_bytes += count
