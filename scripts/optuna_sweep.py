"""Search hyperparameters of a config with Optuna: trials are runs of jaxtrain, and bad ones are stopped early.

    pip install optuna
    python scripts/optuna_sweep.py quickstart --trials 10 --directory runs/study [train.steps=200 ...]

Adapt `suggest` to what is searched. The study is a file, DIRECTORY/study.log: the script goes on with it, and several
processes may run it at once. Runs are in DIRECTORY/<number of the trial>; `jaxtrain report DIRECTORY` compares them.
After a signal the run is saved and the exit code is 75; the next start first goes on with that run.
"""

# Optuna is in no extra for users: whoever searches installs it.
# pyright: reportMissingImports=false
import argparse
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import jaxtrain as jt

# The attribute of a trial that names its run: one that goes on with the run of another has a number of its own.
_FOLDER = "folder"


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    """The settings of a trial."""
    return {
        "optimizer.learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "optimizer.weight_decay": trial.suggest_float("weight_decay", 0.0, 0.3),
    }


def run_trial(trial: optuna.Trial, config: str, overrides: list[str], directory: Path) -> float:
    """Train one trial; its lowest held-out loss, by which `jaxtrain report` ranks runs too.

    Early stopping ends a run after evaluations that are no better than its best, so the last one says little of it.

    Raises:
        TrialPruned: the trial looked bad or diverged.
    """
    is_pruned = False

    def look(moment: jt.Moment) -> Literal["stop"] | None:
        nonlocal is_pruned
        trial.report(moment.metrics["eval_loss"], moment.step)
        is_pruned = is_pruned or trial.should_prune()
        return "stop" if is_pruned else None

    if _FOLDER not in trial.user_attrs:
        trial.set_user_attr(_FOLDER, f"{trial.number:03d}")
    loaded = jt.load_config(config, overrides=overrides, keywords=suggest(trial))
    folder = directory / trial.user_attrs[_FOLDER]
    try:
        result = jt.run_config(loaded, run_dir=folder, callbacks=[jt.Callback(on_evaluation=look)])
    except jt.DivergedError:
        raise optuna.TrialPruned from None
    # Neither a run that the config's early stopping ended nor one that had done its last step was cut short here.
    if is_pruned and result.step < loaded.config.train.steps:
        raise optuna.TrialPruned
    # Of the file, because a run that goes on had evaluations before this start.
    losses = jt.open_run(folder).history["eval_loss"]
    losses = losses[np.isfinite(losses)]
    if not len(losses):
        raise optuna.TrialPruned
    return float(losses.min())


def search(study: optuna.Study, num_trials: int, config: str, overrides: list[str], directory: Path) -> None:
    """Train trials, one after another.

    Raises:
        UserError: a run cannot be trained, or was stopped by a signal; the next start goes on with the latter.
    """
    for _ in range(num_trials):
        trial = study.ask()
        try:
            loss = run_trial(trial, config, overrides, directory)
        except optuna.TrialPruned:
            study.tell(trial, state=TrialState.PRUNED)
            print(f"trial {trial.number:03d} pruned: {trial.params}", flush=True)
        except BaseException as error:
            study.tell(trial, state=TrialState.FAIL)
            if isinstance(error, jt.PreemptedError):
                study.enqueue_trial(trial.params, user_attrs={_FOLDER: trial.user_attrs[_FOLDER]})
            raise
        else:
            study.tell(trial, loss)
            print(f"trial {trial.number:03d} has a best held-out loss of {loss:.4g}: {trial.params}", flush=True)


def main() -> int:
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
        # Without a seed: with one, every start and every process would draw the same trials again.
        sampler=optuna.samplers.TPESampler(),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )
    try:
        search(study, arguments.trials, arguments.config, arguments.overrides, arguments.directory)
    except jt.UserError as error:
        print(f"optuna_sweep: {error}", file=sys.stderr)
        return error.exit_code
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        print("optuna_sweep: no trial is complete: all were pruned, failed or diverged; see the runs", file=sys.stderr)
        return 1
    best = study.best_trial
    folder = arguments.directory / best.user_attrs.get(_FOLDER, f"{best.number:03d}")
    print(f"best: {best.params} with best held-out loss {best.value:.4g}, run {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
