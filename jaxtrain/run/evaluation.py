"""How a run evaluates its held-out rows between its steps."""

from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.data import prefetch
from jaxtrain.metrics.evaluation import Evaluator, held_out_batches
from jaxtrain.metrics.history import read_rows
from jaxtrain.metrics.writers import Scalars, flat_scalars
from jaxtrain.run.assemble import Run
from jaxtrain.train.state import TrainState


class HeldOut:
    """Evaluates states on the held-out rows of a run.

    Attributes:
        step: the last step that was evaluated; None: none was.
        metrics: those of that evaluation.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._evaluator = Evaluator(run.step)
        self.step: int | None = None
        self.metrics: Scalars = {}

    def is_due(self, number: int) -> bool:
        """Return whether the state after a step is still to be evaluated."""
        return self._run.data.validation is not None and self.step != number

    def evaluate(self, number: int, state: TrainState, feed: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        """Evaluate the state after a step; `feed` wraps the iterator of the batches."""
        rows = self._run.data.validation
        assert rows is not None
        config = self._run.config
        batches = held_out_batches(config, rows, max_batches=config.evaluation.max_batches)
        loaded = prefetch(self._run.step.loader(batches), 0, len(batches), depth=1)
        try:
            self.metrics = flat_scalars(self._evaluator(state, feed(loaded)))
        finally:
            loaded.close()
        self.step = number

    def take_logged(self, number: int) -> None:
        """Take the metrics that metrics.jsonl has of a step for those of the evaluation, if it was evaluated."""
        for row in read_rows(self._run.spec.run_dir / "metrics.jsonl"):
            is_of_run = "loss" in row or "eval_loss" in row  # others are of callbacks
            if row["step"] == number and is_of_run:
                self.metrics = {**self.metrics, **row}
        if "eval_loss" in self.metrics:
            self.step = number

    def loss_after(self, number: int) -> float | None:
        """Return the `eval_loss` after a step; None: it was not evaluated."""
        if self.step != number:
            return None
        return self.metrics.get("eval_loss")
