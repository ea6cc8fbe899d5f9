"""Early stopping and the best checkpoint: which evaluations are compared, also after a stop and a resume."""

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from test_fit import X, Y, digests, fit, stop_after
from test_run_callbacks import DIGITS, kept, status
from training_runs import losses, rows

import jaxtrain as jt
from jaxtrain.cli import main
from jaxtrain.config.early_stopping import EarlyStoppingConfig, is_higher_better
from jaxtrain.metrics.report.files import read_files
from jaxtrain.run.early_stopping import judge, recorded_evaluations

VERDICTS = {
    "nothing yet": ({}, {}, (False, None)),
    "better every time": ({1: 3.0, 2: 2.0, 3: 1.0}, {}, (False, 3)),
    "worse twice": ({1: 1.0, 2: 2.0, 3: 3.0}, {}, (True, 1)),
    "worse once": ({1: 1.0, 2: 2.0}, {}, (False, 1)),
    "equal is no better": ({1: 1.0, 2: 1.0, 3: 1.0}, {}, (True, 1)),
    "better in between": ({1: 2.0, 2: 3.0, 3: 1.0, 4: 2.0}, {}, (False, 3)),
    "better by too little": ({1: 1.0, 2: 0.95, 3: 0.91}, {"min_delta": 0.1}, (True, 3)),
    "better by enough in two": ({1: 1.0, 2: 0.95, 3: 0.85}, {"min_delta": 0.1}, (False, 3)),
    "higher is better": ({1: 0.1, 2: 0.2, 3: 0.3}, {"mode": "max"}, (False, 3)),
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


@pytest.mark.parametrize("case", VERDICTS)
def test_verdict(case: str) -> None:
    evaluations, settings, wanted = VERDICTS[case]
    verdict = judge(evaluations, EarlyStoppingConfig(patience=2, **settings))
    assert (verdict.is_over, verdict.best_step) == wanted


BETTER = {
    "eval_loss": "lower",
    "eval_perplexity": "lower",
    "eval_spread": "lower",
    "eval_inaccuracy": "lower",
    "eval_accuracy": "higher",
    "eval_top5Accuracy_0": "higher",
    "eval_margin": "higher",
    "eval_chosen_reward": "higher",
    "eval_rejected_reward": "lower",
}


@pytest.mark.parametrize("metric", BETTER)
def test_which_values_are_better_follows_from_the_metric(metric: str) -> None:
    found = {mode: is_higher_better(metric, mode) for mode in (None, "auto", "min", "max")}
    is_higher = BETTER[metric] == "higher"
    assert found == {None: is_higher, "auto": is_higher, "min": False, "max": True}


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


EVALUATED = {"no rows": ({}, True), "rows": ({"validation": 0.25}, False)}


@pytest.mark.parametrize("case", ["no rows", pytest.param("rows", marks=pytest.mark.long)])
def test_an_interval_of_evaluations_without_rows_is_remarked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    given, is_remarked = EVALUATED[case]
    fit(tmp_path, steps=1, evaluation={"every": 2}, **given)
    shown = capfd.readouterr().err
    assert ("evaluation.every=2 (jaxtrain.fit) has no effect: the data has no held-out rows" in shown) == is_remarked


ENDS = {
    "evaluated every 2, then every 5": (5, {7}, [2, 4, 6]),
    "every 7": (7, {7}, [2, 4, 6, 7]),
    "ended twice": (5, {4, 7}, [2, 6]),
}


@pytest.mark.parametrize("case", ENDS)
def test_evaluations_count_whatever_every_was(tmp_path: Path, case: str) -> None:
    every, ends, wanted = ENDS[case]
    lines = [json.dumps({"step": step, "eval_loss": 1.0}) for step in (2, 4, 6, 7)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
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
    assert overfit(whole, callbacks=[jt.EarlyStopping(patience=5)]).step == 12


def test_a_run_whose_rule_fired_on_its_last_step_is_recorded_as_stopped_where_it_is_made_longer(tmp_path: Path) -> None:
    overfit(tmp_path, steps=8)
    before = json.loads((tmp_path / "run.json").read_text())
    assert (before["status"], before["config"]["train"]["steps"]) == ("done", 8)
    assert overfit(tmp_path, steps=20).step == 8
    after = json.loads((tmp_path / "run.json").read_text())
    assert (after.pop("status"), after["config"]["train"].pop("steps")) == ("early stopped", 20)
    del before["status"], before["config"]["train"]["steps"]
    assert after == before, "all else stays"
    assert overfit(tmp_path, steps=20).step == 8
    assert overfit(tmp_path, steps=20, callbacks=[jt.EarlyStopping(patience=5)]).step == 12


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
def test_another_interval_between_evaluations_forgets_none(tmp_path: Path) -> None:
    """Step 2 is the best; 4 and 6 are worse, so that step 10 is the third without a better value."""
    assert overfit(tmp_path, steps=7, callbacks=[jt.EarlyStopping(patience=9)]).step == 7
    assert overfit(tmp_path, evaluation={"every": 5}).step == 10


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


CHANGED_STOPPING = {
    "added": ([], [jt.EarlyStopping(patience=50)], 2),
    "removed": ([jt.EarlyStopping("eval_accuracy", patience=50, mode="max")], [], 2),
    "of another metric": (
        [jt.EarlyStopping("eval_accuracy", patience=50, mode="max")],
        [jt.EarlyStopping(patience=50)],
        2,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CHANGED_STOPPING)
def test_the_best_is_kept_where_early_stopping_changes(tmp_path: Path, case: str) -> None:
    before, after, best = CHANGED_STOPPING[case]
    settings: dict[str, Any] = {"checkpoint": {"every": 2, "keep_last": 9, "keep_best": True}}
    overfit(tmp_path, steps=6, callbacks=before, **settings)
    settings["checkpoint"]["keep_last"] = 1
    overfit(tmp_path, steps=8, callbacks=after, **settings)
    assert kept(tmp_path) == {best, 8}


@pytest.mark.long
def test_the_best_by_another_metric_is_kept(tmp_path: Path) -> None:
    """A metric that only rises, of which lower is better, while the loss falls."""

    def loss(outputs: Any, batch: Any) -> Any:
        value, weight, _ = jt.classification().loss(outputs, batch)
        return value, weight, {"spread": (jax.numpy.sum(outputs**2), jax.numpy.float32(outputs.size))}

    fit(
        tmp_path,
        task=jt.Task("spread", loss, reads_weights=True),
        steps=12,
        validation=(X[:48], Y[:48]),
        evaluation={"every": 2},
        checkpoint={"every": None, "keep_last": 1, "keep_best": True},
        callbacks=[jt.EarlyStopping("eval_spread", patience=2)],
    )
    evaluated = [row for row in rows(tmp_path) if "eval_loss" in row]
    assert [row["eval_spread"] for row in evaluated] == sorted(row["eval_spread"] for row in evaluated)
    assert [row["eval_loss"] for row in evaluated] == sorted((row["eval_loss"] for row in evaluated), reverse=True)
    assert kept(tmp_path) == {2, 6}


@pytest.mark.long
def test_early_stopping_from_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "digits.yaml"
    config.write_text(json.dumps({**DIGITS, "optimizer": {"kind": "sgd", "learning_rate": 1e-12}}))
    run = tmp_path / "run"
    words = ["evaluation.early_stopping.patience=2", "evaluation.early_stopping.min_delta=0.1"]
    assert main(["train", str(config), "--run-dir", str(run), *words]) == 0
    assert (status(run), max(losses(run))) == ("early stopped", 3)
    saved = json.loads((run / "run.json").read_text())["config"]["evaluation"]["early_stopping"]
    assert saved == {"metric": "eval_loss", "patience": 2, "min_delta": 0.1, "mode": "auto"}
