"""Several runs on one page, as of a sweep: the best first, what differs between them, their curves together."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.metrics.format import format_bytes, format_count, format_duration
from jaxtrain.metrics.history import flat
from jaxtrain.metrics.report.html import Markup, grid, mapping, page, rounded, section, soft, text, word_list
from jaxtrain.metrics.report.page import usual_rate
from jaxtrain.metrics.report.plots import Plot, figure
from jaxtrain.metrics.report.run_files import RunFiles, read_files, read_json
from jaxtrain.runtime.files import write_text_atomic

# The record of a trial of a sweep, beside run.json: its settings, and the exit code of its process.
TRIAL_FILE = "trial.json"
# Curves beyond these cannot be told apart, and settings beyond these are named only.
_MOST_CURVES, _MOST_SETTINGS, _MOST_OWN_PLOTS, _MOST_NAMES = 8, 12, 6, 10
_STANDARD = ("eval_loss", "eval_accuracy")


def runs_below(folder: Path) -> list[Path]:
    """Return the directories of runs right below a folder, in the order of their names; trials may have left no run."""
    found = [path for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []
    return [path for path in found if any((path / name).is_file() for name in ("run.json", TRIAL_FILE))]


def write_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write one page about runs, sorted by their lowest held-out loss, or the end of training loss where none has one.

    Runs whose losses cannot be compared keep their order; those that diverged or failed come last. One may be broken,
    still train, or hold the record of a trial alone. Returns the path of the page, which is replaced atomically.
    """
    found = [_read(Path(run_dir)) for run_dir in run_dirs]
    metric = "eval_loss" if any("eval_loss" in run.series for run in found) else "loss"
    differing = _differing_losses([run for run in found if metric in run.series and run.kind != "bad"], metric)

    def order(run: RunFiles) -> tuple[bool, bool, float]:
        score = _score(run, metric)
        return run.kind == "bad" or metric not in run.series, score is None, 0 if differing or not score else score[1]

    found.sort(key=order)
    runs = dict(zip(_names(found), found, strict=True))
    shown = dict([(name, run) for name, run in runs.items() if run.series][:_MOST_CURVES])
    note = f"The curves are of the first {len(shown)} runs of the table." if len(shown) < len(runs) else ""
    parts = [
        f"<header><h1>{len(runs)} runs</h1></header>",
        word_list(_words(runs, metric, differing)),
        _table(runs, metric, is_ranked=not differing),
        soft(note) + _curves(shown) if shown else "",
    ]
    write_text_atomic(path, page(f"{len(runs)} runs", parts))
    return path


def _read(run_dir: Path) -> RunFiles:
    """The files of a run; what its run.json does not say of its end, the record of the trial does."""
    try:
        run = read_files(run_dir)
    except ConfigError:
        return RunFiles(run_dir, run_dir.resolve().name, {}, {})
    trial = read_json(run_dir / TRIAL_FILE)
    code = trial.get("exit_code")
    # A process that was killed left a run that is running.
    if run.info and (run.status != "running" or code is None):
        return run
    status = "broken" if not trial else "not started" if code is None else f"failed (exit code {code})"
    given = run.config or dict(word.split("=", 1) for word in trial.get("settings") or ())
    return RunFiles(run_dir, run.name, {**run.info, "status": status, "config": given}, run.series)


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """The names of the directories, with as many of the folders above them as tell them apart."""
    paths = [run.run_dir.resolve().parts for run in runs]
    depths = range(1, max(map(len, paths), default=1) + 1)
    depth = next((depth for depth in depths if len({path[-depth:] for path in paths}) == len(paths)), depths[-1])
    return ["/".join(path[-depth:]) for path in paths]


def _score(run: RunFiles, metric: str) -> tuple[int, float] | None:
    """What runs are ranked by: the lowest held-out loss, or the end of the training loss; with its step."""
    if metric == "eval_loss":
        return run.best()
    end = run.end(metric)
    return None if end is None else (int(run.series[metric][0][-1]), end)


