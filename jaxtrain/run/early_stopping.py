"""When a run stops because its evaluations get no better. No jax here.

The decision is a function of the evaluations so far, which metrics.jsonl holds: so it survives a kill and a resume.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jaxtrain.config.arguments import check_number
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import EarlyStoppingConfig, is_higher_better


@dataclass(frozen=True)
class EarlyStopping:
    """Stops a run when a metric of its evaluations gets no better; give it to `fit` or `run_config` as a callback.

    The run then ends as one that is done. Going on needs another `patience`, or none of it. With `keep_best` of the
    checkpoints, the state with the best value is saved whenever there is a better one, and stays.

    Attributes:
        metric: of the evaluation, under its name in metrics.jsonl.
        patience: evaluations in a row without a better value after which the run stops.
        min_delta: a value is better if it differs from the best one by more than this.
        mode: whether lower (min) or higher (max) values are better. auto: higher ones of an accuracy and of the margin
            and the chosen answers of preferences, lower ones of all others.

    Raises:
        ConfigError: a value that the config group `evaluation.early_stopping` does not take.

    Example:
        >>> jt.EarlyStopping("eval_f1", patience=5, mode="max")  # in callbacks=[...] of fit and run_config
        EarlyStopping(metric='eval_f1', patience=5, min_delta=0.0, mode='max')
    """

    metric: str = "eval_loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["auto", "min", "max"] = "auto"

    def __post_init__(self) -> None:
        what, takes = "EarlyStopping: min_delta", "a number"
        check_number(self.min_delta, what=what, takes=takes, write="min_delta=0.001")
        load_config({"evaluation": {"every": 1, "early_stopping": self.settings}}, origin="jaxtrain.EarlyStopping")

    @property
    def settings(self) -> dict[str, Any]:
        """The config group `evaluation.early_stopping` that says the same."""
        return {**asdict(self), "min_delta": float(self.min_delta)}


@dataclass(frozen=True)
class Verdict:
    """What the evaluations so far say.

    Attributes:
        is_over: whether the run is to stop.
        best_step: step of the best value, the earliest of equal ones; None: no value is a number.
        best: that value.
        last_is_best: whether it is the last one.
    """

    is_over: bool
    best_step: int | None
    best: float
    last_is_best: bool


def judge(evaluations: Mapping[int, float], rule: EarlyStoppingConfig) -> Verdict:
    """Whether a run stops, by its evaluations in the order of their steps.

    A value that is not finite is no better than any.

    Args:
        evaluations: step -> value of the metric.
        rule: which values are better, and how many that are not end the run.
    """
    sign = sign_of(rule)
    reference = best = math.inf
    best_step: int | None = None
    without = 0
    for step in sorted(evaluations):
        value = sign * evaluations[step]
        if not math.isfinite(value):
            value = math.inf
        if value < best:
            best, best_step = value, step
        if value < reference - (rule.min_delta if math.isfinite(reference) else 0.0):
            reference, without = value, 0
        else:
            without += 1
    last = max(evaluations, default=None)
    return Verdict(without >= rule.patience, best_step, sign * best, best_step is not None and best_step == last)


def sign_of(rule: EarlyStoppingConfig) -> float:
    """What values of the metric are multiplied by so that lower is better: 1, or -1 where higher ones are."""
    return -1.0 if is_higher_better(rule.metric, rule.mode) else 1.0


def recorded_evaluations(
    run_dir: Path, rule: EarlyStoppingConfig, *, every: int, last: int, ends: Collection[int]
) -> dict[int, float]:
    """The values of the metric that metrics.jsonl holds, of the evaluations that were due.

    Args:
        run_dir: directory of the run.
        rule: names the metric.
        every: steps between evaluations; earlier parts of the run may have had another number.
        last: the step that the run goes on from; rows of later ones do not count.
        ends: steps at which earlier parts of the run ended: their evaluations count only if `every` divides them, since
            a run that had gone on would not have evaluated there.

    Returns:
        Step -> value; NaN where it was not finite.
    """
    found = recorded_values(run_dir, rule.metric, last=last)
    return {step: value for step, value in found.items() if step % every == 0 or step not in ends}


def recorded_values(run_dir: Path, metric: str, *, last: int) -> dict[int, float]:
    """The values of a metric in metrics.jsonl up to the step `last`: step -> value, NaN where it was not finite."""
    found: dict[int, float] = {}
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # a kill in the middle of a line
            continue
        step = row.get("step") if isinstance(row, dict) else None
        if isinstance(step, int) and step <= last and metric in row:
            value = row[metric]
            found[step] = math.nan if value is None else float(value)
    return found
