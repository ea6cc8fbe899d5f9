"""Several runs on one page, as of a sweep: the best first, what differs between them, their curves together."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.metrics.format import format_bytes, format_count, format_duration
from jaxtrain.metrics.history import flat
from jaxtrain.metrics.report.html import Markup, grid, mapping, number, page, rounded, section, soft, text, word_list
from jaxtrain.metrics.report.page import usual_rate
from jaxtrain.metrics.report.plots import Plot, figure
from jaxtrain.metrics.report.run_files import RunFiles, read_files, read_json
from jaxtrain.runtime.files import write_text_atomic

# The record of a trial of a sweep, beside run.json: its settings, and the exit code of its process.
TRIAL_FILE = "trial.json"
# Curves beyond these cannot be told apart, and settings beyond these are named only.
_MOST_CURVES, _MOST_SETTINGS, _MOST_OWN_PLOTS = 8, 12, 6
_STANDARD = ("eval_loss", "eval_accuracy")


def runs_below(folder: Path) -> list[Path]:
    """Return the directories of runs right below a folder, in the order of their names; trials may have left no run."""
    found = [path for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []
    return [path for path in found if any((path / name).is_file() for name in ("run.json", TRIAL_FILE))]


def write_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write one page about runs, sorted by their lowest held-out loss, or the end of training loss where none has one.

    Runs whose losses cannot be compared keep their order; those that diverged or failed come last.

    Args:
        run_dirs: directories of runs; one may be broken, still train, or hold the record of a trial alone.
        path: of the page, which is replaced atomically, and returned.
    """
    found = [_read(Path(run_dir)) for run_dir in run_dirs]
    metric = "eval_loss" if any("eval_loss" in run.series for run in found) else "loss"
    differing = _differing_losses([run for run in found if metric in run.series and run.kind != "bad"], metric)

    def order(run: RunFiles) -> tuple[bool, bool, float]:
        score = _score(run, metric)
        return run.kind == "bad" or metric not in run.series, score is None, 0 if differing or not score else score[1]

    found.sort(key=order)
    runs = dict(zip(_names(found), found, strict=True))
    scored = {name: run for name, run in runs.items() if run.series}
    shown = dict(list(scored.items())[:_MOST_CURVES])
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
    words = [str(word).partition("=") for word in trial.get("settings") or ()]
    given = run.config or {key: value for key, _, value in words}
    return RunFiles(run_dir, run.name, {**run.info, "status": status, "config": given}, run.series)


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """The names of the directories, with as many of the folders above them as tell them apart."""
    paths = [run.run_dir.resolve().parts for run in runs]
    depth = 1
    while len({path[-depth:] for path in paths}) < len(paths) and depth < max(map(len, paths)):
        depth += 1
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
    return [name for name, *parts in zip(names, *keys, strict=True) if len({*parts}) > 1] if len(runs) > 1 else []


def _of_the_loss(run: RunFiles, metric: str) -> tuple[str, str, str, str]:
    """What identifies the task of a run, the settings of its loss, its data, and how many rows it evaluates."""
    data, loss = mapping(run.info.get("data")), mapping(run.config.get("loss"))
    # Other terms of the loss (`z_loss`) are added in training alone.
    kept = {"dpo": ("beta", "label_smoothing"), "classification": ("label_smoothing",)}.get(run.task, ())
    settings = [run.config.get("task"), mapping(run.info.get("called")).get("task"), *(loss.get(key) for key in kept)]
    rows = mapping(data.get("fingerprint")).get("validation") or data.get("fingerprint")
    batches = number(mapping(run.config.get("evaluation")).get("max_batches"))
    most = (batches or 0) * (number(mapping(run.config.get("train")).get("global_batch_size")) or 0)
    held_out = number(mapping(data.get("fingerprint")).get("num_validation_rows")) or data.get("num_validation_rows")
    count = most if most and not (held_out and most >= held_out) else "all"
    if metric == "loss":
        settings, rows, count = [*settings, dict(loss)], data.get("fingerprint"), ""
    return run.task, json.dumps(settings, sort_keys=True), json.dumps(rows, sort_keys=True), str(count)


