"""`scripts/optuna_sweep.py`: which trials it draws, which are pruned, and what becomes of one that a signal stopped.

Runs are replaced by functions of the test; where Optuna is not installed, nothing is tried.
"""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import jaxtrain as jt

optuna = pytest.importorskip("optuna", reason="needs the package optuna: pip install optuna")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "optuna_sweep.py"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that runs the script over a stand-in for `run_config`; gives its exit code and the runs it started."""
    spec = importlib.util.spec_from_file_location("optuna_sweep", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(train, *, trials=1, losses=(1.0,)):
        runs = []

        def run_config(loaded, *, run_dir, callbacks):
            settings = loaded.config.optimizer
            runs.append((run_dir.name, settings.learning_rate, settings.weight_decay))
            return train(callbacks[0].on_evaluation)

        def open_run(folder):
            assert folder.name == runs[-1][0]
            return SimpleNamespace(history={"eval_loss": np.array(losses)})

        monkeypatch.setattr(jt, "open_run", open_run)
        monkeypatch.setattr(jt, "run_config", run_config)
        words = ["quickstart", "--trials", str(trials), "--directory", str(tmp_path / "study"), "train.steps=12"]
        monkeypatch.setattr(sys, "argv", ["optuna_sweep.py", *words])
        return script.main(), runs

    return run


def early_stopped(look):
    ended = SimpleNamespace(step=6, metrics={"eval_loss": 1.0})
    look(ended)
    return ended


def stopped(look):
    raise jt.PreemptedError("stopped by SIGTERM after step 3; run again to go on")


def test_a_trial_is_scored_by_its_lowest_finite_loss(start, capsys):
    assert start(early_stopped, losses=(np.nan, 3.0, 0.5, 0.75, np.inf))[0] == 0
    assert "loss of 0.5:" in capsys.readouterr().out


def test_a_run_that_looks_bad_is_pruned(start, monkeypatch, capsys):
    monkeypatch.setattr(optuna.Trial, "should_prune", lambda trial: True)
    assert start(early_stopped)[0] == 1
    assert "trial 000 pruned" in capsys.readouterr().out


def test_a_run_that_a_signal_stopped_goes_on_at_the_next_start(start):
    code, first = start(stopped, trials=3)
    assert (code, len(first)) == (75, 1)
    code, second = start(stopped)
    assert (code, second) == (75, first)
    code, third = start(early_stopped, trials=2)
    assert code == 0
    assert third[0] == first[0]
    assert third[1][0] == "003"  # the number of the trial: two before it were starts of the first run
