"""`jaxtrain sweep`: trains a config with every combination of some values. No jax here."""

import argparse
import functools
import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxtrain.commands.processes import JAXTRAIN, Signals, exit_code, how_ended, start_child
from jaxtrain.commands.shared import print_text
from jaxtrain.config import load_config
from jaxtrain.config.secrets import redacted_words
from jaxtrain.errors import ConfigError, DivergedError, PreemptedError
from jaxtrain.metrics.report.compare import TRIAL_FILE, write_comparison
from jaxtrain.metrics.report.run_files import read_json
from jaxtrain.run.directory import lock_run, run_folder
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.terminal import print_remark

# Another start would end in the same way; not so after a missing file or package, which may be there by then.
_FINAL = (0, DivergedError.exit_code)


def run(arguments: argparse.Namespace) -> int:
    """Train a config once per trial, and compare the trials on a page.

    A trial that ended is not run again; one that was stopped, or lost its process, resumes.

    Returns:
        75 after a signal, 0 if a trial was done, else the exit code of the last trial.

    Raises:
        ConfigError: a setting is wrong, or the directory holds another sweep.
    """
    config = arguments.config
    trials = all_trials(arguments.overrides)
    # Every mistake in a setting is reported before anything starts.
    for settings in trials:
        loaded = load_config(config, overrides=settings)
    folder = run_folder(arguments.run_dir, f"{loaded.name}-sweep")
    folders = [folder / f"{number:03d}" for number in range(len(trials))]
    with lock_run(folder), Signals() as signals, ThreadPoolExecutor(arguments.jobs) as pool:
        for trial_folder, settings in zip(folders, trials, strict=True):
            _claim_folder(trial_folder, config, settings)
        train = functools.partial(_train, signals, config)
        codes = list(pool.map(train, folders, trials))
    page = write_comparison(folders, folder / "report.html")
    print_text(f"report: {page}")
    if signals.asked.is_set():
        return PreemptedError.exit_code
    return 0 if 0 in codes else codes[-1]


def all_trials(words: Sequence[str]) -> list[list[str]]:
    """Return the settings of each trial: every combination of the values of `key=v1,v2`, in the order of the words.

    Raises:
        ConfigError: a word cannot be read, or a key is given twice.
    """
    choices: dict[str, list[str]] = {}
    for word in words:
        key, _, text = word.partition("=")
        if not text:
            raise ConfigError(f"cannot read {word!r}; write key=value or key=v1,v2")
        if key in choices:
            raise ConfigError(f"{key} is given twice; write it once, as in {key}=v1,v2")
        choices[key] = []
        for value in _split(text):
            choices[key].append(f"{key}={value}")
    return [list(trial) for trial in itertools.product(*choices.values())]


def _split(text: str) -> list[str]:
    """Split values at commas; a list, a mapping or a quoted text of YAML stays together."""
    import yaml

    try:
        node = yaml.compose(f"[{text}]", yaml.SafeLoader)
    except yaml.YAMLError:
        return [text]  # the error of the value names all of it
    values = []
    for item in node.value:
        start = item.start_mark.index - 1
        stop = item.end_mark.index - 1
        values.append(text[start:stop])
    return values or [text]


def _claim_folder(folder: Path, config: str, settings: list[str]) -> None:
    """Write what a trial is to its folder, or check that it is the one in the folder."""
    path = folder / TRIAL_FILE
    recorded = read_json(path)
    trial = {
        "config": config,
        "settings": redacted_words(settings),
        "exit_code": recorded.get("exit_code"),
    }
    if not recorded:
        folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, trial)
    elif recorded != trial:
        raise ConfigError(f"{folder} holds a trial of another sweep; use another --run-dir")


def _train(signals: Signals, config: str, folder: Path, settings: Sequence[str]) -> int:
    """Train one trial and note how it ended, unless that is known; return its exit code."""
    path = folder / TRIAL_FILE
    trial = read_json(path)
    label = f"{folder}: {' '.join(settings)}"
    code = trial["exit_code"]
    if code in _FINAL:
        print_remark(f"{label}: {how_ended(code)} before")
        return code
    if signals.asked.is_set():
        return PreemptedError.exit_code
    write_json_atomic(path, {**trial, "exit_code": None})
    # Quoted, because "a: b" alone is a mapping of YAML.
    sweep_name = folder.resolve().parent.name
    name = json.dumps(f"{sweep_name}-{folder.name}")
    command = [*JAXTRAIN, "train", config, f"name={name}", *settings]
    command += ["--run-dir", str(folder)]
    with (folder / "trial.log").open("a", encoding="utf-8") as log:
        child = start_child(command, environment={}, stderr=log)
        signals.add(child)
        status = child.wait()
    signals.children.remove(child)
    code = exit_code(status)
    write_json_atomic(path, {**trial, "exit_code": code})
    print_remark(f"{label}: {how_ended(code)}")
    return code
