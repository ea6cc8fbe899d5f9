"""What a run asks between its steps: its callbacks, and whether its evaluations still get better.

Early stopping is a function of the evaluations so far, which metrics.jsonl holds: so it survives a kill and a resume.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax

from jaxtrain.checkpoint.storage import from_process_0
from jaxtrain.config.schema import Config, EarlyStopping
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.history import read_rows
from jaxtrain.metrics.writers import flat_scalars
from jaxtrain.train.state import TrainState

Answer = Literal["stop"] | None
EARLY_STOPPED = "early stopped"
STOPPED_BY_CALLBACK = "stopped by a callback"


@dataclass(frozen=True)
class Moment:
    """A run between two steps, as a callback sees it.

    Attributes:
        step: steps done.
        metrics: of that step (`loss`, `grad_norm`, the task's own), or of the evaluation
            (`eval_loss`, ...); numbers, a vector as `name_0`, `name_1`. Equal on every process.
        state: the state after that step, on the mesh. Read it, but do not keep it: the next step takes its memory over.
        run_dir: directory of the run.

    Example:
        >>> seen = jt.Callback(on_step=lambda moment: print(moment.step, moment.metrics["loss"]), every=100)
        >>> weights = jt.Callback(on_step=lambda moment: moment.log({"weights": moment.state.params}), every=100)
    """

    step: int
    metrics: Mapping[str, float | int]
    state: TrainState
    run_dir: Path
    _log: Callable[[int, Mapping[str, Any]], None] = field(repr=False, default=lambda step, values: None)

    def log(self, values: Mapping[str, Any]) -> None:
        """Write values to metrics.jsonl, TensorBoard and the trackers; the report draws the numbers among them.

        Every process calls it, with names that the metrics of the run do not have.

        Args:
            values: name -> a number; an array of one dim, of which the histogram is logged, or the pair (counts, edges)
                of `np.histogram`; an image [H, W], [H, W, 1] or [H, W, 3], uint8 or scaled to its range, at most 512
                pixels high and wide; or a nested dict of arrays, such as parameters, with a histogram for each.

        Raises:
            ConfigError: a value is none of these.
        """
        self._log(self.step, values)


@dataclass(frozen=True)
class Callback:
    """Functions that a run calls between its steps; each gets a `Moment`, and stops the run by returning "stop".

    They are called on every process, in the order in which the callbacks were given. Where processes would answer
    differently, process 0 decides. A run that a callback stopped is evaluated, saved and closed like one that is done,
    and the same call goes on with it. An exception in a callback ends the run with that exception; where the run has
    one process, the state is saved first.

    Attributes:
        on_step: called after every `every` steps and after the last one. No step is under way meanwhile, so a device
            waits: for steps of milliseconds, raise `every`.
        on_evaluation: called after each evaluation.
        every: steps between two calls of `on_step`.

    Example:
        >>> def enough(moment):
        ...     return "stop" if moment.metrics["eval_accuracy"] > 0.99 else None
        >>> callback = jt.Callback(on_evaluation=enough)
    """

    on_step: Callable[[Moment], Answer] | None = None
    on_evaluation: Callable[[Moment], Answer] | None = None
    every: int = 1


def judge(evaluations: Mapping[int, float], rule: EarlyStopping) -> tuple[bool, int | None]:
    """Return whether evaluations (step -> value) stop a run, and the step of the best finite value, if there is one."""
    best_step = None
    best = math.inf
    reference = math.inf
    num_without = 0
    for step, value in sorted(evaluations.items()):
        score = _score(rule, value)
        if score < best:
            best = score
            best_step = step
        smallest_change = rule.min_delta if math.isfinite(reference) else 0.0
        if score < reference - smallest_change:
            reference = score
            num_without = 0
        else:
            num_without += 1
    return num_without >= rule.patience, best_step


def _score(rule: EarlyStopping, value: float) -> float:
    """Return a number that is lower for better values of the metric; infinite for a value that is not finite."""
    if not math.isfinite(value):
        return math.inf
    return -value if rule.is_higher_better else value


def recorded_values(run_dir: Path, metric: str, *, last: int) -> dict[int, float]:
    """Read the values of a metric in metrics.jsonl: step -> value, NaN where it was not finite."""
    values = {}
    for row in read_rows(run_dir / "metrics.jsonl"):
        if metric in row and row["step"] <= last:
            values[row["step"]] = _number(row[metric])
    return values


def _number(value: float | int | None) -> float:
    """Return a metric as a number; None, which stands for one that is not finite, as NaN."""
    return math.nan if value is None else float(value)


class Watch:
    """Calls the callbacks of a run, follows its evaluations, and knows why it stops before its last step.

    Attributes:
        status, reason: why the run stops; None and empty: it does not.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        callbacks: Sequence[Callback],
        *,
        start: int,
        log: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        self._rule = config.evaluation.early_stopping
        self._run_dir = run_dir
        self._callbacks = callbacks
        self._log = log
        self._keeps_best = config.checkpoint.keep_best
        self._last = config.train.steps
        self.status: str | None = None
        self.reason = ""
        self._evaluations: dict[int, float] = {}
        self._scored: tuple[int, float] | None = None  # step and score of the last evaluation
        self._best_step: int | None = None
        if self._rule is not None and start:
            self._evaluations = recorded_values(run_dir, self._rule.metric, last=start)
            self._decide(self._rule)

    def has_callback_at(self, number: int) -> bool:
        """Return whether a callback wants to see this step; all want to see the last one."""
        return bool(self._due(number))

    def _due(self, number: int) -> list[Callable[[Moment], Answer]]:
        due = []
        for callback in self._callbacks:
            is_due = number % callback.every == 0 or number == self._last
            if is_due and callback.on_step is not None:
                due.append(callback.on_step)
        return due

    def after_step(self, number: int, metrics: Mapping[str, Any], state: TrainState) -> None:
        """Call `on_step` of the callbacks that want to see this step."""
        functions = self._due(number)
        if functions:
            self._call(functions, number, flat_scalars(jax.device_get(dict(metrics))), state)

    def after_evaluation(self, number: int, metrics: Mapping[str, float | int | None], state: TrainState) -> None:
        """Follow the metric of early stopping, and call `on_evaluation`.

        Raises:
            ConfigError: the evaluation has no such metric.
        """
        numbers = {name: _number(value) for name, value in metrics.items()}
        rule = self._rule
        if rule is not None:
            if rule.metric not in numbers:
                raise ConfigError(
                    f"evaluation.early_stopping.metric={rule.metric} is not among the metrics of the evaluation; "
                    f"use {' or '.join(numbers)}"
                )
            value = numbers[rule.metric]
            self._scored = (number, _score(rule, value))
            self._evaluations[number] = value
            self._decide(rule)
        functions = [callback.on_evaluation for callback in self._callbacks if callback.on_evaluation is not None]
        self._call(functions, number, numbers, state)

    def score_after(self, number: int) -> float | None:
        """Return what `keep_best` compares, lower being better; None: the eval_loss, or no number was evaluated."""
        if self._scored is None or self._scored[0] != number or math.isinf(self._scored[1]):
            return None
        return self._scored[1]

    def wants_save(self, number: int) -> bool:
        """Return whether the evaluation after this step was the best so far, and the best is to be kept."""
        return self._keeps_best and self._best_step == number

    def _call(
        self,
        functions: Sequence[Callable[[Moment], Answer]],
        number: int,
        metrics: Mapping[str, float | int],
        state: TrainState,
    ) -> None:
        moment = Moment(number, metrics, state, self._run_dir, self._log)
        for function in functions:
            if _by_process_0(function(moment) == "stop") and self.status is None:
                self.status = STOPPED_BY_CALLBACK
                self.reason = "a callback returned 'stop'"

    def _decide(self, rule: EarlyStopping) -> None:
        is_over, best_step = judge(self._evaluations, rule)
        newest = max(self._evaluations, default=None)
        if _by_process_0(newest is not None and best_step == newest):
            self._best_step = newest
        if not _by_process_0(is_over):
            return
        best = "it was never a finite number"
        if best_step is not None:
            best = f"the best is {self._evaluations[best_step]:.4g} at step {best_step}"
        count = "1 evaluation" if rule.patience == 1 else f"{rule.patience} evaluations"
        better = "higher" if rule.is_higher_better else "lower"
        self.status = EARLY_STOPPED
        self.reason = f"{rule.metric} did not improve in {count} ({better} is better), {best}"


def _by_process_0(verdict: bool) -> bool:
    """Return the verdict of process 0: processes that disagreed would wait for one another in a collective."""
    return bool(from_process_0(lambda: int(verdict)))
