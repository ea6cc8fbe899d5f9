"""The profile of a run: a trace of three of its steps."""

from pathlib import Path

import jax

from jaxtrain.metrics.progress import Progress

_NUM_STEPS = 3


class Profile:
    """Traces the steps after `start_step` (None: no step) into a folder."""

    def __init__(self, start_step: int | None, folder: Path, progress: Progress) -> None:
        self._start_step = start_step
        self._folder = folder
        self._progress = progress
        self._is_running = False

    def before_step(self, number: int) -> None:
        """Begin if step `number` is the first to trace."""
        if number - 1 == self._start_step:
            jax.profiler.start_trace(str(self._folder))
            self._is_running = True

    def after_step(self, number: int) -> None:
        """End if step `number` was the last to trace."""
        if self._start_step is not None and number == self._start_step + _NUM_STEPS:
            self.stop()

    def stop(self) -> None:
        """End, if a trace is running."""
        if not self._is_running:
            return
        self._is_running = False
        jax.profiler.stop_trace()
        self._progress.message(f"profile: {self._folder}")
