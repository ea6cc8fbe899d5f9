"""Several runs on one page: their curves over one another, their numbers, and the settings in which they differ."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.metrics.report.curves import Curve, smoothed, thin
from jaxtrain.metrics.report.files import RunFiles, read_files
from jaxtrain.metrics.report.headline import UNITS, status_kind, usual_rate, wall_time
from jaxtrain.metrics.report.html import Markup, grid, mapping, page, rounded, section, text
from jaxtrain.metrics.report.plots import DASHES, Plot, Reference, draw_svg
from jaxtrain.metrics.report.rank import other_losses, winner
from jaxtrain.metrics.report.tables import flat
from jaxtrain.runtime.files import write_text_atomic

# Curves beyond these cannot be told apart; the tables have no such limit.
MOST_RUNS = 8
_MOST_OWN_PLOTS = 6
_POINTS = 160
_STANDARD = ("loss", "eval_loss", "accuracy", "eval_accuracy", "learning_rate", "grad_norm")


def write_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write one page that compares runs; it is replaced atomically.

    Args:
        run_dirs: two to eight run directories; a run may still be running.
        path: of the page.

    Returns:
        Path of the page.
    """
    runs = [read_files(Path(run_dir)) for run_dir in run_dirs]
    names = names_of(runs)
    title = f"{len(runs)} runs: {', '.join(names)}"
    sections = [
        f"<header><h1>Comparison of {len(runs)} runs</h1></header>",
        listed(runs, names),
        _remarks(runs, names),
        curves_of(runs, names),
        _numbers(runs, names),
        _settings(runs, names),
    ]
    write_text_atomic(path, page(title, sections))
    return path


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """The names of the directories, with as many of the folders above them as tell them apart."""
    paths = [run.run_dir.resolve().parts for run in runs]
    depth = 1
    while len({path[-depth:] for path in paths}) < len(paths) and depth < max(map(len, paths)):
        depth += 1
    return ["/".join(path[-depth:]) for path in paths]


