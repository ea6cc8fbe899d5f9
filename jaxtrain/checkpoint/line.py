"""The steps of a checkpoint directory as one line: which of them count, what gives way to a save, what is deleted.

Only the process that decides (process 0) renames and deletes; it calls what says so here.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxtrain.checkpoint import directory, going_back, places
from jaxtrain.checkpoint.directory import DamagedError
from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.space import SaveError
from jaxtrain.errors import CheckpointError

# step -> eval_loss and score
Marks = Mapping[int, tuple[float | None, float | None]]


class StepLine:
    """The line of steps that one Checkpointer extends, and where on it the caller's training stands.

    Args:
        folder: the checkpoint directory.
        keep_last, keep_every, keep_best: which steps stay; see `directory.steps_to_keep`.
        report: receives one line when a step is moved.

    Attributes:
        position: the step that the caller's training stands at, as far as it is known; None before the first
            save or restore.
    """

    def __init__(
        self,
        folder: Place,
        *,
        keep_last: int,
        keep_every: int | None,
        keep_best: bool,
        report: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._keep_last, self._keep_every, self._keep_best = keep_last, keep_every, keep_best
        self._report = report
        self._is_cleared = False
        self._marks: dict[int, tuple[float | None, float | None]] = {}
        self._compared_after = 0  # all are compared
        self.position: int | None = None

    def stand_at(self, step: int) -> None:
        """Note that the caller's training stands at a step, which was restored."""
        self.position = step
        # What is saved from here on is compared, also under a number that an abandoned step had.
        self._compared_after = min(self._compared_after, step)

    def steps(self) -> list[int]:
        """Return the saved steps of the line in ascending order."""
        return going_back.live_steps(self._folder)

    def listing(self) -> str:
        """Return the saved steps as people read them."""
        return ", ".join(map(str, self.steps())) or "none"

    def newest_metadata(self, steps: Sequence[int]) -> dict[str, Any]:
        """Return the metadata of the last of some steps whose record is intact.

        Raises:
            CheckpointError: there is none.
        """
        for step in reversed(steps):
            with contextlib.suppress(DamagedError):
                return directory.read_info(self._folder, step).metadata
        raise CheckpointError(f"all checkpoints in {self._folder} are damaged ({self.listing()})")

    def holds(self, step: int, record: Mapping[str, Any]) -> bool:
        """Whether a saved step has the arrays of this record: the same leaves with the same digests."""
        try:
            info = directory.read_info(self._folder, step)
        except DamagedError:
            return False
        leaves = {name: [list(shape), dtype] for name, (shape, dtype) in info.leaves.items()}
        digests = {name: list(digest) for name, digest in info.digests.items()}
        return (leaves, digests) == (record["leaves"], record["digests"])

    def make_room(self, step: int, *, before_moving: Callable[[], None]) -> None:
        """Make the directory ready for a save of `step`; only the deciding process.

        Args:
            step: number of the step.
            before_moving: called before other steps are renamed.

        Raises:
            SaveError: it cannot be written.
            OSError: it cannot be made.
        """
        path = directory.step_path(self._folder, step)
        places.make_folder(self._folder)
        if not places.is_writable(self._folder):
            raise SaveError(f"cannot save checkpoint {path}: {os.strerror(errno.EACCES)}")
        if not self._is_cleared:
            directory.clear_leftovers(self._folder)
            self._is_cleared = True
        self.settle()
        after = step - 1 if self.position is None else min(self.position, step - 1)
        if any(other > after for other in self.steps()):
            before_moving()
            going_back.begin(self._folder, after=after, step=step)
        if path.exists() or path.is_symlink():
            moved = directory.set_aside(self._folder, step, reason="foreign")
            self._report(f"{path} is not a checkpoint of jaxtrain: it is renamed to {moved.name}")

    def settle(self) -> None:
        """Finish what an earlier save that went back has left to move; only the deciding process."""
        for step in going_back.settle(self._folder, self._report):
            self._marks.pop(step, None)

    def clear(self) -> None:
        """Delete what a failed save has written: the next one needs the disk; only the deciding process.

        A store that failed the save may fail here too: then the next save begins with it.
        """
        self._is_cleared = False
        try:
            directory.clear_leftovers(self._folder)
            self.settle()
        except (OSError, CheckpointError):
            if not places.is_remote(self._folder):
                raise

    def note_loss(self, step: int, eval_loss: float, score: float | None) -> None:
        """Write the eval_loss and score of a saved step into its record; only the deciding process."""
        directory.write_eval_loss(self._folder, step, eval_loss, score)
        self._marks[step] = (eval_loss, score)

    def score_again(self, scores: Mapping[int, float | None], *, after: int) -> None:
        """Compare the steps saved so far by these scores in place of the recorded ones; those without one by none.

        Args:
            scores: step -> score.
            after: steps up to this one are compared only as long as no later one has a loss.
        """
        self._compared_after = after
        for step in self.steps():
            self._marks[step] = (recorded_marks(self._folder, step)[0], scores.get(step))

    def needs_verified(self, verified: Collection[int]) -> bool:
        """Whether older steps wait to be deleted until one of the newest is known to be intact."""
        steps = self.steps()
        return bool(set(steps) - self._kept(steps)) and not self._is_one_of_the_newest(_last(verified, steps), steps)

    def prune(self, verified: Collection[int]) -> None:
        """Delete the steps that the policy does not keep; only the deciding process.

        Args:
            verified: steps that are known to be intact. Nothing is deleted unless the last of them is one of the
                newest `keep_last`: one that `keep_every` or `keep_best` keeps may be far behind.
        """
        steps = self.steps()
        if self._is_one_of_the_newest(_last(verified, steps), steps):
            directory.remove(self._folder, set(steps) - self._kept(steps))

    def _is_one_of_the_newest(self, step: int | None, steps: Sequence[int]) -> bool:
        return step in steps[-self._keep_last :]

    def rule(self) -> Callable[[Marks], set[int]]:
        """Return the policy as a function of steps with their marks, which another thread may call."""
        known = dict(self._marks)
        return lambda marks: self._policy({**marks, **{step: known[step] for step in marks if step in known}})

    def _kept(self, steps: Sequence[int]) -> set[int]:
        for step in steps:
            if step not in self._marks:
                self._marks[step] = recorded_marks(self._folder, step)
        return self._policy({step: self._marks[step] for step in steps})

    def _policy(self, marks: Marks) -> set[int]:
        """Return the steps that the policy keeps: by the scores where there are any, else by the losses."""
        after = self._compared_after
        if after and any(step > after and mark != (None, None) for step, mark in marks.items()):
            marks = {step: mark if step > after else (None, None) for step, mark in marks.items()}
        by_score = any(score is not None for _, score in marks.values())
        compared = {step: score if by_score else loss for step, (loss, score) in marks.items()}
        return directory.steps_to_keep(
            compared, keep_last=self._keep_last, keep_every=self._keep_every, keep_best=self._keep_best
        )

    def pass_over(self, damaged: Sequence[tuple[int, str]], *, instead: int, rename: bool) -> None:
        """Report damaged steps in place of which an earlier one is used; only the deciding process.

        Args:
            damaged: steps with what is wrong.
            instead: the step that is used.
            rename: move each aside, so that the next start does not meet it.
        """
        for step, reason in damaged:
            moved = f" (renamed to {directory.set_aside(self._folder, step, reason='corrupt').name})" if rename else ""
            self._report(f"{reason}{moved}; step {instead} is used instead")


def recorded_marks(folder: Place, step: int) -> tuple[float | None, float | None]:
    """Return the eval_loss and the score in the record of a step; (None, None) where it is damaged."""
    try:
        info = directory.read_info(folder, step)
    except CheckpointError:
        return None, None
    return info.eval_loss, info.score


def _last(verified: Collection[int], steps: Collection[int]) -> int | None:
    return max((step for step in steps if step in verified), default=None)
