"""What follows a complete save, in the background of training: it is read back, and old steps are deleted.

A step counts as verified once every array of it was read from the disk and has the digest that it had in memory. Only
then are older steps deleted, so that a verified one is there at any time.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic

from jaxtrain.checkpoint import directory, places
from jaxtrain.checkpoint.directory import DamagedError, SaveError
from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.storage import verify_on_host
from jaxtrain.errors import CheckpointError

# What stands still for this long is left behind when a run ends: a network file system may never answer.
_PATIENCE_SECONDS = 60.0
_LEAVING_SECONDS = 10.0  # for a read of at most 64 MiB, at the end of a run that is in a hurry


class Retention:
    """Which steps of a checkpoint directory stay: see the arguments of `Checkpointer`.

    Attributes:
        marks: step -> eval_loss and score, where they are others than in its record.
    """

    def __init__(self, keep_last: int, keep_every: int | None, keep_best: bool) -> None:
        self.keep_last = keep_last
        self._keep_every = keep_every
        self._keep_best = keep_best
        self.marks: dict[int, tuple[float | None, float | None]] = {}

    def kept(self, folder: Place, steps: Iterable[int]) -> set[int]:
        """Return which of the steps of a folder stay."""
        steps = sorted(steps)
        kept = set(steps[-self.keep_last :])
        if self._keep_every is not None:
            kept |= {step for step in steps if step % self._keep_every == 0}
        if self._keep_best:
            kept |= self._best({step: self.marks.get(step) or _recorded(folder, step) for step in steps})
        return kept

    def _best(self, marks: Mapping[int, tuple[float | None, float | None]]) -> set[int]:
        """The step of the best score, and that of the lowest loss among steps without one (before early stopping)."""
        scores = [(score, step) for step, (_, score) in marks.items() if score is not None]
        losses = [(loss, step) for step, (loss, score) in marks.items() if score is None and loss is not None]
        finite = ([(value, step) for value, step in values if math.isfinite(value)] for values in (scores, losses))
        return {min(values)[1] for values in finite if values}


def _recorded(folder: Place, step: int) -> tuple[float | None, float | None]:
    with contextlib.suppress(CheckpointError):
        info = directory.read_info(folder, step)
        return info.eval_loss, info.score
    return None, None


class Upkeep:
    """Looks after the complete steps of a checkpoint directory; process 0 alone has work for it.

    One thread works on one step at a time; of steps that wait only the newest is taken. It never raises: what it finds
    is told by `look`, which the thread of the training calls. `verified` holds the steps that are known to be intact.
    """

    def __init__(self, folder: Place, retention: Retention, report: Callable[[str], None]) -> None:
        self.verified: set[int] = set()
        self._folder = folder
        self._retention = retention
        self._report = report
        self._condition = threading.Condition()
        self._reading = threading.Lock()
        self._waiting: int | None = None
        self._busy = self._is_over = self._is_left = False
        self._began: int | None = None
        self._read_bytes = 0
        self._lines: list[str] = []
        self._damaged: dict[int, str] = {}

    def begin(self, step: int) -> None:
        """Begin to look after a step that is complete; a second call does nothing."""
        if self._began == step:
            return
        self._began = self._waiting = step
        with self._condition:
            if not self._busy:
                self._busy = True
                # A daemon, because a file system that never answers must not keep the process from ending.
                threading.Thread(target=self._work, name="jaxtrain-checkpoints", daemon=True).start()

    def forget(self, step: int) -> None:
        """Note that a step is written (again) under its number."""
        self.verified.discard(step)
        self._retention.marks.pop(step, None)
        self._began = None
        self._is_over = False

    def look(self) -> None:
        """Report what was done in the background; a SaveError where a step does not read as it was saved."""
        while self._lines:
            self._report(self._lines.pop(0))
        while self._damaged:
            step, reason = self._damaged.popitem()
            moved = directory.set_aside(self._folder, step, reason="corrupt")
            raise SaveError(f"{reason}, read back after the save (renamed to {moved.name})")

    def finish(self) -> None:
        """Wait until nothing is left to do, or what is done has stood still for a minute; then `look`."""
        done = self._read_bytes
        moved_at = monotonic()
        while not self._is_left and not self._is_idle():
            if self._read_bytes != done:
                done = self._read_bytes
                moved_at = monotonic()
            elif monotonic() - moved_at > _PATIENCE_SECONDS:
                self._is_left = True
                self._lines.append(f"a checkpoint of {self._folder} was not verified: no progress")
        self.look()

    def release(self) -> None:
        """Let no further read begin, and wait for the one under way: Orbax may not read while jax shuts down."""
        self._is_over = True
        if self._reading.acquire(timeout=_LEAVING_SECONDS):
            self._reading.release()

    def _is_idle(self) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: not self._busy, timeout=0.5)

    def _work(self) -> None:
        while True:
            with self._condition:
                step = self._waiting
                self._waiting = None
                self._busy = step is not None
                if step is None:
                    self._condition.notify_all()
                    return
            try:
                self._care_for(step)
            except DamagedError as error:
                if places.is_complete(self._folder / str(step)):  # it was not deleted meanwhile
                    self._damaged[step] = str(error)
            except Exception as error:  # the step stays unverified, and older ones stay
                self._lines.append(f"step {step} cannot be verified or copied: {error}")

    def _care_for(self, step: int) -> None:
        places.sync_folder(self._folder / str(step))
        steps = directory.list_steps(self._folder)
        superfluous = set(steps) - self._retention.kept(self._folder, steps)
        newest = steps[-self._retention.keep_last :]
        if superfluous and not self.verified & set(newest):
            with self._reading:
                verify_on_host(directory.read_info(self._folder, step), self._advance)
            self.verified.add(step)
        if self.verified & set(newest):
            places.remove_steps(self._folder, superfluous)

    def _advance(self, num_bytes: int) -> None:
        self._read_bytes += num_bytes
        if self._is_over:
            raise CheckpointError("the run ends")
