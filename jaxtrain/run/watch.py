"""What a run asks between its steps: its callbacks, and whether its evaluations still get better."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config.early_stopping import EarlyStoppingConfig
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.runinfo import read_run_info
from jaxtrain.metrics.writers import Scalars, flat_scalars
from jaxtrain.run.callbacks import Answer, Callback, Moment, check_answer
from jaxtrain.run.early_stopping import Verdict, judge, recorded_evaluations, recorded_values, sign_of
from jaxtrain.train.assemble import Run
from jaxtrain.train.state import TrainState

EARLY_STOPPED = "early stopped"
STOPPED_BY_CALLBACK = "stopped by a callback"


class Watch:
    """Calls the callbacks of a run, follows its evaluations, and knows why it stops before its last step.

    Every process calls every method, in the same order.

    Args:
        run: what is trained.
        run_dir: its directory; holds the evaluations of the steps up to `start`.
        callbacks: in the order in which they are called.
        start: steps done before this process.
        after: evaluations up to this step were over other held-out rows, and are not compared.

    Attributes:
        status: how the run ends before its last step, for run.json; None: it does not.
        reason: why, for people.
        log: takes what callbacks log.
    """

    def __init__(self, run: Run, run_dir: Path, *, callbacks: Sequence[Callback], start: int, after: int) -> None:
        config = run.config
        self._run_dir, self._callbacks = run_dir, tuple(callbacks)
        self._last = config.train.steps
        self._rule, self._every = config.evaluation.early_stopping, config.evaluation.every
        self._keeps_best = config.checkpoint.keep_best
        self._metrics: Mapping[str, jax.Array] = {}
        self._run, self._batch = run, None
        self.log: Callable[[int, Mapping[str, Any]], None] = lambda step, values: None
        self._evaluations: dict[int, float] = {}
        self._scores: dict[int, float] = {}
        self._best_until: int | None = None
        self.status: str | None = None
        self.reason = ""
        if self._rule is not None and self._every is not None and start:
            ends = _earlier_ends(run_dir, start)
            found = recorded_evaluations(run_dir, self._rule, every=self._every, last=start, ends=ends)
            self._evaluations = {step: value for step, value in found.items() if step > after}
            self._decide()

    @property
    def has_early_stopping(self) -> bool:
        """Whether evaluations can stop the run."""
        return self._rule is not None

    @property
    def wants_complete_saves(self) -> bool:
        """Whether a callback is to be called once a checkpoint is complete."""
        return any(callback.on_save is not None for callback in self._callbacks)

    def check_metric(self, names: Sequence[str]) -> None:
        """Raise where the metric of early stopping is none of the evaluation's.

        Raises:
            ConfigError: names those that there are.
        """
        if self._rule is not None and self._rule.metric not in names:
            raise ConfigError(
                f"evaluation.early_stopping.metric={self._rule.metric} is not among the metrics of the evaluation; use "
                f"{' or '.join(names)}"
            )

    def is_due(self, number: int) -> bool:
        """Whether a callback wants to see this step."""
        return any(callback.on_step is not None and number % callback.every == 0 for callback in self._callbacks)

    def following(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """The batches of the steps from `first` on; that of a step that a callback sees is kept for its gradients."""
        sees = any(callback.on_step is not None for callback in self._callbacks)
        return map(self._keep, itertools.count(first), batches) if sees else batches

    def _keep(self, number: int, batch: Any) -> Any:
        self._batch = batch if self.is_due(number) or number == self._last else None
        return batch

    def note(self, metrics: Mapping[str, jax.Array]) -> None:
        """Remember the metrics of the step that is done, on the device."""
        self._metrics = metrics

    def stepped(self, number: int, state: TrainState) -> None:
        """Call `on_step` of the callbacks that want to see this step; all want to see the last one."""
        due = [
            callback.on_step
            for callback in self._callbacks
            if callback.on_step is not None and (number % callback.every == 0 or number == self._last)
        ]
        if due:
            batch = self._batch
            found = None if batch is None else lambda: self._run.step.gradients(state, batch).tree
            self._call("on_step", due, Moment(number, self._step_metrics(), state, self._run_dir, self.log, found))

    def evaluated(self, number: int, metrics: Scalars, state: TrainState) -> None:
        """Follow the metric of early stopping, and call `on_evaluation`."""
        if self._rule is not None:
            value = metrics.get(self._rule.metric)
            value = math.nan if value is None else float(value)
            self._scores[number] = sign_of(self._rule) * value
            if self._every is not None and number % self._every == 0:
                self._evaluations[number] = value
                self._decide()
        numbers = {name: math.nan if value is None else value for name, value in metrics.items()}
        due = [callback.on_evaluation for callback in self._callbacks if callback.on_evaluation is not None]
        self._call("on_evaluation", due, Moment(number, numbers, state, self._run_dir, self.log))

    def saved(self, number: int, state: TrainState) -> None:
        """Call `on_save`."""
        due = [callback.on_save for callback in self._callbacks if callback.on_save is not None]
        self._call("on_save", due, Moment(number, {}, state, self._run_dir, self.log))

    def score_after(self, number: int) -> float | None:
        """What `keep_best` compares, lower being better; None: the eval_loss, or no number was evaluated."""
        score = self._scores.get(number)
        return None if score is None or not math.isfinite(score) else score

    def recorded_scores(self, last: int) -> dict[int, float]:
        """What `keep_best` compares of the steps up to `last`, by metrics.jsonl: earlier parts of the run may have
        compared another metric. Empty: the losses.
        """
        if self._rule is None:
            return {}
        sign = sign_of(self._rule)
        found = recorded_values(self._run_dir, self._rule.metric, last=last)
        return {step: sign * value for step, value in found.items() if math.isfinite(value)}

    def go_back(self, number: int) -> None:
        """Forget the evaluations after step `number`, which is the last one of the run again."""
        self._evaluations = {step: value for step, value in self._evaluations.items() if step <= number}
        self._scores = {step: value for step, value in self._scores.items() if step <= number}
        self._best_until = None

    def wants_save(self, number: int) -> bool:
        """Whether the evaluation after this step was the best so far, and the best is to be kept."""
        return self._keeps_best and self._best_until == number

    def _step_metrics(self) -> dict[str, float | int]:
        return flat_scalars(jax.device_get(dict(self._metrics)))

    def _call(self, name: str, functions: Sequence[Callable[[Moment], Answer]], moment: Moment) -> None:
        for function in functions:
            answer = function(moment)
            check_answer(answer, name)
            # Processes that disagreed would wait for one another in a collective.
            if from_process_0(lambda answer=answer: int(answer is not None)) and self.status is None:
                self.status, self.reason = STOPPED_BY_CALLBACK, f"{name} of a callback stopped the run"

    def _decide(self) -> None:
        assert self._rule is not None
        verdict = judge(self._evaluations, self._rule)
        # Process 0 alone is sure to have the rows of earlier processes.
        if from_process_0(lambda: int(verdict.last_is_best)):
            self._best_until = max(self._evaluations, default=None)
        if from_process_0(lambda: int(verdict.is_over)):
            self.status, self.reason = EARLY_STOPPED, _reason(self._rule, verdict)


def _earlier_ends(run_dir: Path, start: int) -> set[int]:
    """The steps at which earlier parts of the run ended without an evaluation being due, as far as run.json says it."""
    before = read_run_info(run_dir)
    every = ((before.get("config") or {}).get("evaluation") or {}).get("every")
    ends = {start, *(before.get("resumed_after") or [])}
    return ends if every is None else {step for step in ends if step % every}


def _reason(rule: EarlyStoppingConfig, verdict: Verdict) -> str:
    best = "it was never a finite number"
    if verdict.best_step is not None:
        best = f"the best is {verdict.best:.4g} at step {verdict.best_step}"
    count = "1 evaluation" if rule.patience == 1 else f"{rule.patience} evaluations"
    better = "lower" if sign_of(rule) > 0 else "higher"
    return f"{rule.metric} got no better in {count} ({better} is better), {best}"
