"""What this process is doing: its phase, the step that it works on, and since when. No jax here."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from jaxtrain.checkpoint.places import Place
from jaxtrain.errors import PreemptedError

# The steps whose median stands for a usual one.
_KEPT_STEPS = 101
WAITING_FOR_DATA = "waiting for data"
IN_STEP = "step"


@dataclass(frozen=True)
class Moment:
    """What a process is doing.

    Attributes:
        phase: such as `compiling`, `step` or `saving`.
        step: the step that it works on, counted from 1; 0 before the first one.
        done: the last step that is known to be done.
        since: `time.monotonic()` when the phase began, or last made progress.
    """

    phase: str
    step: int
    done: int
    since: float


class Activity:
    """Follows what the main thread does; the watchdog's thread reads it.

    The main thread replaces whole frozen records, so that the reader needs no lock.

    Args:
        clock: gives seconds that never go back.

    Attributes:
        moment: what the process is doing.
        writing: the checkpoint that is written in the background and when that began; None: there is none.
        failure: the error that this process ends with, while it closes its files; None: there is none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.moment = Moment("start", 0, 0, clock())
        self.writing: tuple[Place, float] | None = None
        self.failure: BaseException | None = None
        self._seconds: deque[float] = deque(maxlen=_KEPT_STEPS)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Mark a block as a phase; afterwards the phase before it begins anew."""
        before = self.moment.phase
        self._now(phase=phase)
        try:
            yield
        finally:
            self._now(phase=before)

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Note the error of a block before anything is closed: closing may wait for the other processes."""
        try:
            yield
        except PreemptedError:
            raise
        except BaseException as error:
            self.failure = error
            raise

    def fed(self, batches: Iterator[Any], *, first: int) -> Iterator[Any]:
        """The batches of the steps from `first` on; taking one marks the wait for data and then the step."""
        return _Followed(batches, first, self.waits, self.computes)

    def ticking(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of an evaluation; taking one counts as progress."""
        return _Followed(batches, 0, lambda number: None, lambda number: self._now())

    def waits(self, step: int) -> None:
        """Take note that the batch of a step is waited for."""
        self._now(phase=WAITING_FOR_DATA, step=step)

    def computes(self, step: int) -> None:
        """Take note that a step is dispatched, and that the step before it is waited for."""
        self._now(phase=IN_STEP, step=step)

    def finished(self, step: int, seconds: float) -> None:
        """Take note that a step is done, and of its wall time."""
        self._seconds.append(seconds)
        self._now(step=max(step, self.moment.step), done=step)

    def begins_at(self, step: int) -> None:
        """Take note of the steps that were done before this process."""
        self._now(step=step, done=step)

    def writes(self, path: Place | None) -> None:
        """Take note of a checkpoint that is being written in the background; None: nothing is."""
        self.writing = None if path is None else (path, self._clock())

    def median_seconds(self) -> float | None:
        """The median of the latest steps of this process; None before one is done."""
        seconds = list(self._seconds)  # a copy: the other thread may add to it
        return statistics.median(seconds) if seconds else None

    def status(self) -> dict[str, Any]:
        """What the other processes are told, as JSON values."""
        moment = self.moment
        seconds = round(self._clock() - moment.since, 3)
        return {"phase": moment.phase, "step": moment.step, "done": moment.done, "seconds": seconds}

    def _now(self, **changes: Any) -> None:
        self.moment = replace(self.moment, since=self._clock(), **changes)


class _Followed:
    """An iterator whose reads are noted; it holds no batch, because one may be gigabytes."""

    def __init__(
        self, batches: Iterator[Any], number: int, asks: Callable[[int], None], has: Callable[[int], None]
    ) -> None:
        self._batches, self._number, self._asks, self._has = batches, number, asks, has

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._asks(self._number)
        batch = next(self._batches)
        self._has(self._number)
        self._number += 1
        return batch
