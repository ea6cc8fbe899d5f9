"""When minutes have passed since the last save: every process of a run answers alike, whatever its clock says."""

import time
from collections.abc import Callable

from jaxtrain.checkpoint.storage import from_process_0

# The most steps until the processes ask again: time per step may change, and an answer costs little.
_MOST_STEPS = 1000


class SaveClock:
    """Says after which steps `checkpoint.every_minutes` wants a save.

    Process 0 alone looks at a clock. With several processes an answer is a collective, so that the next one is asked
    for after as many steps as half of the time that is left should take: a dozen answers per interval, and no process
    saves alone. Every process calls every method, after the same steps.

    Args:
        minutes: between two saves; None: never.
        clock: gives seconds.
        agree: gives every process what process 0 finds.
    """

    def __init__(
        self,
        minutes: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[Callable[[], int]], int] = from_process_0,
    ) -> None:
        self._seconds = None if minutes is None else 60.0 * minutes
        self._clock, self._agree = clock, agree
        self._saved_at = clock()
        self._asked: tuple[int, float] | None = None
        self._next = 0

    def is_due(self, number: int) -> bool:
        """Whether the state after step `number` is to be saved; asked once after every step."""
        if self._seconds is None or number < self._next:
            return False
        wait = self._agree(lambda: self._steps_to_wait(number))
        self._next = number + max(1, wait)
        return wait == 0

    def saved(self) -> None:
        """A save began, for this reason or another: the minutes are counted from here."""
        self._saved_at, self._next, self._asked = self._clock(), 0, None

    def _steps_to_wait(self, number: int) -> int:
        """The steps until the question is asked again; 0: a save is due."""
        assert self._seconds is not None
        time_now = self._clock()
        left = self._saved_at + self._seconds - time_now
        if left <= 0:
            return 0
        before, self._asked = self._asked, (number, time_now)
        if before is None or number <= before[0] or time_now <= before[1]:
            return 1
        seconds_per_step = (time_now - before[1]) / (number - before[0])
        return max(1, min(_MOST_STEPS, int(left / 2 / seconds_per_step)))