def _words(runs: Mapping[str, RunFiles], metric: str, differing: Sequence[str]) -> Iterator[tuple[str, str]]:
    name, first = next(iter(runs.items()), ("", None))
    best = None if first is None or first.kind == "bad" else _score(first, metric)
    if best is not None and not differing:
        yield "good", f"{name} has the lowest {_label(metric)}: {rounded(best[1])}, at step {best[0]:,}."
    if metric == "loss" and best is not None:
        yield "", "No run evaluated held-out rows; training losses are means over the last tenth of the logged rows."
    if differing:
        yield "", f"The runs are not ranked: their losses differ in the {' and the '.join(differing)}."
    for status in dict.fromkeys(run.status for run in runs.values()):
        which = [name for name, run in runs.items() if run.status == status]
        kind = runs[which[0]].kind
        if kind != "good":
            more = f" and {len(which) - 10} more" if len(which) > 10 else ""
            yield kind.replace("plain", ""), f"{status}: {', '.join(which[:10])}{more}."


def _label(metric: str) -> str:
    return "held-out loss" if metric == "eval_loss" else "training loss at its end"


def _table(runs: Mapping[str, RunFiles], metric: str, *, is_ranked: bool) -> str:
    """One row per run: status, the last and the best figures, and the settings that differ."""
    settings = {name: _settings(run) for name, run in runs.items()}
    keys = _differing([settings[name] for name, run in runs.items() if run.info])
    # Many settings of few runs have a table of their own, with a column per run.
    is_wide = len(keys) > _MOST_SETTINGS and len(runs) <= _MOST_CURVES
    columns: dict[str, list[object]] = {"run": list(runs)}

    def add(name: str, *cells: object) -> None:
        columns[name] = ["-" if cell in (None, "") else cell for cell in cells]

    every, scores = runs.values(), [_score(run, metric) for run in runs.values()]
    add("status", *(Markup(f'<span class="status {run.kind}">{text(run.status)}</span>') for run in every))
    best = [None if score is None else text(rounded(score[1])) for score in scores]
    if is_ranked and best and best[0] is not None and next(iter(every)).kind != "bad":
        best[0] = Markup(f"<b>{best[0]}</b>")
    add("best held-out loss" if metric == "eval_loss" else "training loss at the end", *best)
    add("at step", *(None if score is None else f"{score[0]:,}" for score in scores))
    for name in dict.fromkeys(("eval_loss", *(name for run in every for name in run.series))):
        if name in ("eval_loss", "eval_accuracy") or (name.startswith("eval_") and len(columns) < 9):
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
    for key in keys[: 0 if is_wide else _MOST_SETTINGS]:
        add(key, *(_shown(settings[name].get(key)) for name in runs))
    # A column in which no run has a value says nothing.
    kept = [name for name in columns if name in ("run", "status") or any(cell != "-" for cell in columns[name])]
    rows = zip(*(columns[name] for name in kept), strict=True) if runs else ()
    table = grid(kept, list(rows), numbers=[place for place, name in enumerate(kept) if name in numbers])
    if is_wide:
        differing = [[key, *(_shown(found.get(key)) for found in settings.values())] for key in keys]
        table += f"<h3>Settings that differ</h3>{grid(('setting', *runs), differing)}"
    elif len(keys) > _MOST_SETTINGS:
        table += soft(f"Not shown: {', '.join(keys[_MOST_SETTINGS:])}, which differ too.")
    return section(f"Sorted by {_label(metric)}" if is_ranked else "Results", table)


def _settings(run: RunFiles) -> dict[str, Any]:
    found = {key: value for key, value in flat(run.config).items() if key != "name"}
    found |= {f"{part} (from Python)": given for part, given in mapping(run.info.get("from_python")).items() if given}
    found |= {f"version of {name}": version for name, version in mapping(run.info.get("versions")).items()}
    return found | ({"git commit": run.info["git_commit"]} if run.info.get("git_commit") else {})


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys with different values, but for those that only follow from another kind of model, optimizer and so on."""
    found = []
    for key in dict.fromkeys(key for one in settings for key in one):
        if len({_shown(one.get(key)) for one in settings}) > 1:
            kinds = {_shown(one.get(f"{key.rpartition('.')[0]}.kind")) for one in settings}
            given = {_shown(one[key]) for one in settings if key in one}
            if len(given) > 1 or len(kinds) == 1:
                found.append(key)
    return found


def _shown(value: object) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _curves(runs: Mapping[str, RunFiles]) -> str:
    logged = dict.fromkeys(name for run in runs.values() for name in run.series if name.startswith("eval_"))
    own = [name for name in logged if name not in _STANDARD and sum(name in run.series for run in runs.values()) > 1]
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
