"""Numbers that go wrong: spikes, and steps that are not finite."""

from collections.abc import Mapping

import jax

from jaxtrain.config.schema import SpikesConfig
from jaxtrain.metrics.progress import Progress

# Lines of one process; after these the counts of skipped steps go on alone.
_MOST_SHOWN = 10


class BadSteps:
    """Says which steps were skipped, by their metrics once they are done."""

    def __init__(self, spikes: SpikesConfig | None, progress: Progress) -> None:
        self._spikes, self._progress, self._shown = spikes, progress, 0

    def note(self, number: int, metrics: Mapping[str, jax.Array]) -> None:
        """Look at the metrics of a step that is done."""
        is_spike = self._spikes is not None and bool(metrics["spiked"])
        # A batch without weight is skipped without a fault.
        is_empty = float(metrics["weight"]) == 0 and float(metrics["grad_norm"]) == 0
        if not (is_spike or (int(metrics["skipped_in_a_row"]) and not is_empty)) or self._shown >= _MOST_SHOWN:
            return
        self._shown += 1
        numbers = f"loss {float(metrics['loss']):.4g}, gradient norm {float(metrics['grad_norm']):.4g}"
        what = "is not finite"
        if is_spike and self._spikes is not None:
            what = (
                f"is a spike, more than {self._spikes.sigmas:g} deviations above the last {self._spikes.window} steps"
            )
        self._progress.message(f"step {number} {what}: {numbers}; batch {number - 1} is skipped")
