"""Early stopping and the best checkpoint: which evaluations are compared, also after a stop and a resume."""

import json
import math
import re
from pathlib import Path
from typing import Any

import optax
import pytest
from test_fit import X, Y, digests, fit, stop_after
from test_run_callbacks import kept, status
from training_runs import losses, rows

import jaxtrain as jt
from jaxtrain.config.early_stopping import EarlyStoppingConfig, is_higher_better
from jaxtrain.metrics.report.run_files import read_files
from jaxtrain.run.early_stopping import judge, recorded_evaluations

VERDICTS = {
    "nothing yet": ({}, {}, (False, None)),
    "worse twice": ({1: 1.0, 2: 2.0, 3: 3.0}, {}, (True, 1)),
    "equal is no better": ({1: 1.0, 2: 1.0, 3: 1.0}, {}, (True, 1)),
    "better by too little": ({1: 1.0, 2: 0.95, 3: 0.91}, {"min_delta": 0.1}, (True, 3)),
    "better by enough in two": ({1: 1.0, 2: 0.95, 3: 0.85}, {"min_delta": 0.1}, (False, 3)),
    "lower is worse": ({1: 0.3, 2: 0.2, 3: 0.1}, {"mode": "max"}, (True, 1)),
    "an accuracy that rises": ({1: 0.1, 2: 0.2, 3: 0.3}, {"metric": "eval_accuracy"}, (False, 3)),
    "an accuracy of which lower is better": (
        {1: 0.1, 2: 0.2, 3: 0.3},
        {"metric": "eval_accuracy", "mode": "min"},
        (True, 1),
    ),
    "not finite": ({1: 1.0, 2: math.nan, 3: math.inf}, {}, (True, 1)),
    "never finite": ({1: math.nan, 2: math.nan}, {}, (True, None)),
    "in the order of steps": ({3: 3.0, 1: 1.0, 2: 2.0}, {}, (True, 1)),
}


def test_verdict() -> None:
    for case, (evaluations, settings, wanted) in VERDICTS.items():
        verdict = judge(evaluations, EarlyStoppingConfig(patience=2, **settings))
        assert (verdict.is_over, verdict.best_step) == wanted, case


BETTER = {
    "eval_loss": "lower",
    "eval_inaccuracy": "lower",
    "eval_accuracy": "higher",
    "eval_top5Accuracy_0": "higher",
    "eval_margin": "higher",
    "eval_rejected_reward": "lower",
}


def test_which_values_are_better_follows_from_the_metric() -> None:
    for metric, better in BETTER.items():
        found = {mode: is_higher_better(metric, mode) for mode in (None, "auto", "min", "max")}
        is_higher = better == "higher"
        assert found == {None: is_higher, "auto": is_higher, "min": False, "max": True}, metric


def test_evaluations_are_read_from_what_a_kill_left(tmp_path: Path) -> None:
    lines = [
        '{"step": 2, "loss": 1.0}',
        '{"step": 2, "eval_loss": 0.1234567890123}',
        '{"step": 3, "eval_loss": 0.5}',  # at the end of a shorter run
        '{"step": 4, "eval_loss": null}',
        '{"step": 8, "eval_loss": 0.2}',
        '{"step": 6, "eval_lo',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = recorded_evaluations(tmp_path, EarlyStoppingConfig(), every=2, last=6, ends={3})
    assert found[2] == 0.1234567890123
    assert math.isnan(found.pop(4))
    assert list(found) == [2]
    assert recorded_evaluations(tmp_path / "none", EarlyStoppingConfig(), every=2, last=6, ends=()) == {}


ENDS = {
    "evaluated every 2, then every 5": (5, {7}, [2, 4, 6]),
    "every 7": (7, {7}, [2, 4, 6, 7]),
    "ended twice": (5, {4, 7}, [2, 6]),
}


def test_evaluations_count_whatever_every_was(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "eval_loss": 1.0}) for step in (2, 4, 6, 7)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    for every, ends, wanted in ENDS.values():
        assert list(recorded_evaluations(tmp_path, EarlyStoppingConfig(), every=every, last=7, ends=ends)) == wanted


