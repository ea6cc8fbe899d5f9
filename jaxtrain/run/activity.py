"""What this process is doing: its phase, the step that it works on, and since when. No jax here."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Totals:
    """Sums over the steps of this process.

    Attributes:
        steps: number of steps that are done.
        step_seconds: their wall time.
        own_seconds: the part of it in which the other processes wait for this one: its wait for data and its work
            between the steps. The wait for the device, which ends for all at once, is not in it.
    """

    steps: int = 0
    step_seconds: float = 0.0
    own_seconds: float = 0.0


class Activity:
    """Follows what the main thread does; the watchdog's thread reads it.

    The main thread replaces whole frozen records, so that the reader needs no lock.

    Args:
        clock: gives seconds that never go back.

    Attributes:
        moment: what the process is doing.
        totals: of the steps that are done.
        writing: the checkpoint that is written in the background and when that began; None: there is none.
        failure: the error that this process ends with, while it closes its files; None: there is none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.moment = Moment("start", 0, 0, clock())
        self.totals = Totals()
        self.writing: tuple[Place, float] | None = None
        self.failure: BaseException | None = None
        self._seconds: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._settled: float | None = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Mark a block as a phase; afterwards the phase before it begins anew."""
        before = self.moment.phase
        self._enter(phase)
        self._settled = None
        try:
            yield
        finally:
            self._enter(before)

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

    def progressed(self) -> None:
        """Take note that the phase, such as an evaluation of many batches, has made progress."""
        self._enter(self.moment.phase)

    def fed(self, batches: Iterator[Any], *, first: int) -> Iterator[Any]:
        """The batches of the steps from `first` on; taking one marks the wait for data and then the step."""
        return _Fed(self, batches, first)

    def ticking(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of an evaluation; taking one counts as progress."""
        return _Ticking(self, batches)

    def waits(self, step: int) -> None:
        """Take note that the batch of a step is waited for."""
        now = self._clock()
        if self._settled is not None:
            self._add_own(now - self._settled)
            self._settled = None
        self.moment = Moment(WAITING_FOR_DATA, step, self.moment.done, now)

    def computes(self, step: int) -> None:
        """Take note that a step is dispatched, and that the step before it is waited for."""
        self.moment = Moment(IN_STEP, step, self.moment.done, self._clock())

    def finished(self, step: int, seconds: float, waited: float) -> None:
        """Take note that a step is done.

        Args:
            step: its number.
            seconds: its wall time.
            waited: seconds of it that its batch was waited for.
        """
        now = self._clock()
        self._seconds.append(seconds)
        before = self.totals
        self.totals = Totals(before.steps + 1, before.step_seconds + seconds, before.own_seconds + waited)
        self._settled = now
        self.moment = Moment(self.moment.phase, max(step, self.moment.step), step, now)

    def begins_at(self, step: int) -> None:
        """Take note of the steps that were done before this process."""
        self.moment = Moment(self.moment.phase, step, step, self._clock())

    def writes(self, path: Place | None) -> None:
        """Take note of a checkpoint that is being written in the background; None: nothing is."""
        self.writing = None if path is None else (path, self._clock())

    def median_seconds(self) -> float | None:
        """The median of the latest steps of this process; None before one is done."""
        seconds = list(self._seconds)
        return statistics.median(seconds) if seconds else None

    def status(self) -> dict[str, Any]:
        """What the other processes are told, as JSON values."""
        moment, totals = self.moment, self.totals
        return {
            "phase": moment.phase,
            "step": moment.step,
            "done": moment.done,
            "seconds": round(self._clock() - moment.since, 3),
            "totals": [totals.steps, round(totals.step_seconds, 6), round(totals.own_seconds, 6)],
        }

    def _enter(self, phase: str) -> None:
        self.moment = Moment(phase, self.moment.step, self.moment.done, self._clock())

    def _add_own(self, seconds: float) -> None:
        before = self.totals
        self.totals = Totals(before.steps, before.step_seconds, before.own_seconds + seconds)


class _Fed:
    """Iterates over the batches of training; it holds none of them, because a batch may be gigabytes."""

    def __init__(self, activity: Activity, batches: Iterator[Any], first: int) -> None:
        self._activity, self._batches, self._next = activity, batches, first

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._activity.waits(self._next)
        batch = next(self._batches)
        self._activity.computes(self._next)
        self._next += 1
        return batch


class _Ticking:
    """Iterates over the batches of an evaluation."""

    def __init__(self, activity: Activity, batches: Iterator[Any]) -> None:
        self._activity, self._batches = activity, batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._activity.progressed()
        return batch
