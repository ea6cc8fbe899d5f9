"""`jaxtrain sweep`: trains a config with every combination of some values. No jax here."""

import argparse
import itertools
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxtrain.commands.processes import JAXTRAIN, Signals, exit_code, how_ended, kill_child, start_child
from jaxtrain.commands.shared import print_text
from jaxtrain.config import load_config
from jaxtrain.config.secrets import redacted_words
from jaxtrain.errors import ConfigError, DivergedError, PreemptedError
from jaxtrain.metrics.format import format_duration
from jaxtrain.metrics.report.compare import TRIAL_FILE, write_comparison
from jaxtrain.metrics.report.run_files import read_json
from jaxtrain.run.directory import RunLock, run_folder
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
    configs = [load_config(config, overrides=trial) for trial in trials]
    store = configs[0].config.checkpoint.directory
    if store is not None and len(trials) > 1 and configs[1].config.checkpoint.directory == store:
        raise ConfigError(f"checkpoint.directory={store} would be shared by several trials; leave it out")
    folder = run_folder(arguments.run_dir, f"{configs[0].name}-sweep")
    folders = [folder / f"{number:03d}" for number in range(len(trials))]
    with RunLock(folder), Signals() as signals, ThreadPoolExecutor(arguments.jobs) as pool:
        for trial_folder, settings in zip(folders, trials, strict=True):
            _check_same(trial_folder, {"config": config, "settings": redacted_words(settings)})
        codes = list(pool.map(lambda path, settings: _train(config, settings, path, signals), folders, trials))
    print_text(f"report: {write_comparison(folders, folder / 'report.html')}")
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
    return [text[value.start_mark.index - 1 : value.end_mark.index - 1] for value in node.value] or [text]


def _check_same(folder: Path, trial: Mapping[str, object]) -> None:
    """Write the description of a trial to its folder, or check that it is the one in the folder."""
    path = folder / TRIAL_FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, {**trial, "exit_code": None})
        return
    recorded = read_json(path)
    if recorded != {**trial, "exit_code": recorded.get("exit_code")}:
        settings = recorded.get("settings")
        raise ConfigError(f"{folder} holds a trial of another sweep ({settings}); use another --run-dir")


def _train(config: str, settings: Sequence[str], folder: Path, signals: Signals) -> int:
    """Train one trial and note how it ended, unless that is known; return its exit code."""
    trial = read_json(folder / TRIAL_FILE)
    label = f"{folder}: {' '.join(settings)}"
    code = trial.get("exit_code")
    if code in _FINAL:
        print_remark(f"{label}: {how_ended(code)} before")
        return code
    if signals.asked.is_set():
        return PreemptedError.exit_code
    began = time.monotonic()
    name = json.dumps(f"{folder.resolve().parent.name}-{folder.name}")  # quoted: "a: b" alone is a mapping of YAML
    words = ["train", config, f"name={name}", *settings, "--run-dir", str(folder)]
    write_json_atomic(folder / TRIAL_FILE, {**trial, "exit_code": None})
    child = start_child([*JAXTRAIN, *words], environment={}, shown=False)
    signals.add(child)
    try:
        assert child.stderr is not None  # since it is not shown
        with child.stderr as lines, (folder / "trial.log").open("a", encoding="utf-8") as log:
            shutil.copyfileobj(lines, log)
        code = exit_code(child.wait())
    finally:
        kill_child(child)
        signals.children.remove(child)
    write_json_atomic(folder / TRIAL_FILE, {**trial, "exit_code": code})
    print_remark(f"{label}: {how_ended(code)} after {format_duration(time.monotonic() - began)}")
    return code
