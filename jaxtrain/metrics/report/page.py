"""`report.html`: one page about a run that needs no network and no other file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxtrain.metrics.report import chats, classes, headline, logged, tables
from jaxtrain.metrics.report.curves import MAX_POINTS, Curve, last_text, piece_starts, smoothed, thin
from jaxtrain.metrics.report.files import RunFiles, read_files
from jaxtrain.metrics.report.html import mapping, page, section, text
from jaxtrain.metrics.report.plots import Plot, draw_svg
from jaxtrain.metrics.report.time_bar import time_bar
from jaxtrain.runtime.files import write_text_atomic

_MOST_SAMPLE_CHARACTERS = 20_000
_MOST_OWN_PLOTS = 6
# Fewer than in the standard pictures, so that a page with all of them stays below 200 kB.
_OWN_POINTS = 100
# What has a picture of its own or a number at the top, and what every row carries.
_STANDARD = {
    *("loss", "accuracy", "perplexity", "learning_rate", "grad_norm", "step_seconds", "data_wait_seconds"),
    *("tokens", "examples", "tokens_per_second", "examples_per_second", "model_flops_utilization"),
    *("device_memory_bytes", "skipped_steps"),
}


def write_report(run_dir: Path, *, path: Path | None = None) -> Path:
    """Write the page of a run from the files of its directory; the page is replaced atomically.

    The files are `run.json`, `metrics.jsonl`, `sample.txt`, `held_out.json`, `rows.json` and the records of
    checkpoints.

    Args:
        run_dir: a run directory; the run may still be running. The page omits the parts whose files are missing.
        path: of the page; None: `report.html` in the directory.

    Returns:
        Path of the page.
    """
    run = read_files(Path(run_dir))
    sections = [
        headline.header(run),
        headline.cards(run),
        headline.words(run),
        _sample(run),
        _curves(run),
        logged.logged(run),
        classes.mistakes(run),
        chats.chats(run),
        time_bar(run),
        tables.checkpoints(run),
        tables.settings(run),
        tables.parameters(run),
        tables.about(run),
        tables.versions(run),
    ]
    path = run.run_dir / "report.html" if path is None else Path(path)
    write_text_atomic(path, page(run.name, sections))
    return path


def _sample(run: RunFiles) -> str:
    """Show the sample, its prompt told apart, and the step that it is of."""
    try:
        sample = (run.run_dir / "sample.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if len(sample) > _MOST_SAMPLE_CHARACTERS:
        sample = sample[:_MOST_SAMPLE_CHARACTERS] + "\n[...]"
    prompt = mapping(run.config.get("evaluation")).get("sample_prompt")
    given = prompt if isinstance(prompt, str) and sample.startswith(prompt) else ""
    said = ['<span class="prompt">the prompt</span> and what the model wrote'] if given else []
    logged = last_text(run.run_dir / "metrics.jsonl", "sample")
    if logged is not None and run.last_step is not None and (logged[1] == sample or run.last_step > logged[0]):
        step = logged[0]
        said.append(f"after step {step:,}")
        if run.last_step > step:
            later = "" if run.status == "done" else "; a sample is generated when the run ends"
            said.append(f"<b>an earlier end of this run</b>, which has since gone on to step {run.last_step:,}{later}")
    elif run.status not in ("done", "early stopped"):
        # It is written before the status is done, so that a run without one has gone on since.
        said.append("<b>from an earlier end of this run</b>: a sample is generated when the run ends")
    note = f'<p class="key">{", ".join(said)}</p>' if said else ""
    shown = f'<b class="prompt">{text(given)}</b>' if given else ""
    return section("Sample", f'{note}<pre>{shown}<span class="sample">{text(sample[len(given) :])}</span></pre>')


def _curves(run: RunFiles) -> str:
    plots = _plots(run)
    if not plots:
        return section("Curves", "<p>No metrics were logged yet.</p>")
    own, left_out = _own_plots(run)
    plots += own
    figures = "\n".join(
        f"<figure><figcaption>{text(plot.title)}</figcaption>{draw_svg(plot, prefix=f'plot{index}')}</figure>"
        for index, plot in enumerate(plots)
    )
    notes = []
    if any(plot.smoothed for plot in plots):
        notes.append("Strong lines are means over neighbouring rows; the logged values are drawn faintly behind them.")
    if any(line.is_thinned for plot in plots for _, line in plot.curves):
        notes.append("Bands show the smallest and largest value of neighbouring rows.")
    if any(len(line.starts) for plot in plots for _, line in plot.curves):
        notes.append("Where a line is interrupted, its values were not finite, or not known.")
    resumed = headline.resumed_steps(run.info)
    if any(0 < step < (run.last_step or 0) for step in resumed):
        notes.append("Short ticks on the step axis: the run was resumed there.")
    if left_out:
        notes.append(f"Without a picture: {', '.join(left_out)}.")
    note = f'<p class="soft">{text(" ".join(notes))}</p>' if notes else ""
    return section("Curves", f'{note}<div class="plots">{figures}</div>')


def _plots(run: RunFiles) -> list[Plot]:
    """Choose the pictures for the metrics that were logged."""
    series = run.series
    rate_unit = next((label for unit, label in headline.UNITS if f"{unit}_per_second" in series), "")
    rates = {"tokens": "tokens_per_second", "examples": "examples_per_second"}
    guess = run.baseline()
    resumed = tuple(headline.resumed_steps(run.info))
    loss = Plot(
        "Loss",
        "nats per token" if run.is_language else "loss",
        _lines(run, {"train": "loss", "held-out": "eval_loss"}),
        may_be_log=True,
        smoothed=_smoothed(run, {"train": "loss"}),
        references=() if guess is None else (guess,),
        best=run.best() if len(series.get("eval_loss", ((),))[0]) > 1 else None,
    )
    plots = [
        loss,
        Plot(
            "Accuracy",
            "share correct",
            _lines(run, {"train": "accuracy", "held-out": "eval_accuracy"}),
            from_zero=True,
            smoothed=_smoothed(run, {"train": "accuracy"}),
        ),
        Plot("Learning rate", "learning rate", _lines(run, {"learning rate": "learning_rate"})),
        Plot("Throughput", rate_unit, _lines(run, rates), from_zero=True, smoothed=_smoothed(run, rates)),
        Plot(
            "Gradient norm",
            "global norm before clipping",
            _lines(run, {"gradient norm": "grad_norm"}),
            may_be_log=True,
            smoothed=_smoothed(run, {"gradient norm": "grad_norm"}),
        ),
        _time_plot(run, resumed),
    ]
    return [replace(plot, resumed=resumed) for plot in plots if plot.curves]


def _own_plots(run: RunFiles) -> tuple[list[Plot], list[str]]:
    """Pictures of the metrics that the task reports, train and held-out together; and the names left out."""
    names = dict.fromkeys(name.removeprefix("eval_") for name in run.series)
    own = [name for name in names if name not in _STANDARD]
    # Entries of a vector (`name_0`, `name_1`, ...) are many: they are left out first.
    own.sort(key=lambda name: re.search(r"_\d+$", name) is not None)
    plots = []
    for name in own[:_MOST_OWN_PLOTS]:
        logged = {"train": name, "held-out": f"eval_{name}"}
        lines = _lines(run, logged, max_points=_OWN_POINTS)
        even = _smoothed(run, {"train": name}, max_points=_OWN_POINTS)
        plots.append(Plot(name.replace("_", " "), name, lines, smoothed=even))
    return plots, own[_MOST_OWN_PLOTS:]


def _lines(run: RunFiles, names: Mapping[str, str], *, max_points: int = MAX_POINTS) -> list[tuple[str, Curve]]:
    return [
        (label, thin(*run.series[name], starts=run.starts(name), max_points=max_points))
        for label, name in names.items()
        if name in run.series
    ]


def _smoothed(run: RunFiles, names: Mapping[str, str], *, max_points: int = MAX_POINTS) -> list[tuple[str, Curve]]:
    found = []
    for label, name in names.items():
        if name in run.series:
            (steps, values), starts = run.series[name], run.starts(name)
            even = smoothed(values, starts)
            if even is not None:
                found.append((label, thin(steps, even, starts=starts, max_points=max_points)))
    return found


def _time_plot(run: RunFiles, resumed: Sequence[int]) -> Plot:
    names = {"step": "step_seconds", "data wait": "data_wait_seconds"}
    times = {label: run.series[name] for label, name in names.items() if name in run.series}
    # The first step of a process warms everything up; several times slower, it would press the others against the axis.
    first = [0, *resumed]
    for label, (steps, values) in times.items():
        is_warm = np.ones(len(steps), bool)
        for start in first:
            is_warm[np.searchsorted(steps, start, side="right") :][:1] = False
        if is_warm.sum() > 1:
            times[label] = (steps[is_warm], values[is_warm])
    in_milliseconds = max((float(values.max()) for _, values in times.values()), default=0.0) < 1
    factor, unit = (1e3, "milliseconds") if in_milliseconds else (1.0, "seconds")
    lines, over = [], []
    for label, (steps, values) in times.items():
        starts = piece_starts(steps, run.gaps.get(names[label]))
        even = smoothed(values, starts)
        lines.append((label, thin(steps, factor * values, starts=starts)))
        if even is not None:
            over.append((label, thin(steps, factor * even, starts=starts)))
    return Plot("Step time and data wait", unit, lines, from_zero=True, smoothed=over)
