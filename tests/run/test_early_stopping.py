"""Early stopping and the best checkpoint: which evaluations are compared, also after a stop and a resume."""

import math
from pathlib import Path
from typing import Any

import optax
import pytest
from test_fit import X, Y, digests, fit, stop_after
from test_run_callbacks import kept, status
from training_runs import losses, rows

import jaxtrain as jt
from jaxtrain.run.callbacks import judge

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
        assert judge(evaluations, jt.EarlyStopping(patience=2, **settings)) == wanted, case


HIGHER = (
    "accuracy top_1 top_10 precision recall f1 macro_precision macro_recall macro_f1 margin chosen_reward chosen_score"
)
LOWER = "loss perplexity mse mae huber cross_entropy rejected_reward rejected_score"


def test_every_shipped_metric_has_a_direction_and_others_need_a_mode() -> None:
    for names, is_higher_better in ((HIGHER, True), (f"{LOWER} top_5_error validation_loss", False)):
        for name in names.split():
            assert jt.EarlyStopping(metric=f"eval_{name}").is_higher_better == is_higher_better, name
    for name in ("gain", "accuracy_drop", "inaccuracy", "expert_busiest"):
        with pytest.raises(jt.ConfigError, match=f"metric=eval_{name} .* not known; set mode=max or mode=min"):
            jt.EarlyStopping(metric=f"eval_{name}")
        assert jt.EarlyStopping(metric=f"eval_{name}", mode="max").is_higher_better


def test_the_best_f1_is_kept_and_named_in_the_report(tmp_path: Path) -> None:
    fit(
        tmp_path,
        task=jt.classification(metrics=["f1"]),
        steps=8,
        validation=(X[:48], Y[:48]),
        evaluation={"every": 2},
        checkpoint={"every": 2, "keep_last": 2, "keep_best": True},
        logging={"report": True, "tensorboard": False},
        callbacks=[jt.EarlyStopping("eval_macro_f1", patience=1)],
    )
    evaluated = {row["step"]: row["eval_macro_f1"] for row in rows(tmp_path) if "eval_macro_f1" in row}
    assert evaluated[4] > evaluated[2], "the example learns nothing"
    assert kept(tmp_path) == {6, 8}, "the first and worst is not kept"
    assert "best evaluation" in (tmp_path / "report.html").read_text()


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
    shown = "early stopped before step 20: eval_loss did not improve in 3 evaluations (lower is better), the best is"
    assert f"{shown} {evaluated[2]:.4g} at step 2" in capfd.readouterr().out
    with pytest.raises(jt.PreemptedError):
        overfit(half, callbacks=[jt.EarlyStopping(patience=3), stop_after(5)])
    assert overfit(half).step == 8
    assert (losses(half), status(half)) == (losses(whole), "early stopped")
    assert digests(half, 8) == digests(whole, 8)
    assert kept(half) == {2, 8}

    record, logged = (whole / "run.json").read_text(), rows(whole)
    again = overfit(whole)
    assert (
        "already stopped early at step 8: raise evaluation.early_stopping.patience to continue"
        in capfd.readouterr().err
    )
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
    other = dict(callbacks=[jt.EarlyStopping("eval_loss", patience=2)], validation=(X[:48], Y[:48]))
    with pytest.raises(jt.ConfigError, match="metric eval_accuracy -> eval_loss: evaluations before and after"):
        fit(tmp_path, optimizer=optax.adam(1e-2), steps=16, evaluation={"every": 2}, **other)
    with pytest.raises(jt.UserError, match="the code of the optimizer changed"):
        fit(tmp_path, optimizer=optax.adabelief(1e-2), steps=16, evaluation={"every": 2}, validation=(X[:48], Y[:48]))


def test_the_best_evaluation_is_known_after_a_resume_with_another_interval(tmp_path: Path) -> None:
    with pytest.raises(jt.PreemptedError):
        overfit(tmp_path, callbacks=[jt.EarlyStopping(patience=3), stop_after(5)])
    assert overfit(tmp_path, evaluation={"every": 3}).step == 9, "step 2 is the best, and 4, 6 and 9 are worse"


def test_losses_of_other_settings_are_not_compared(tmp_path: Path) -> None:
    config = {
        "task": "classification",
        "model": {"kind": "mlp", "hidden_dims": [4]},
        "data": {"kind": "digits"},
        "checkpoint": {"keep_best": True},
        "logging": {"tensorboard": False, "report": False},
    }
    jt.run_config(config, overrides={"train.steps": 1}, run_dir=tmp_path)
    other = {"train.steps": 2, "loss.label_smoothing": 0.3}
    with pytest.raises(jt.ConfigError, match=r"label_smoothing 0\.0 -> 0\.3: evaluations before and after"):
        jt.run_config(config, overrides=other, run_dir=tmp_path, resume="must")
