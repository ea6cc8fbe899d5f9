"""The remaining time of a run and the curve of its loss, which the progress display keeps between updates."""

import math

from jaxtrain.metrics.format import sparkline

_MOST_LOSSES = 1024


class RemainingTime:
    """Estimates the remaining time from the steps of this process, except the first one, which may compile.

    Args:
        total_steps: steps of the run, including those of earlier processes.
        first_step: steps done before this process.
    """

    def __init__(self, total_steps: int, first_step: int):
        self._total_steps = total_steps
        self._first_step = first_step
        self._base: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def update(self, step: int, now: float) -> None:
        """Record that steps are done.

        Args:
            step: steps done by all processes of the run so far.
            now: seconds of any monotonic clock.
        """
        if step <= self._first_step:
            return
        if self._base is None:
            self._base = (step, now)
        self._last = (step, now)

    def seconds(self) -> float | None:
        """Return the remaining seconds; None before the second step of this process."""
        if self._base is None or self._last is None or self._last[0] <= self._base[0]:
            return None
        step_seconds = (self._last[1] - self._base[1]) / (self._last[0] - self._base[0])
        return max(0, self._total_steps - self._last[0]) * step_seconds


class Trend:
    """A series of losses that is thinned as it grows: it keeps at most about a thousand of them."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._stride = 1
        self._seen = 0
        self._last = math.nan

    def add(self, value: float) -> None:
        """Add the next loss; NaN and infinities are not drawn."""
        self._last = value
        if not math.isfinite(value):
            return
        if self._seen % self._stride == 0:
            self._values.append(value)
        self._seen += 1
        if len(self._values) > _MOST_LOSSES:
            self._values = self._values[::2]
            self._stride *= 2

    def ends(self) -> tuple[float, float]:
        """Return the first loss that is drawn and the last one, finite or not; NaN where none is drawn."""
        return (self._values[0], self._last) if self._values else (math.nan, math.nan)

    def sparkline(self) -> str:
        """Draw the curve as block characters; the text is empty for fewer than two losses."""
        return sparkline(self._values) if self._seen > 1 else ""
