"""Search hyperparameters of a config with Optuna: trials are runs of jaxtrain, and bad ones are stopped early.

    pip install optuna
    python scripts/optuna_sweep.py quickstart --trials 10 --directory runs/study [train.steps=200 ...]

Adapt `suggest` to what is searched. The study is a file, DIRECTORY/study.log: the script goes on with it, and several
processes may run it at once. Runs are in DIRECTORY/<number of the trial>; `jaxtrain report DIRECTORY` compares them.
"""

# Optuna is in no extra: whoever searches installs it.
# pyright: reportMissingImports=false
import argparse
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import jaxtrain as jt


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    """The settings of a trial."""
    return {
        "optimizer.learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "optimizer.weight_decay": trial.suggest_float("weight_decay", 0.0, 0.3),
    }


def run_trial(trial: optuna.Trial, config: str, overrides: list[str], directory: Path) -> float:
    """Train one trial; its held-out loss."""

    def look(moment: jt.Moment) -> Literal["stop"] | None:
        trial.report(moment.metrics["eval_loss"], moment.step)
        return "stop" if trial.should_prune() else None

    loaded = jt.load_config(config, overrides=overrides, keywords=suggest(trial))
    folder = directory / f"{trial.number:03d}"
    try:
        result = jt.run_config(loaded, run_dir=folder, callbacks=[jt.Callback(on_evaluation=look)])
    except jt.DivergedError:
        raise optuna.TrialPruned from None
    if result.step < loaded.config.train.steps:
        raise optuna.TrialPruned
    return result.metrics["eval_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--directory", type=Path, default=Path("runs/study"))
    arguments = parser.parse_intermixed_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name=arguments.config,
        storage=JournalStorage(JournalFileBackend(str(arguments.directory / "study.log"))),
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )
    study.optimize(
        lambda trial: run_trial(trial, arguments.config, arguments.overrides, arguments.directory),
        n_trials=arguments.trials,
    )
    print(f"best: {study.best_params} with held-out loss {study.best_value:.4g}, trial {study.best_trial.number:03d}")


if __name__ == "__main__":
    main()
