"""Any number of runs on one page, as of a sweep: the best first, what differs between them, the curves of the best."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.metrics.report.compare import (
    MOST_RUNS,
    can_rank,
    comparable,
    curves_of,
    listed,
    names_of,
    shown_value,
)
from jaxtrain.metrics.report.files import RunFiles, read_files, read_json
from jaxtrain.metrics.report.headline import status_kind, wall_time
from jaxtrain.metrics.report.html import Markup, grid, mapping, page, rounded, section, text
from jaxtrain.runtime.files import write_text_atomic

# The record of a trial of a sweep, beside run.json: its settings, and the exit code of its process.
TRIAL_FILE = "trial.json"
# Settings that name a run and its folder, and differ between all runs of a sweep.
_NAMING = ("name",)
_MOST_SETTINGS = 12


def runs_below(folder: Path) -> list[Path]:
    """Return the directories of runs right below a folder, in the order of their names; trials may have left no run."""
    found = [path for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []
    return [path for path in found if any((path / name).is_file() for name in ("run.json", TRIAL_FILE))]


def write_many(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write one page about runs, sorted by their lowest held-out loss, or training loss where none was evaluated.

    Args:
        run_dirs: directories of runs; one may be broken, still train, or hold the record of a trial alone.
        path: of the page, which is replaced atomically.

    Returns:
        Path of the page.
    """
    runs = [read_files(Path(run_dir)) for run_dir in run_dirs]
    metric = "eval_loss" if any("eval_loss" in run.series for run in runs) else "loss"

    def order(run: RunFiles) -> tuple[bool, bool, float]:
        best = run.best(metric)
        return best is None, status_kind(_status(run)) == "bad", 0.0 if best is None else best[1]

    runs.sort(key=order)
    names = names_of(runs)
    scored = [(run, name) for run, name in zip(runs, names, strict=True) if run.best(metric) is not None][:MOST_RUNS]
    best, best_names = [run for run, _ in scored], [name for _, name in scored]
    if len(scored) < len(runs):
        pictures = f"The curves are of the first {len(scored)} runs of the table."
    else:
        pictures = ""
    sections = [
        f"<header><h1>{len(runs)} runs</h1></header>",
        _words(runs, names, metric),
        _table(runs, names, metric),
        f'<p class="soft">{pictures}</p>{listed(best, best_names)}{curves_of(best, best_names)}' if scored else "",
    ]
    write_text_atomic(path, page(f"{len(runs)} runs", sections))
    return path


def _status(run: RunFiles) -> str:
    """How a run ended; of a trial whose run.json does not say it, what its process ended with."""
    trial = read_json(run.run_dir / TRIAL_FILE)
    code = trial.get("exit_code")
    # A process that was killed left a run that is running.
    if run.info and (run.status != "running" or code is None):
        return run.status
    return "broken" if not trial else "not started" if code is None else f"failed (exit code {code})"


def _words(runs: Sequence[RunFiles], names: Sequence[str], metric: str) -> str:
    items = "".join(f'<li class="{kind}">{text(line)}</li>' for kind, line in _sentences(runs, names, metric))
    return f'<ul class="words">{items}</ul>' if items else ""


def _sentences(runs: Sequence[RunFiles], names: Sequence[str], metric: str) -> Iterator[tuple[str, str]]:
    best = runs[0].best(metric) if runs else None
    if best is not None and status_kind(_status(runs[0])) != "bad":
        yield "good", f"{names[0]} has the lowest {_label(metric)}: {rounded(best[1])}, at step {best[0]:,}."
    scored = [run for run in runs if metric in run.series]
    if metric == "eval_loss" and scored and not can_rank(scored):
        yield (
            "",
            "Held-out losses are of different rows or tasks, or it is not recorded of which: the order says little.",
        )
    elif metric == "loss" and len({run.task for run in scored}) > 1:
        yield "", "Training losses are of different tasks, or it is not recorded of which: the order says little."
    counts: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        if (status := _status(run)) not in ("done", "early stopped"):
            counts.setdefault(status, []).append(name)
    for status, which in counts.items():
        more = f" and {len(which) - 10} more" if len(which) > 10 else ""
        yield status_kind(status).replace("plain", ""), f"{status}: {', '.join(which[:10])}{more}."


def _label(metric: str) -> str:
    return "held-out loss" if metric == "eval_loss" else "training loss"


def _table(runs: Sequence[RunFiles], names: Sequence[str], metric: str) -> str:
    """Make the table: status, the settings that differ, the last and the best figures; one row per run."""
    settings = [_settings(run) for run in runs]
    keys = _differing([found for run, found in zip(runs, settings, strict=True) if run.info])
    shown = keys[:_MOST_SETTINGS]
    with_accuracy = any("eval_accuracy" in run.series for run in runs)
    header = ["run", "status", f"best {_label(metric)}", "at step"]
    header += ["held-out loss"] if metric == "eval_loss" else []
    header += ["held-out accuracy"] if with_accuracy else []
    header += ["training loss", "steps", "wall time"]
    numbers = range(2, len(header) - 1)
    header += shown
    rows = []
    for run, name, found in zip(runs, names, settings, strict=True):
        best, status = run.best(metric), _status(run)
        row: list[object] = [
            name,
            Markup(f'<span class="status {status_kind(status)}">{text(status)}</span>'),
            "-" if best is None else rounded(best[1]),
            "-" if best is None else f"{best[0]:,}",
        ]
        row += [_last(run, "eval_loss")] if metric == "eval_loss" else []
        row += [_last(run, "eval_accuracy")] if with_accuracy else []
        row += [_last(run, "loss"), "-" if run.last_step is None else f"{run.last_step:,}", wall_time(run) or "-"]
        rows.append([*row, *(shown_value(found.get(key)) for key in shown)])
    left_out = f'<p class="soft">Not shown: {text(", ".join(keys[_MOST_SETTINGS:]))}, which differ too.</p>'
    table = grid(header, rows, numbers=numbers)
    return section(f"Sorted by {_label(metric)}", table + (left_out if len(keys) > _MOST_SETTINGS else ""))


def _last(run: RunFiles, metric: str) -> str:
    if metric in run.final and run.final[metric] is None:
        return "not finite"
    return rounded(run.last(metric)) or "-"


def _settings(run: RunFiles) -> Mapping[str, Any]:
    """The settings of a run; of a trial that left no run.json, those that the sweep gave it."""
    if run.info:
        return comparable(run, with_digests=False)
    given = mapping(read_json(run.run_dir / TRIAL_FILE)).get("settings")
    words = [word.partition("=") for word in given if isinstance(word, str)] if isinstance(given, list) else []
    return {key: value for key, _, value in words}


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys with different values, but for those that only follow from another kind of model, optimizer and so on."""
    found = []
    for key in dict.fromkeys(key for one in settings for key in one if key not in _NAMING):
        if len({shown_value(one.get(key)) for one in settings}) > 1:
            kinds = {shown_value(one.get(f"{key.rpartition('.')[0]}.kind")) for one in settings}
            given = {shown_value(one[key]) for one in settings if key in one}
            if len(given) > 1 or len(kinds) == 1:
                found.append(key)
    return found