def _differing_losses(runs: Sequence[RunFiles], metric: str) -> list[str]:
    """What keeps the losses of runs from being compared."""
    names = ("task", "settings of the loss", "data", "number of held-out rows")
    keys = [_of_the_loss(run, metric) for run in runs]
    return [name for place, name in enumerate(names) if len({key[place] for key in keys}) > 1]


def _of_the_loss(run: RunFiles, metric: str) -> tuple[str, ...]:
    """What identifies the task of a run, the settings of its loss, its data, and how many rows it evaluates."""
    data, loss = mapping(run.info.get("data")), dict(mapping(run.config.get("loss")))
    settings = [run.config.get("task"), mapping(run.info.get("called")).get("task"), loss]
    rows, count = data.get("fingerprint"), None
    for key in ("logits", "block", *(["z_loss"] if metric == "eval_loss" else [])):  # z_loss is of training alone
        loss.pop(key, None)
    if metric == "eval_loss":
        held_out = mapping(rows).get("num_validation_rows") or data.get("num_validation_rows") or math.inf
        batches = mapping(run.config.get("evaluation")).get("max_batches") or math.inf
        count = min(held_out, batches * (mapping(run.config.get("train")).get("global_batch_size") or 1))
        rows = mapping(rows).get("validation") or rows
    return run.task, *map(_shown, (settings, rows, count))


def _words(runs: Mapping[str, RunFiles], metric: str, differing: Sequence[str]) -> Iterator[tuple[str, str]]:
    name, first = next(iter(runs.items()), ("", None))
    best = None if first is None or first.kind == "bad" else _score(first, metric)
    if best is not None and not differing:
        yield "good", f"{name} has the lowest {_label(metric)}: {rounded(best[1])}, at step {best[0]:,}."
    if metric == "loss" and best is not None:
        yield "", "No run evaluated held-out rows; training losses are means over the last tenth of the logged rows."
    if differing:
        yield "", f"The runs are not ranked: their losses differ in the {' and the '.join(differing)}."
    for status in dict.fromkeys(run.status for run in runs.values() if run.kind != "good"):
        which = [name for name, run in runs.items() if run.status == status]
        more = f" and {len(which) - _MOST_NAMES} more" if len(which) > _MOST_NAMES else ""
        yield runs[which[0]].kind, f"{status}: {', '.join(which[:_MOST_NAMES])}{more}."


def _label(metric: str) -> str:
    return "held-out loss" if metric == "eval_loss" else "training loss at its end"


