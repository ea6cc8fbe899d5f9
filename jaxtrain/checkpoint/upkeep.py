"""What becomes of complete steps: verified, copied to a mirror, deleted by the rules, brought back from the mirror.

Only the deciding process (process 0) calls what is here.
"""

from collections.abc import Callable, Collection

from jaxtrain.checkpoint import directory, places
from jaxtrain.checkpoint.aftercare import Aftercare
from jaxtrain.checkpoint.failures import store_failures
from jaxtrain.checkpoint.line import StepLine
from jaxtrain.checkpoint.mirror import Mirror
from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.space import SaveError
from jaxtrain.errors import CheckpointError, ConfigError


class Upkeep:
    """Looks after the complete steps of a checkpoint directory.

    Args:
        folder: the checkpoint directory.
        line: its steps.
        mirror: folder of the second copies; None: none are made.
        report: called with one line for people.

    Raises:
        ConfigError: the mirror is the directory itself or the one that it is in, or holds the copies of another one.
    """

    def __init__(self, folder: Place, line: StepLine, *, mirror: Place | None, report: Callable[[str], None]) -> None:
        self._folder, self._line, self._report = folder, line, report
        self._mirror = None if mirror is None else Mirror(mirror, folder)
        self._care = Aftercare(folder, self._mirror)
        self._seen = places.SeenComplete()
        self._began: int | None = None
        self._has_begun = False
        if mirror is not None and folder.resolve() in (mirror.resolve(), *mirror.resolve().parents):
            raise ConfigError(f"checkpoint.mirror: {mirror} is inside {folder}; name a folder on another disk")
        # As of `checkpoint.mirror=runs`: copies beside run.json go with the run's directory.
        if mirror is not None and mirror.resolve() == folder.resolve().parent:
            raise ConfigError(f"checkpoint.mirror: {mirror} is where {folder} is; name a folder on another disk")
        if self._mirror is not None:
            try:
                self._mirror.check_owner()
            except OSError as error:
                report(f"checkpoint.mirror: {mirror} cannot be read: {error.strerror}; each save tries to reach it")

    def begin(self, step: int) -> None:
        """Begin to look after a step that is complete; a second call does nothing."""
        if self._began != step:
            self._began, self._has_begun = step, True
            self._care.begin(step, verify=self._line.needs_verified(self._care.verified), keep=self._line.rule())

    def prune(self) -> None:
        """Delete the steps that the rules do not keep, unless a verified one would be the price."""
        self._line.prune(self._care.verified)

    def watch(self, path: Place) -> None:
        """Begin to look after a step that is being written as soon as it is complete, and report; see `look`."""
        if self._began != int(path.name) and self._seen(path, item=directory.RECORD_ITEM):
            self.begin(int(path.name))
        self.look()

    def look(self) -> None:
        """Report what was done in the background since the last call.

        Raises:
            SaveError: a step does not read as it was saved; it is renamed, and those before it are kept.
        """
        for line in self._care.lines():
            self._report(line)
        for step, reason in self._care.damaged().items():
            with store_failures(directory.step_path(self._folder, step)):
                moved = directory.set_aside(self._folder, step, reason="corrupt")
            raise SaveError(f"{reason}, read back after the save (renamed to {moved.name})")

    def finish(self) -> None:
        """Wait for what is done in the background, then delete by the rules.

        Raises:
            SaveError: see `look`.
        """
        if self._has_begun:
            self._care.finish()
            self.look()
            with store_failures(self._folder):
                self.prune()

    def pause(self) -> None:
        """Wait until no step is read in the background: steps are about to be renamed."""
        self._care.finish()

    def restored(self, step: int) -> None:
        """Note that all of a step was read and is intact."""
        self._care.verified.add(step)

    def forget(self, step: int) -> None:
        """Note that a step is written again under its number."""
        self._care.verified.discard(step)
        self._seen = places.SeenComplete()
        self._began = None

    def recover(self, *, damaged: Collection[int] = ()) -> int:
        """Bring the newest copy back where no step is left, and say so; returns its number, -1 where there is none.

        Args:
            damaged: steps that are left and cannot be used; copies of them were tried.
        """
        copies = [] if self._mirror is None else self._mirror.steps()
        reason = f"no {'intact ' if damaged else ''}checkpoint is left in {self._folder}"
        others = (step for step in reversed(copies) if step not in damaged)
        return next((step for step in others if self._bring_back(step, reason)), -1)

    def replace(self, step: int, reason: str) -> bool:
        """Rename a damaged step and bring its copy back, and say so; False where there is no copy.

        Args:
            step: the damaged one.
            reason: what is wrong with it.
        """
        # A copy with other arrays is of a line of steps that was given up.
        if self._mirror is None or step not in self._mirror.steps() or not self._mirror.is_same(step):
            return False
        moved = directory.set_aside(self._folder, step, reason="corrupt")
        if self._bring_back(step, f"{reason} (renamed to {moved.name})"):
            return True
        places.move(moved, directory.step_path(self._folder, step))
        return False

    def set_mirror_aside(self) -> None:
        """Move the copies of an earlier run away, which a new one in the same directory would add to."""
        if self._mirror is not None and self._mirror.steps():
            try:
                self._mirror.set_aside()
            except OSError as error:
                self._report(f"the copies of an earlier run in {self._mirror.folder} cannot be moved: {error.strerror}")

    def _bring_back(self, step: int, reason: str) -> bool:
        assert self._mirror is not None
        try:
            self._mirror.check_owner()
            directory.read_info(self._mirror.folder, step)
            self._mirror.bring_back(step)
        except (OSError, CheckpointError, ConfigError) as error:
            self._report(f"{reason}, and its copy in {self._mirror.folder} cannot be used: {error}")
            return False
        self._report(f"{reason}: step {step} was copied back from {self._mirror.folder}")
        return True
