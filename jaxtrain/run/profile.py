"""The profiler, on for a window of steps."""

from pathlib import Path

import jax

from jaxtrain.config.schema import ProfileConfig
from jaxtrain.metrics.progress import Progress


class ProfileWindow:
    """Traces the steps that a config asks for into `profile/` of the run directory.

    Args:
        window: which steps; none where its start is None.
        run_dir: directory of the run.
        progress: is shown where the trace is.
    """

    def __init__(self, window: ProfileConfig, run_dir: Path, progress: Progress) -> None:
        self._window, self._folder, self._progress = window, run_dir / "profile", progress
        self._running = False

    def before_step(self, number: int) -> None:
        """Start before the first step of the window."""
        if number - 1 == self._window.start_step:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after_step(self, number: int) -> None:
        """Stop after the last step of the window."""
        start = self._window.start_step
        if start is not None and number == start + self._window.num_steps:
            self.stop()

    def stop(self) -> None:
        """Write the trace, if one is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            self._progress.message(f"profile: {self._folder}")
