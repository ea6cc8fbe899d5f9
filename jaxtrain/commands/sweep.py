"""`jaxtrain sweep`: trains a config with every combination of some values, or with random ones. No jax here."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxtrain.commands.children import JAXTRAIN, Signals, exit_code, how_ended, kill_child, start_child
from jaxtrain.commands.output import print_text
from jaxtrain.commands.sweep_draws import draw_trials
from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError, DivergedError, PreemptedError
from jaxtrain.metrics.format import format_duration
from jaxtrain.metrics.report.files import read_json
from jaxtrain.metrics.report.many import TRIAL_FILE, write_many
from jaxtrain.run.folder import run_folder
from jaxtrain.run.lock import RunLock
from jaxtrain.runtime.cluster import detect_cluster
from jaxtrain.runtime.files import write_json_atomic
from jaxtrain.runtime.terminal import print_remark

# Another start would end in the same way; not so after a missing file or package, which may be there by then.
_FINAL = (0, DivergedError.exit_code)


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
        ConfigError: a setting is wrong, the directory holds another sweep, or this is one of several processes.
    """
    cluster = detect_cluster()
    if cluster is not None and cluster.num_processes != 1:
        raise ConfigError(
            f"this is one of several processes (found through {cluster.source}), and every trial would join them in "
            "its place; start a sweep as a single process"
        )
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