def _table(runs: Mapping[str, RunFiles], metric: str, *, is_ranked: bool) -> str:
    """One row per run: status, the last and the best figures, and the settings that differ."""
    every, scores = runs.values(), [_score(run, metric) for run in runs.values()]
    columns: dict[str, list[object]] = {"run": list(runs)}

    def add(name: str, *cells: object) -> None:
        columns[name] = ["-" if cell in (None, "") else cell for cell in cells]

    add("status", *(Markup(f'<span class="status {run.kind}">{text(run.status)}</span>') for run in every))
    best = [None if score is None else rounded(score[1]) for score in scores]
    if is_ranked and best and best[0] is not None and next(iter(every)).kind != "bad":
        best[0] = Markup(f"<b>{best[0]}</b>")
    add("best held-out loss" if metric == "eval_loss" else "training loss at the end", *best)
    add("at step", *(None if score is None else f"{score[0]:,}" for score in scores))
    for name in dict.fromkeys((*_STANDARD, *(name for run in every for name in run.series))):
        if name in _STANDARD or (name.startswith("eval_") and len(columns) < 9):
            add(name.replace("eval_", "held-out ").replace("_", " "), *(run.shown(name) for run in every))
    add("training loss" if metric == "eval_loss" else "last training loss", *(run.shown("loss") for run in every))
    add("steps", *(run.last_step and f"{run.last_step:,}" for run in every))
    for unit in ("tokens", "examples"):
        rates = [usual_rate(run, unit) for run in every]
        add(f"{unit}/s", *(None if rate is None else format_count(rate) for rate in rates))
    add("wall time", *(format_duration(run.wall_seconds()) for run in every))
    memory = [run.finite("device_memory_bytes") for run in every]
    add("memory", *(format_bytes(float(one.max())) if len(one) else None for one in memory))
    numbers = {*columns} - {"run", "status"}
    settings = {name: _settings(run) for name, run in runs.items()}
    keys = _differing([settings[name] for name, run in runs.items() if run.info])
    for key in keys[:_MOST_SETTINGS]:
        add(key, *(_shown(settings[name].get(key)) for name in runs))
    # A column in which no run has a value says nothing.
    kept = [name for name in columns if name in ("run", "status") or any(cell != "-" for cell in columns[name])]
    rows = list(zip(*(columns[name] for name in kept), strict=True))
    table = grid(kept, rows, numbers=[place for place, name in enumerate(kept) if name in numbers])
    if len(keys) > _MOST_SETTINGS:
        table += soft(f"Not shown: {', '.join(keys[_MOST_SETTINGS:])}, which differ too.")
    return section(f"Sorted by {_label(metric)}" if is_ranked else "Results", table)


def _settings(run: RunFiles) -> dict[str, Any]:
    found = {key: value for key, value in flat(run.config).items() if key != "name"}
    found |= {f"{part} (from Python)": given for part, given in mapping(run.info.get("from_python")).items() if given}
    found |= {f"version of {name}": version for name, version in mapping(run.info.get("versions")).items()}
    return found | {"git commit": run.info.get("git_commit")}


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys with different values, but for those that only follow from another kind of model, optimizer and so on."""
    found = []
    for key in dict.fromkeys(key for one in settings for key in one):
        kinds = {_shown(one.get(f"{key.rpartition('.')[0]}.kind")) for one in settings}
        given = {_shown(one[key]) for one in settings if key in one}
        if len(given) > 1 or (len(kinds) == 1 and len({_shown(one.get(key)) for one in settings}) > 1):
            found.append(key)
    return found


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    return "-" if value is None else json.dumps(value, default=str, sort_keys=True)


def _curves(runs: Mapping[str, RunFiles]) -> str:
    logged = [name for run in runs.values() for name in run.series if name.startswith("eval_")]
    own = [name for name in dict.fromkeys(logged) if name not in _STANDARD and logged.count(name) > 1]
    guesses = {run.baseline() for run in runs.values()}
    looks = {name: place for place, name in enumerate(runs)}

    def drawn(title: str, metric: str, **options: Any) -> str:
        lines = {name: run.series[metric] for name, run in runs.items() if metric in run.series}
        unit = metric.removeprefix("eval_").replace("_", " ")
        return figure(Plot(title, unit, lines, looks=looks, **options)) if lines else ""

    every = tuple(runs)
    figures = [
        drawn("Held-out loss", "eval_loss", may_be_log=True, reference=guesses.pop() if len(guesses) == 1 else None),
        drawn("Training loss, smoothed", "loss", may_be_log=True, smooth=every),
        drawn("Held-out accuracy", "eval_accuracy", from_zero=True),
        drawn("Training accuracy, smoothed", "accuracy", from_zero=True, smooth=every),
        *(drawn(f"Held-out {name.removeprefix('eval_')}", name) for name in own[:_MOST_OWN_PLOTS]),
        drawn("Learning rate", "learning_rate"),
        drawn("Gradient norm, smoothed", "grad_norm", may_be_log=True, smooth=every),
        *(drawn(f"Throughput, {unit}/s", f"{unit}_per_second", from_zero=True) for unit in ("tokens", "examples")),
    ]
    return section("Curves", f'<div class="plots">{"".join(figures)}</div>')
