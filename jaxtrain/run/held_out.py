"""Evaluation of a run on its held-out rows: when it is due, what is shown and recorded of it."""

from jaxtrain.data import Batches, prefetch
from jaxtrain.data.evaluated import evaluated_rows
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.writers import Scalars, flat_scalars
from jaxtrain.run.activity import Activity
from jaxtrain.run.compared import most_evaluated
from jaxtrain.run.evaluation import Evaluator
from jaxtrain.run.interrupt import Interrupt
from jaxtrain.run.record import RunRecord
from jaxtrain.train.assemble import Run, reading_threads
from jaxtrain.train.state import TrainState


class HeldOut:
    """Evaluates states of a run on its held-out rows; does nothing where its data has none.

    Args:
        run: what is trained.
        record: receives the metrics.
        progress: what people see.
        evaluator: of the run's step.
        interrupt: asked before every batch.
        activity: is told of every batch.

    Attributes:
        metrics: of the last evaluation; empty before it.
    """

    def __init__(
        self,
        run: Run,
        record: RunRecord,
        progress: Progress,
        *,
        evaluator: Evaluator,
        interrupt: Interrupt,
        activity: Activity,
    ) -> None:
        self._run, self._record, self._progress = run, record, progress
        self._evaluator, self._interrupt, self._activity = evaluator, interrupt, activity
        self._step: int | None = None
        self.metrics: Scalars = {}

    def evaluate(self, number: int, state: TrainState, *, is_recorded: bool = False) -> bool:
        """Evaluate the state after step `number`; returns False where that was done, or no rows are held out.

        Args:
            number: of the step.
            state: after it.
            is_recorded: whether an earlier process wrote its row of metrics.

        Raises:
            StoppedWaiting: the run is to stop; nothing is recorded.
        """
        if self._run.data.validation is None or self._step == number:
            return False
        with self._record.spent.measure("evaluation"):
            self.metrics = self._evaluated(state)
        self._step = number
        if not is_recorded:
            self._record.scalars(number, self.metrics)
        shown = "  ".join(shown_metrics(self.metrics))
        self._progress.message(f"step {number}: {shown}")
        return True

    def _evaluated(self, state: TrainState) -> Scalars:
        rows = held_out_batches(self._run)
        loaded = prefetch(self._run.step.loader(rows), 0, len(rows), depth=1)
        try:
            return flat_scalars(self._evaluator(state, self._activity.ticking(self._interrupt.until_asked(loaded))))
        finally:
            loaded.close()

    def go_back(self) -> None:
        """Forget which step was evaluated last: the run goes back to an earlier one."""
        self._step, self.metrics = None, {}

    def loss_after(self, number: int) -> float | None:
        """The eval_loss after step `number`; None where the last evaluation was of another step."""
        return self.metrics.get("eval_loss") if self._step == number else None


def held_out_batches(run: Run) -> Batches:
    """The batches of the held-out rows that a run evaluates; it must have some."""
    config = run.config
    assert run.data.validation is not None
    rows = evaluated_rows(run.data.validation, most_evaluated(config))
    size = config.train.global_batch_size
    return Batches(rows, size, seed=config.seed, shuffle=False, workers=reading_threads(config))


def metric_names(run: Run, state: TrainState, evaluator: Evaluator) -> list[str]:
    """The names of the metrics of an evaluation, as its first batch gives them.

    Args:
        run: with held-out rows.
        state: on the mesh.
        evaluator: that will evaluate, so that its program is compiled once.
    """
    return list(flat_scalars(evaluator(state, [run.step.loader(held_out_batches(run))(0)])))


def shown_metrics(metrics: Scalars) -> list[str]:
    """Metrics as people read them: `eval loss 1.234`."""
    return [f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items()]
