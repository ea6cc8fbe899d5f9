"""`jaxtrain sweep`: trains a config with every combination of some values. No jax here."""

import argparse
import functools
import itertools
import json
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.commands.processes import JAXTRAIN, Signals, exit_code, how_ended, kill_child, start_child
from jaxtrain.commands.shared import print_text
from jaxtrain.config import load_config
from jaxtrain.config.secrets import redacted_words
from jaxtrain.errors import ConfigError, DivergedError, PreemptedError
from jaxtrain.metrics.format import format_duration
from jaxtrain.metrics.report.compare import TRIAL_FILE, write_comparison
from jaxtrain.metrics.report.run_files import read_json
from jaxtrain.run.directory import lock_run, run_folder
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.terminal import print_remark

# Another start would end in the same way; not so after a missing file or package, which may be there by then.
_FINAL = (0, DivergedError.exit_code)


@dataclass(frozen=True)
class Trial:
    """One training of a sweep, and the folder of its run."""

    config: str
    settings: list[str]
    folder: Path

    def record(self, exit_code: int | None) -> dict[str, object]:
        """Return what the file of the trial holds; an exit code of None: it has not ended."""
        return {"config": self.config, "settings": redacted_words(self.settings), "exit_code": exit_code}


def run(arguments: argparse.Namespace) -> int:
    """Train a config once per trial, and compare the trials on a page.

    A trial that ended is not run again; one that was stopped, or lost its process, resumes.

    Returns:
        75 after a signal, 0 if a trial was done, else the exit code of the last trial.

    Raises:
        ConfigError: a setting is wrong, or the directory holds another sweep.
    """
    config = arguments.config
    combinations = all_trials(arguments.overrides)
    # Every mistake in a setting is reported before anything starts.
    stores = set()
    for settings in combinations:
        loaded = load_config(config, overrides=settings)
        store = loaded.config.checkpoint.directory
        if store is not None and store in stores:
            raise ConfigError(f"checkpoint.directory={store} would be shared by several trials; leave it out")
        stores.add(store)
    folder = run_folder(arguments.run_dir, f"{loaded.name}-sweep")
    trials = [Trial(config, settings, folder / f"{number:03d}") for number, settings in enumerate(combinations)]
    with lock_run(folder), Signals() as signals, ThreadPoolExecutor(arguments.jobs) as pool:
        for trial in trials:
            _claim_folder(trial)
        codes = list(pool.map(functools.partial(_train, signals), trials))
    page = write_comparison([trial.folder for trial in trials], folder / "report.html")
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
        key, equals, text = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"cannot read {word!r}; write key=value or key=v1,v2")
        if key in choices:
            raise ConfigError(f"{key} is given twice; write it once, as in {key}=v1,v2")
        choices[key] = [f"{key}={value}" for value in _split(text)]
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


def _claim_folder(trial: Trial) -> None:
    """Write what a trial is to its folder, or check that it is the one in the folder."""
    path = trial.folder / TRIAL_FILE
    if not path.exists():
        trial.folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, trial.record(None))
        return
    recorded = read_json(path)
    settings = recorded.get("settings")
    if recorded != trial.record(recorded.get("exit_code")):
        raise ConfigError(f"{trial.folder} holds a trial of another sweep ({settings}); use another --run-dir")


def _train(signals: Signals, trial: Trial) -> int:
    """Train one trial and note how it ended, unless that is known; return its exit code."""
    folder = trial.folder
    path = folder / TRIAL_FILE
    settings = " ".join(trial.settings)
    label = f"{folder}: {settings}"
    code = read_json(path).get("exit_code")
    if code in _FINAL:
        print_remark(f"{label}: {how_ended(code)} before")
        return code
    if signals.asked.is_set():
        return PreemptedError.exit_code
    began = time.monotonic()
    write_json_atomic(path, trial.record(None))
    # Quoted, because "a: b" alone is a mapping of YAML.
    name = json.dumps(f"{folder.resolve().parent.name}-{folder.name}")
    command = [*JAXTRAIN, "train", trial.config, f"name={name}", *trial.settings]
    command += ["--run-dir", str(folder)]
    child = start_child(command, environment={}, quiet=True)
    signals.add(child)
    try:
        assert child.stderr is not None  # since it is quiet
        with child.stderr as lines, (folder / "trial.log").open("a", encoding="utf-8") as log:
            shutil.copyfileobj(lines, log)
        code = exit_code(child.wait())
    finally:
        kill_child(child)
        signals.children.remove(child)
    write_json_atomic(path, trial.record(code))
    duration = format_duration(time.monotonic() - began)
    print_remark(f"{label}: {how_ended(code)} after {duration}")
    return code
