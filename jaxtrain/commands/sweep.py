"""`jaxtrain sweep`: trains a config with every combination of some values, or with random ones. No jax here."""

import itertools
import json
import math
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxtrain.commands.children import JAXTRAIN, Signals, exit_code, how_ended, kill_child, start_child
from jaxtrain.commands.output import print_text
from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError, DivergedError, PreemptedError
from jaxtrain.metrics.format import format_duration
from jaxtrain.metrics.report.files import read_json
from jaxtrain.metrics.report.many import TRIAL_FILE, write_many
from jaxtrain.run.folder import run_folder
from jaxtrain.run.lock import RunLock
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.remarks import print_remark

# Another start would end in the same way; not so after a missing file or package, which may be there by then.
_FINAL = (0, DivergedError.exit_code)
_MOST_TRIALS = 1000


def run_sweep(
    config: str, words: Sequence[str], *, run_dir: str | None, num_trials: int | None, jobs: int, seed: int | None
) -> int:
    """Train a config once per trial, each in a process and a directory of its own, and compare the trials on a page.

    A trial that ended is not run again; one that was stopped, or lost its process, goes on.

    Args:
        config: a shipped name or a path.
        words: `key=value` for all trials, `key=v1,v2` or `key=low..high[:log]` for what differs between them.
        run_dir: directory of the sweep, whose trials are 000, 001 and so on; None: runs/<name>-sweep.
        num_trials: number of trials; None: all combinations.
        jobs: how many trials run at once.
        seed: draw the values at random with this seed; None: 0 where there are ranges, else all combinations.

    Returns:
        75 after a signal, 0 where a trial was done, else the exit code of the last trial.

    Raises:
        ConfigError: a setting is wrong, or the directory holds another sweep.
    """
    trials = [[f"{key}={value}" for key, value in trial.items()] for trial in draw_trials(words, num_trials, seed)]
    # Every mistake in a setting is reported before anything starts.
    loaded = [load_config(config, overrides=trial) for trial in trials]
    stores = [store for one in loaded if (store := one.config.checkpoint.directory) is not None]
    if len(set(stores)) < len(stores):
        raise ConfigError(f"checkpoint.directory={stores[0]} would be that of several trials; leave it out")
    folder = run_folder(run_dir, f"{loaded[0].name}-sweep")
    if (folder / "run.json").exists():
        raise ConfigError(f"{folder} is the directory of a run; use another --run-dir")
    folders = [folder / f"{number:03d}" for number in range(len(trials))]
    with RunLock(folder), Signals() as signals, ThreadPoolExecutor(jobs) as pool:
        for place, settings in zip(folders, trials, strict=True):
            _check_same(place, {"config": config, "settings": settings})
        codes = list(pool.map(lambda place, settings: _run(config, settings, place, signals), folders, trials))
    print_text(f"report: {write_many(folders, folder / 'report.html')}")
    return PreemptedError.exit_code if signals.asked.is_set() else 0 if 0 in codes else codes[-1]


def draw_trials(words: Sequence[str], num_trials: int | None, seed: int | None) -> list[dict[str, str]]:
    """Return the settings of each trial; those of trial i depend on the seed and i alone.

    Raises:
        ConfigError: a word cannot be read, or it is not said how many values of a range are drawn.
    """
    choices = {}
    for word in words:
        key, _, text = word.partition("=")
        # A list, mapping or quoted text of YAML is one value, whatever is in it.
        values = [text] if text.startswith(("[", "{", '"', "'")) else text.split(",")
        if not key or "" in values:
            raise ConfigError(f"cannot read {word!r}; write key=value, key=v1,v2 or key=low..high")
        choices[key] = _read_range(word, text) or values
    ranges = [key for key, found in choices.items() if not isinstance(found, list)]
    if num_trials is None and (ranges or seed is not None):
        raise ConfigError(f"values{f' of {ranges[0]}' if ranges else ''} are drawn; say how many: --trials 20")
    lists = [one for one in choices.values() if isinstance(one, list)]
    count = math.prod(map(len, lists)) if num_trials is None else num_trials
    if count > _MOST_TRIALS:
        raise ConfigError(f"{count} trials are too many, above {_MOST_TRIALS}; draw some: --trials 50 --random 0")
    if not ranges and seed is None:
        return [dict(zip(choices, one, strict=True)) for one in itertools.islice(itertools.product(*lists), count)]
    generators = [random.Random(f"{seed or 0}/{number}") for number in range(count)]
    return [{key: _draw(one, each) for key, one in choices.items()} for each in generators]


def _read_range(word: str, text: str) -> tuple[str, str, bool] | None:
    """The bounds of `low..high[:log]`; None where the text is no range."""
    bounds, _, scale = text.partition(":")
    low, _, high = bounds.partition("..")
    try:
        first, last = float(low), float(high)
    except ValueError:
        return None
    if scale not in ("", "log") or not -math.inf < first < last < math.inf or (scale and first <= 0):
        raise ConfigError(f"{word} is no range; write low..high, or low..high:log above 0, as in 1e-4..1e-2:log")
    return low, high, scale == "log"


def _draw(choice: list[str] | tuple[str, str, bool], generator: random.Random) -> str:
    if isinstance(choice, list):
        return generator.choice(choice)
    low, high, is_log = choice
    is_whole = low.lstrip("-").isdigit() and high.lstrip("-").isdigit()
    if is_whole and not is_log:
        return str(generator.randint(int(low), int(high)))
    first, last = float(low), float(high)
    value = math.exp(generator.uniform(math.log(first), math.log(last))) if is_log else generator.uniform(first, last)
    return str(round(value)) if is_whole else f"{value:.6g}"


def _check_same(folder: Path, trial: Mapping[str, object]) -> None:
    """Write what a trial is to its folder, or check that it is the one that the folder holds."""
    path = folder / TRIAL_FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, {**trial, "exit_code": None})
    elif (found := read_json(path)) != {**trial, "exit_code": found.get("exit_code")}:
        raise ConfigError(f"{folder} holds a trial of another sweep ({found.get('settings')}); use another --run-dir")


def _run(config: str, settings: Sequence[str], folder: Path, signals: Signals) -> int:
    """Train one trial and note how it ended, unless that is known; returns its exit code."""
    trial, shown = read_json(folder / TRIAL_FILE), f"{folder}: {' '.join(settings)}"
    code = trial.get("exit_code")
    if isinstance(code, int) and code in _FINAL:
        print_remark(f"{shown}: {how_ended(code)} before")
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
    print_remark(f"{shown}: {how_ended(code)} after {format_duration(time.monotonic() - began)}")
    return code
