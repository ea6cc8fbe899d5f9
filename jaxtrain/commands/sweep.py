"""`jaxtrain sweep`: trains a config with every combination of some values, or with random ones. No jax here."""

import argparse
import itertools
import json
import math
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxtrain.commands.launch import JAXTRAIN, Signals, exit_code, how_ended, kill_child, start_child
from jaxtrain.commands.shared import print_text
from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError, DivergedError, PreemptedError
from jaxtrain.metrics.format import format_duration
from jaxtrain.metrics.report.compare import TRIAL_FILE, write_comparison
from jaxtrain.metrics.report.run_files import read_json
from jaxtrain.run.directory import RunLock, run_folder
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.terminal import print_remark

# Another start would end in the same way; not so after a missing file or package, which may be there by then.
_FINAL = (0, DivergedError.exit_code)


def sweep(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain sweep`: trains a config once per trial, and compares the trials on a page.

    A trial that ended is not run again; one that was stopped, or lost its process, goes on.

    Returns:
        75 after a signal, 0 where a trial was done, else the exit code of the last trial.

    Raises:
        ConfigError: a setting is wrong, or the directory holds another sweep.
    """
    config = arguments.config
    drawn = draw_trials(arguments.overrides, arguments.trials, arguments.random)
    trials = [[f"{key}={value}" for key, value in trial.items()] for trial in drawn]
    # Every mistake in a setting is reported before anything starts.
    loaded = [load_config(config, overrides=trial) for trial in trials]
    stores = [store for one in loaded if (store := one.config.checkpoint.directory) is not None]
    if len(set(stores)) < len(stores):
        raise ConfigError(f"checkpoint.directory={stores[0]} would be shared by several trials; leave it out")
    folder = run_folder(arguments.run_dir, f"{loaded[0].name}-sweep")
    folders = [folder / f"{number:03d}" for number in range(len(trials))]
    with RunLock(folder), Signals() as signals, ThreadPoolExecutor(arguments.jobs) as pool:
        for place, settings in zip(folders, trials, strict=True):
            _check_same(place, {"config": config, "settings": settings})
        codes = list(pool.map(lambda place, settings: _run(config, settings, place, signals), folders, trials))
    print_text(f"report: {write_comparison(folders, folder / 'report.html')}")
    return PreemptedError.exit_code if signals.asked.is_set() else 0 if 0 in codes else codes[-1]


def draw_trials(words: Sequence[str], num_trials: int | None, seed: int | None) -> list[dict[str, str]]:
    """The settings of each trial; those of trial i depend on the seed and i alone.

    Args:
        words: `key=value` for all trials, `key=v1,v2` or `key=low..high[:log]` for what differs between them.
        num_trials: number of trials; None: all combinations.
        seed: draw the values at random with this seed; None: 0 where there are ranges, else all combinations.

    Raises:
        ConfigError: a word cannot be read, or it is not said how many values of a range are drawn.
    """
    choices: dict[str, list[str] | tuple[str, str, bool]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"cannot read {word!r}; write key=value, key=v1,v2 or key=low..high")
        if key in choices:
            raise ConfigError(f"{key} is given twice; write it once, as in {key}=v1,v2")
        choices[key] = _read_range(word, text) or _split(text)
    lists = [one for one in choices.values() if isinstance(one, list)]
    is_grid = seed is None and len(lists) == len(choices)
    if num_trials is None and not is_grid:
        raise ConfigError("values are random; set their number: --trials 20")
    if is_grid:
        return [dict(zip(choices, one, strict=True)) for one in itertools.product(*lists)][:num_trials]
    generators = [random.Random(f"{seed or 0}/{index}") for index in range(num_trials or 0)]
    return [{key: _draw(one, each) for key, one in choices.items()} for each in generators]


def _split(text: str) -> list[str]:
    """Split values at commas; a list, a mapping or a quoted text of YAML is one, whatever is in it."""
    import yaml

    try:
        node = yaml.compose(f"[{text}]", yaml.SafeLoader)
    except yaml.YAMLError:
        return [text]  # the error of the value names it whole
    return [text[one.start_mark.index - 1 : one.end_mark.index - 1] for one in node.value] or [text]


def _read_range(word: str, text: str) -> tuple[str, str, bool] | None:
    """The bounds of `low..high[:log]`; None where the text is no range."""
    bounds, _, scale = text.partition(":")
    low, _, high = bounds.partition("..")
    try:
        first, last = float(low), float(high)
    except ValueError:
        return None
    if scale not in ("", "log") or not -math.inf < first < last < math.inf or (scale and first <= 0):
        raise ConfigError(f"{word} is not a range; write low..high, or low..high:log above 0, as in 1e-4..1e-2:log")
    return low, high, scale == "log"


def _draw(choice: list[str] | tuple[str, str, bool], generator: random.Random) -> str:
    if isinstance(choice, list):
        return generator.choice(choice)
    low, high, is_log = choice
    is_whole = low.lstrip("-").isdigit() and high.lstrip("-").isdigit()
    # Every whole number has the cell that rounds to it; without this the bounds would have half of theirs.
    margin = 0.5 if is_whole else 0.0
    first, last = float(low) - margin, float(high) + margin
    value = math.exp(generator.uniform(math.log(first), math.log(last))) if is_log else generator.uniform(first, last)
    if is_whole:
        return str(min(max(round(value), int(low)), int(high)))
    # Six digits read well, and may lie outside of a range that is narrower than they are.
    return str(min(max(float(f"{value:.6g}"), first), last))


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
