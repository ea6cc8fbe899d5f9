"""Any number of runs on one page, as of a sweep: the best first, what differs between them, the curves of the best."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.metrics.report.compare import (
    MOST_RUNS,
    comparable,
    curves_of,
    listed,
    names_of,
    shown_value,
)
from jaxtrain.metrics.report.files import RunFiles, read_files, read_json
from jaxtrain.metrics.report.headline import status_kind, wall_time
from jaxtrain.metrics.report.html import Markup, grid, mapping, page, rounded, section, text
from jaxtrain.metrics.report.rank import can_rank, can_rank_training
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
    """Write one page about runs, sorted by their lowest held-out loss, or the end of training loss where none has one.

    Runs whose losses cannot be compared keep their order; those that diverged or failed come last.

    Args:
        run_dirs: directories of runs; one may be broken, still train, or hold the record of a trial alone.
        path: of the page, which is replaced atomically.

    Returns:
        Path of the page.
    """
    runs = [_read(Path(run_dir)) for run_dir in run_dirs]
    metric = "eval_loss" if any("eval_loss" in run.series for run in runs) else "loss"
    is_ranked = _is_ranked(runs, metric)

    def order(run: RunFiles) -> tuple[bool, bool, bool, float]:
        score = _score(run, metric)
        value = score[1] if is_ranked and score is not None else 0.0
        return metric not in run.series, _is_bad(run), score is None, value

    runs.sort(key=order)
    names = names_of(runs)
    scored = [(run, name) for run, name in zip(runs, names, strict=True) if metric in run.series][:MOST_RUNS]
    best, best_names = [run for run, _ in scored], [name for _, name in scored]
    if len(scored) < len(runs):
        pictures = f"The curves are of the first {len(scored)} runs of the table."
    else:
        pictures = ""
    sections = [
        f"<header><h1>{len(runs)} runs</h1></header>",
        _words(runs, names, metric, is_ranked=is_ranked),
        _table(runs, names, metric, is_ranked=is_ranked),
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


def _read(run_dir: Path) -> RunFiles:
    """The files of a run; one whose metrics cannot be read is broken, and the others have their page all the same."""
    try:
        return read_files(run_dir)
    except ConfigError:
        return RunFiles(run_dir, run_dir.resolve().name, {}, {}, {})


def _is_bad(run: RunFiles) -> bool:
    return status_kind(_status(run)) == "bad"


def _is_ranked(runs: Sequence[RunFiles], metric: str) -> bool:
    """Whether the losses of the runs that may be the best can be compared."""
    scored = [run for run in runs if metric in run.series and not _is_bad(run)]
    return len(scored) < 2 or (can_rank(scored) if metric == "eval_loss" else can_rank_training(scored))


def _score(run: RunFiles, metric: str) -> tuple[int, float] | None:
    """What runs are ranked by: the lowest held-out loss, or the end of the training loss; with its step."""
    if metric == "eval_loss":
        return run.best()
    end = run.end(metric)
    return None if end is None else (int(run.series[metric][0][-1]), end)


def _words(runs: Sequence[RunFiles], names: Sequence[str], metric: str, *, is_ranked: bool) -> str:
    sentences = _sentences(runs, names, metric, is_ranked=is_ranked)
    items = "".join(f'<li class="{kind}">{text(line)}</li>' for kind, line in sentences)
    return f'<ul class="words">{items}</ul>' if items else ""


def _sentences(
    runs: Sequence[RunFiles], names: Sequence[str], metric: str, *, is_ranked: bool
) -> Iterator[tuple[str, str]]:
    best = _score(runs[0], metric) if runs else None
    if is_ranked and best is not None and not _is_bad(runs[0]):
        yield "good", f"{names[0]} has the lowest {_label(metric)}: {rounded(best[1])}, at step {best[0]:,}."
    if metric == "loss" and best is not None:
        yield "", "No run evaluated held-out rows; training losses are means over the last tenth of the logged rows."
    if not is_ranked and metric == "eval_loss":
        yield (
            "",
            "Held-out losses are of different rows, tasks or settings of the loss, or it is not recorded of which: the "
            "runs are not ranked.",
        )
    elif not is_ranked:
        yield (
            "",
            "Training losses are of different tasks, settings of the loss or data, or it is not recorded of which: the "
            "runs are not ranked.",
        )
    counts: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        if (status := _status(run)) not in ("done", "early stopped"):
            counts.setdefault(status, []).append(name)
    for status, which in counts.items():
        more = f" and {len(which) - 10} more" if len(which) > 10 else ""
        yield status_kind(status).replace("plain", ""), f"{status}: {', '.join(which[:10])}{more}."


def _label(metric: str) -> str:
    return "held-out loss" if metric == "eval_loss" else "training loss at its end"


def _table(runs: Sequence[RunFiles], names: Sequence[str], metric: str, *, is_ranked: bool) -> str:
    """Make the table: status, the settings that differ, the last and the best figures; one row per run."""
    settings = [_settings(run) for run in runs]
    keys = _differing([found for run, found in zip(runs, settings, strict=True) if run.info])
    shown = keys[:_MOST_SETTINGS]
    with_accuracy = any("eval_accuracy" in run.series for run in runs)
    header = ["run", "status", "best held-out loss" if metric == "eval_loss" else "training loss at the end", "at step"]
    header += ["held-out loss"] if metric == "eval_loss" else []
    header += ["held-out accuracy"] if with_accuracy else []
    header += ["training loss" if metric == "eval_loss" else "last training loss", "steps", "wall time"]
    numbers = range(2, len(header) - 1)
    header += shown
    rows = []
    for run, name, found in zip(runs, names, settings, strict=True):
        best, status = _score(run, metric), _status(run)
        row: list[object] = [
            name,
            Markup(f'<span class="status {status_kind(status)}">{text(status)}</span>'),
            "-" if best is None else rounded(best[1]),
            "-" if best is None else f"{best[0]:,}",
        ]
        row += [run.shown("eval_loss") or "-"] if metric == "eval_loss" else []
        row += [run.shown("eval_accuracy") or "-"] if with_accuracy else []
        row += [run.shown("loss") or "-", "-" if run.last_step is None else f"{run.last_step:,}", wall_time(run) or "-"]
        rows.append([*row, *(shown_value(found.get(key)) for key in shown)])
    left_out = f'<p class="soft">Not shown: {text(", ".join(keys[_MOST_SETTINGS:]))}, which differ too.</p>'
    table = grid(header, rows, numbers=numbers) + (left_out if len(keys) > _MOST_SETTINGS else "")
    return section(f"Sorted by {_label(metric)}" if is_ranked else "Results", table)


def _settings(run: RunFiles) -> Mapping[str, Any]:
    """The settings of a run; of a trial that left no run.json, those that the sweep gave it."""
    if run.info:
        return comparable(run)
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