def overfit(run_dir: Path, **changes: Any) -> jt.Result:
    """Evaluated on other classes than it learns, a model only gets worse: the first evaluation stays the best."""
    arguments: dict[str, Any] = dict(
        optimizer=optax.adam(3e-2),
        steps=20,
        validation=(X[:48], (Y[:48] + 1) % 8),
        evaluation={"every": 2},
        checkpoint={"every": 4, "keep_last": 1, "keep_best": True},
        callbacks=[jt.EarlyStopping(patience=3)],
    )
    return fit(run_dir, **(arguments | changes))


def test_early_stopping_survives_a_stop_and_a_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    result = overfit(whole)
    evaluated = {row["step"]: row["eval_loss"] for row in rows(whole) if "eval_loss" in row}
    best = min(evaluated, key=lambda step: evaluated[step])
    assert best == 2, "the example does not overfit"
    assert (result.step, status(whole)) == (8, "early stopped")
    assert kept(whole) == {2, 8}, "the best and the last"
    shown = "early stopped before step 20: eval_loss got no better in 3 evaluations (lower is better), the best is"
    assert f"{shown} {evaluated[2]:.4g} at step 2" in capfd.readouterr().out
    with pytest.raises(jt.PreemptedError):
        overfit(half, callbacks=[jt.EarlyStopping(patience=3), stop_after(5)])
    assert overfit(half).step == 8
    assert (losses(half), status(half)) == (losses(whole), "early stopped")
    assert digests(half, 8) == digests(whole, 8)
    assert kept(half) == {2, 8}

    record, logged = (whole / "run.json").read_text(), rows(whole)
    again = overfit(whole)
    assert "already stopped early at step 8: raise evaluation.early_stopping.patience" in capfd.readouterr().err
    assert (again.step, again.metrics["eval_loss"]) == (8, result.metrics["eval_loss"])
    assert (whole / "run.json").read_text() == record, "a run that ended keeps its record"
    assert rows(whole) == logged


def test_an_accuracy_that_rises_stops_no_run_and_keeps_its_highest(tmp_path: Path) -> None:
    fit(
        tmp_path,
        optimizer=optax.adam(1e-2),
        steps=8,
        validation=(X[:48], Y[:48]),
        evaluation={"every": 2},
        checkpoint={"every": None, "keep_last": 1, "keep_best": True},
        callbacks=[jt.EarlyStopping("eval_accuracy", patience=2)],
    )
    evaluated = {row["step"]: row["eval_accuracy"] for row in rows(tmp_path) if "eval_accuracy" in row}
    assert evaluated[8] > evaluated[2], "the example learns nothing"
    assert kept(tmp_path) == {max(evaluated, key=lambda step: evaluated[step]), 8}


@pytest.mark.long
def test_evaluations_of_other_rows_are_not_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first evaluation of all rows is the best; then those of one batch only get worse from step 6 on."""
    overfit(tmp_path, steps=4)
    one = {"every": 2, "max_batches": 1}
    with pytest.raises(jt.PreemptedError):
        overfit(tmp_path, evaluation=one, callbacks=[jt.EarlyStopping(patience=3), stop_after(9)])
    assert "evaluations are of 16 held-out rows from here on, and were of 48 before: early stopping and" in (
        capfd.readouterr().err
    )
    assert overfit(tmp_path, evaluation=one).step == 12
    shown = capfd.readouterr()
    assert "held-out rows from here on" not in shown.err
    assert re.search(
        r"eval_loss got no better in 3 evaluations \(lower is better\), the best is \S+ at step 6", shown.out
    )
    assert kept(tmp_path) == {6, 12}
    assert json.loads((tmp_path / "run.json").read_text())["evaluated_rows"] == {
        "count": 16,
        "after": 4,
    }
    best = read_files(tmp_path).best()
    assert best is not None
    assert best[0] == 6
