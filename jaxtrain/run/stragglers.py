"""Names a process that the others wait for at each step, while training goes on. No jax here."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

_WINDOW_STEPS = 10
_WINDOWS = 3
Sums = tuple[int, float, float]


@dataclass(frozen=True)
class Delay:
    """What one window says of a process."""

    extra_seconds: float
    step_seconds: float


def window_delays(before: Mapping[int, Sums], after: Mapping[int, Sums]) -> dict[int, Delay]:
    """By how much each process delays a step, from sums at two times.

    Processes of one program wait for each other at each step, so that all take equally long and only what each does
    outside the program can tell them apart: its wait for data and its work between steps.

    Args:
        before, after: process -> number of steps, their wall seconds, and the seconds in which the others wait for it.

    Returns:
        Process -> its own seconds per step above the median of all processes, and the median seconds of a step; empty
        where a process has done fewer than 10 steps in between.
    """
    own, wall = {}, {}
    for process, (steps, step_seconds, own_seconds) in after.items():
        steps_before, seconds_before, own_before = before.get(process, (0, 0.0, 0.0))
        count = steps - steps_before
        if count < _WINDOW_STEPS:
            return {}
        own[process] = (own_seconds - own_before) / count
        wall[process] = (step_seconds - seconds_before) / count
    if len(own) < 2:
        return {}
    # Of two processes the median would be half of the slower one.
    usual, usual_step = statistics.median_low(own.values()), statistics.median(wall.values())
    return {process: Delay(seconds - usual, usual_step) for process, seconds in own.items()}


class Stragglers:
    """Follows the sums of all processes, and says once which one is slow until it no longer is.

    Args:
        fraction: of a step; who delays it by more, three windows in a row, is slow.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._before: dict[int, Sums] = {}
        self._in_a_row: dict[int, int] = {}

    def note(self, sums: Mapping[int, Sums]) -> dict[int, Delay]:
        """Take note of the sums so far.

        Args:
            sums: process -> number of steps, wall seconds, own seconds.

        Returns:
            The processes that have become slow.
        """
        if set(sums) != set(self._before):
            self._before = dict(sums)
            return {}
        delays = window_delays(self._before, sums)
        if not delays:
            return {}
        self._before = dict(sums)
        found = {}
        for process, delay in delays.items():
            is_slow = delay.extra_seconds > self._fraction * delay.step_seconds
            self._in_a_row[process] = self._in_a_row.get(process, 0) + 1 if is_slow else 0
            if self._in_a_row[process] == _WINDOWS:
                found[process] = delay
        return found
