"""Evaluation of a run on its held-out rows: when it is due, what is shown and recorded of it."""

from typing import TYPE_CHECKING

from jaxtrain.data import Batches, prefetch
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.writers import Scalars, flat_scalars
from jaxtrain.run.evaluation import Evaluator
from jaxtrain.run.record import RunRecord
from jaxtrain.train.assemble import Run, reading_threads
from jaxtrain.train.state import TrainState

if TYPE_CHECKING:
    import grain


class HeldOut:
    """Evaluates states of a run on its held-out rows; does nothing where its data has none.

    Args:
        run: what is trained.
        record: receives the metrics.
        progress: what people see.

    Attributes:
        metrics: of the last evaluation; empty before it.
    """

    def __init__(self, run: Run, record: RunRecord, progress: Progress) -> None:
        self._run, self._record, self._progress = run, record, progress
        self._evaluator = Evaluator(run.step)
        self._step: int | None = None
        self.metrics: Scalars = {}

    def evaluate(self, number: int, state: TrainState) -> None:
        """Evaluate the state after step `number`, unless that was done already."""
        data = self._run.data
        if data.validation is None or self._step == number:
            return
        with self._record.spent.measure("evaluation"):
            self.metrics = self._evaluated(state, data.validation)
        self._step = number
        self._record.scalars(number, self.metrics)
        shown = "  ".join(shown_metrics(self.metrics))
        self._progress.message(f"step {number}: {shown}")

    def _evaluated(self, state: TrainState, validation: "grain.MapDataset") -> Scalars:
        config = self._run.config
        rows = Batches(
            validation,
            config.train.global_batch_size,
            seed=config.seed,
            shuffle=False,
            workers=reading_threads(config),
        )
        count = min(len(rows), config.evaluation.max_batches or len(rows))
        loaded = prefetch(self._run.step.loader(rows), 0, count, depth=1)
        try:
            return flat_scalars(self._evaluator(state, (batch for batch, _ in loaded)))
        finally:
            loaded.close()

    def loss_after(self, number: int) -> float | None:
        """The eval_loss after step `number`; None where the last evaluation was of another step."""
        return self.metrics.get("eval_loss") if self._step == number else None


def shown_metrics(metrics: Scalars) -> list[str]:
    """Metrics as people read them: `eval loss 1.234`."""
    return [f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items()]