def listed(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Make the legend: colour and dash of each run, its name, status and model."""
    items = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        dash = f";stroke-dasharray:{DASHES[place]}" if DASHES[place] else ""
        line = (
            '<svg class="swatch" viewBox="0 0 40 10" aria-hidden="true">'
            f'<path d="M0 5h40" style="stroke:var(--series-{place + 1});stroke-width:3{dash}"/></svg>'
        )
        model = mapping(run.info.get("model"))
        facts = [str(model.get("name") or ""), _count(model.get("num_parameters"), "parameters"), run.task]
        items.append(
            f'<li>{line}<b>{text(name)}</b> <span class="status {status_kind(run.status)}">{text(run.status)}</span> '
            f'<span class="soft">{text(" · ".join(fact for fact in facts if fact))}</span></li>'
        )
    return f'<ul class="runs">{"".join(items)}</ul>'


def _count(value: object, noun: str) -> str:
    return f"{format_count(value)} {noun}" if isinstance(value, int) else ""


def _remarks(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Say what cannot be compared: other tasks, other held-out rows, other tokens; and which run did best."""
    lines = [("", line) for line in _differences(runs, names)]
    won = winner(runs)
    best = None if won is None else runs[won].best()
    if won is not None and best is not None:
        step, loss = best
        lines.insert(0, ("good", f"{names[won]} has the lowest held-out loss: {rounded(loss)}, at step {step:,}."))
    items = "".join(f'<li class="{kind}">{text(line)}</li>' for kind, line in lines)
    return f'<ul class="words">{items}</ul>' if items else ""


def _differences(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[str]:
    yield from other_losses(runs, names)
    for run, name in zip(runs, names, strict=True):
        if not run.series:
            yield f"{name} has logged no metrics."
        elif "eval_loss" not in run.series and any("eval_loss" in other.series for other in runs):
            yield f"{name} has no held-out loss: it evaluated no held-out rows."
        elif run.status != "done":
            yield f"{name} is {run.status}: its last row is of step {run.last_step or 0:,}."


def curves_of(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    own = [
        name
        for name in dict.fromkeys(name for run in runs for name in run.series)
        if name.startswith("eval_") and name not in _STANDARD and sum(name in run.series for run in runs) > 1
    ]
    plots = [
        _plot(runs, names, "Held-out loss", "eval_loss", may_be_log=True, with_guess=True),
        _plot(runs, names, "Training loss", "loss", may_be_log=True, is_smoothed=True),
        _plot(runs, names, "Held-out accuracy", "eval_accuracy", from_zero=True),
        _plot(runs, names, "Training accuracy", "accuracy", from_zero=True, is_smoothed=True),
        *(
            _plot(runs, names, name.removeprefix("eval_").replace("_", " ") + ", held-out", name)
            for name in own[:_MOST_OWN_PLOTS]
        ),
        _plot(runs, names, "Learning rate", "learning_rate"),
        _plot(runs, names, "Gradient norm", "grad_norm", may_be_log=True, is_smoothed=True),
        *(_plot(runs, names, f"Throughput, {unit}/s", f"{unit}_per_second", from_zero=True) for unit, _ in UNITS),
    ]
    figures = "\n".join(
        f"<figure><figcaption>{text(plot.title)}</figcaption>{draw_svg(plot, prefix=f'plot{index}')}</figure>"
        for index, plot in enumerate(plots)
        if plot is not None
    )
    return section("Curves", f'<div class="plots">{figures}</div>' if figures else "<p>No metrics were logged.</p>")


def _plot(
    runs: Sequence[RunFiles],
    names: Sequence[str],
    title: str,
    metric: str,
    *,
    may_be_log: bool = False,
    from_zero: bool = False,
    is_smoothed: bool = False,
    with_guess: bool = False,
) -> Plot | None:
    """The curves of a metric of all runs that logged it; None where none did."""
    curves = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        if metric in run.series:
            curves.append((name, place, plain_line(run, metric, is_smoothed=is_smoothed)))
    if not curves:
        return None
    if is_smoothed and any(smoothed(run.series[metric][1]) is not None for run in runs if metric in run.series):
        title += ", smoothed"
    is_language = all(run.is_language for run in runs)
    guesses = {guess for run in runs if (guess := run.baseline()) is not None} if with_guess else set()
    references: Sequence[Reference] = tuple(guesses) if len(guesses) == 1 else ()
    return Plot(
        title,
        "nats per token" if "loss" in metric and is_language else metric.removeprefix("eval_").replace("_", " "),
        [(name, line) for name, _, line in curves],
        may_be_log=may_be_log,
        from_zero=from_zero,
        references=references,
        with_dashes=True,
        looks=[number for _, number, _ in curves],
    )


def plain_line(run: RunFiles, metric: str, *, is_smoothed: bool) -> Curve:
    """One line per run, without bands: several over one another would hide each other."""
    (steps, values), starts = run.series[metric], run.starts(metric)
    even = smoothed(values, starts) if is_smoothed else None
    line = thin(steps, values if even is None else even, starts=starts, max_points=_POINTS)
    return Curve(line.steps, line.values, line.values, line.values, False, line.starts)


def _numbers(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Make the table of results, one row per run; the best of a column is bold."""
    scores = sorted(
        {name for run in runs for name in run.series if name.startswith("eval_") and name != "eval_loss"},
        key=lambda name: (name != "eval_accuracy", name),
    )[:4]
    header = [
        *("run", "steps", "training loss", "held-out loss", "best held-out loss"),
        *(name.replace("eval_", "held-out ").replace("_", " ") for name in scores),
        *("rate", "wall time", "memory", "devices"),
    ]
    best, won = [run.best() for run in runs], winner(runs)
    rows = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        lowest = best[index]
        at = "-" if lowest is None else f"{rounded(lowest[1])} (step {lowest[0]:,})"
        rates = [f"{format_count(rate)} {label}" for unit, label in UNITS if (rate := usual_rate(run, unit))]
        memory = run.series.get("device_memory_bytes")
        devices = mapping(run.info.get("devices"))
        rows.append(
            [
                name,
                "-" if run.last_step is None else f"{run.last_step:,}",
                run.shown("loss") or "-",
                run.shown("eval_loss") or "-",
                Markup(f"<b>{text(at)}</b>") if index == won else at,
                *(run.shown(score) or "-" for score in scores),
                ", ".join(rates) or "-",
                wall_time(run) or "-",
                "-" if memory is None else format_bytes(float(memory[1].max())),
                f"{devices.get('count', '?')} x {devices['kind']}" if devices.get("kind") else "-",
            ]
        )
    # A column in which no run has a value says nothing.
    kept = [column for column in range(len(header)) if any(row[column] != "-" for row in rows)]
    numbers = [place for place, column in enumerate(kept) if 1 <= column < 5 + len(scores)]
    table = grid(
        [header[column] for column in kept], [[row[column] for column in kept] for row in rows], numbers=numbers
    )
    return section("Results", table)


def _settings(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Make the table of the settings and parts in which the runs differ."""
    tables = [comparable(run) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [
        [key, *(shown_value(table.get(key)) for table in tables)]
        for key in keys
        if len({shown_value(table.get(key)) for table in tables}) > 1
    ]
    if not rows:
        return section("Settings that differ", '<p class="soft">All settings are the same.</p>')
    return section("Settings that differ", grid(("setting", *names), rows))


def comparable(run: RunFiles) -> Mapping[str, Any]:
    found = dict(flat(run.config))
    for part, given in mapping(run.info.get("from_python")).items():
        if given is not None:
            found[f"{part} (from Python)"] = given
    versions = mapping(run.info.get("versions"))
    found |= {f"version of {package}": version for package, version in versions.items()}
    found["git commit"] = run.info.get("git_commit")
    return found


def shown_value(value: object) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
