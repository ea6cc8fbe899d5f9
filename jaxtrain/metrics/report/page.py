"""`report.html`: one page about a run that needs no network and no other file."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxtrain.metrics.format import format_bytes, format_count, format_duration
from jaxtrain.metrics.history import STANDARD, read_rows
from jaxtrain.metrics.report import sections
from jaxtrain.metrics.report.html import mapping, moment, number, page, rounded, section, soft, text, word_list
from jaxtrain.metrics.report.plots import Line, Plot, figure
from jaxtrain.metrics.report.run_files import OF_MEAN, RunFiles, read_files
from jaxtrain.runtime.files import write_text_atomic

_MOST_SAMPLE_CHARACTERS = 20_000
_MOST_OWN_PLOTS = 6
_UNITS = ("tokens", "examples")
# A held-out loss that is higher by less than this share of the best is as good as the best.
_AS_GOOD = 0.005
# Share of the time of steps that is worth a word where it is spent waiting for data.
_LONG_WAIT = 0.1


def write_report(run_dir: Path, *, path: Path | None = None) -> Path:
    """Write the page of a run, which may still be running, from the files of its directory; returns its path.

    The page, by default `report.html` in the directory, is replaced atomically, and omits parts without files.
    """
    run = read_files(Path(run_dir))
    parts = [
        _header(run),
        _cards(run),
        word_list(_words(run)),
        _sample(run),
        _curves(run),
        sections.time_bar(run),
        sections.checkpoints(run),
        sections.settings(run),
        sections.about(run),
    ]
    path = run.run_dir / "report.html" if path is None else Path(path)
    write_text_atomic(path, page(run.name, parts))
    return path


def _header(run: RunFiles) -> str:
    """The name of the run, its status and one line of facts."""
    model, devices = mapping(run.info.get("model")), mapping(run.info.get("devices"))
    count = model.get("num_parameters")
    facts = [
        str(model.get("name") or ""),
        "" if count is None else f"{count:,} parameters",
        f"{devices.get('count', 1)} x {devices['kind']}" if devices.get("kind") else "",
        moment(run.info.get("created")),
    ]
    line = " · ".join(text(fact) for fact in facts if fact)
    status = f'<span class="status {run.kind}">{text(run.status)}</span>'
    return f"<header><h1>{text(run.name)} {status}</h1><p>{line}</p></header>"


def _cards(run: RunFiles) -> str:
    """The row of the most important numbers."""
    perplexity, eval_loss, accuracy = map(run.last, ("eval_perplexity", "eval_loss", "eval_accuracy"))
    if perplexity is None and eval_loss is not None and run.task == "language_modeling" and eval_loss < 50:
        perplexity = math.exp(eval_loss)
    utilization, memory = run.finite("model_flops_utilization"), run.finite("device_memory_bytes")
    seconds, skipped = run.wall_seconds(), run.last("skipped_steps")
    values = {
        "final loss": run.shown("loss"),
        "held-out loss": run.shown("eval_loss"),
        "held-out perplexity": rounded(perplexity),
        "held-out accuracy": None if accuracy is None else f"{100 * accuracy:.2f} %",
        # Medians: the last window may include a save or an evaluation.
        **{f"{unit}/s": format_count(rate) for unit in _UNITS if (rate := usual_rate(run, unit)) is not None},
        "model FLOPs utilization": f"{100 * np.median(utilization):.1f} %" if len(utilization) else None,
        "wall time": None if seconds is None else format_duration(seconds),
        "peak device memory": format_bytes(float(memory.max())) if len(memory) else None,
        **{f"{unit} seen": format_count(run.finite(unit)[-1]) for unit in _UNITS if len(run.finite(unit))},
        "steps": None if run.last_step is None else f"{run.last_step:,}",
        "skipped steps": f"{skipped:.0f}" if skipped else None,
    }
    items = "".join(f"<div><dd>{text(value)}</dd><dt>{label}</dt></div>" for label, value in values.items() if value)
    return f'<dl class="cards">{items}</dl>' if items else ""


def usual_rate(run: RunFiles, unit: str) -> float | None:
    """The median rate of a run."""
    rates = run.finite(f"{unit}_per_second")
    return float(np.median(rates)) if len(rates) else None


def _words(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Say in sentences what the numbers mean: how the run ended, overfitting, the uniform guess, lost time."""
    planned = number(mapping(run.config.get("train")).get("steps"))
    reached = f"step {run.last_step or 0:,}" + ("" if planned is None else f" of {planned:,}")
    goes_on = "the same command resumes it from its newest checkpoint"
    ends = {
        "running": ("", f"The run has not ended: it still trains, or was killed. Its last row is of {reached}."),
        "diverged": (
            "bad",
            f"The run diverged at {reached}: gradients were not finite in too many steps in a row. A lower "
            "optimizer.learning_rate, more warmup_steps or stronger clipping may help.",
        ),
        "failed": ("bad", f"The run failed after {reached}; {goes_on}."),
        **{how: ("", f"The run was {how} at {reached}; {goes_on}.") for how in ("preempted", "stopped")},
    }
    if run.status in ends:
        yield ends[run.status]
    if run.shown("loss") == "not finite" and run.status != "diverged":
        yield "bad", "Training loss is not finite at the end."
    yield from _held_out(run)
    guess, name = run.baseline(), "Held-out loss" if run.last("eval_loss") is not None else "Training loss"
    loss = run.last("loss") if run.last("eval_loss") is None else run.last("eval_loss")
    if guess is not None and loss is not None and math.isfinite(loss):
        label = guess[0] if guess[0] == OF_MEAN else f"a {guess[0].replace(',', ' over', 1)}"
        if loss >= 0.98 * guess[1]:
            yield "bad", f"{name} ({rounded(loss)}) is no better than {label} ({rounded(guess[1])})."
        else:
            yield "", f"{name} is {rounded(loss)}; {label} gives {rounded(guess[1])}."
    if skipped := run.last("skipped_steps"):
        why = "gradients were not finite, no target had a weight, or it was a spike"
        yield "bad", f"Skipped steps: {skipped:,.0f}; {why} ({run.last('spikes') or 0:,.0f})."
    seconds = mapping(run.info.get("seconds"))
    waited, stepped = seconds.get("waiting for data") or 0, seconds.get("steps") or 0
    if waited > _LONG_WAIT * (waited + stepped):
        share = f"{100 * waited / (waited + stepped):.0f} % of the time of the steps was spent waiting for data"
        yield "bad", f"{share}; a larger train.workers or train.prefetch, or smaller rows, may help."


def _held_out(run: RunFiles) -> Iterator[tuple[str, str]]:
    best = run.best()
    if best is None:
        if "loss" in run.series and "eval_loss" not in run.series:
            yield "", "No held-out rows were evaluated, so the model's performance on unseen data is not known."
        return
    steps, values = run.series["eval_loss"]
    last_step, last, (step, lowest) = int(steps[-1]), float(values[-1]), best
    rise, said = last - lowest, f"Held-out loss was best at step {step:,} ({rounded(lowest)})"
    if run.shown("eval_loss") == "not finite":
        yield "bad", f"Held-out loss is not finite; it was best at step {step:,} ({rounded(lowest)})."
    elif len(values) < 2:
        yield "good", f"{said}."
    elif step == last_step:
        yield "good", f"{said}, its last evaluation: more steps may lower it further."
    elif rise <= _AS_GOOD * abs(lowest):
        yield "good", f"{said} and has stayed there since ({rounded(last)} at step {last_step:,})."
    else:
        yield (
            "bad",
            f"{said} and has risen by {rise:.2g} since: the model may overfit. Fewer steps, more rows, dropout or "
            "weight decay help; checkpoint.keep_best=true keeps the best step.",
        )


def _sample(run: RunFiles) -> str:
    """Show the sample, its prompt told apart, and the step that it is of."""
    try:
        sample = (run.run_dir / "sample.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    prompt = mapping(run.config.get("evaluation")).get("sample_prompt")
    given = prompt if isinstance(prompt, str) and sample.startswith(prompt) else ""
    said = ['<span class="prompt">the prompt</span> and what the model wrote'] if given else []
    rows = read_rows(run.run_dir / "metrics.jsonl")
    step = max((row["step"] for row in rows if row.get("sample") == sample), default=None)
    if step is not None:
        said.append(f"after step {step:,}")
    if step is not None and run.last_step is not None and run.last_step > step:
        said.append(f"<b>an earlier end of this run</b>, which has since gone on to step {run.last_step:,}")
    rest = sample[len(given) : _MOST_SAMPLE_CHARACTERS]
    shown = f'<b class="prompt">{text(given)}</b>' if given else ""
    body = f'<p class="key">{", ".join(said)}</p><pre>{shown}<span class="sample">{text(rest)}</span></pre>'
    return section("Sample", body)


def _curves(run: RunFiles) -> str:
    figures = [figure(replace(plot, resumed=run.resumed_steps)) for plot in _plots(run)]
    if not any(figures):
        return section("Curves", "<p>No metrics were logged yet.</p>")
    notes = ["Strong lines are means over neighbouring rows; logged values are drawn faintly behind."]
    if any(0 < step < (run.last_step or 0) for step in run.resumed_steps):
        notes.append("Short ticks on the step axis: the run was resumed there.")
    left_out = _own_metrics(run)[_MOST_OWN_PLOTS:]
    if left_out:
        notes.append(f"Without a picture: {', '.join(left_out)}.")
    return section("Curves", f'{soft(" ".join(notes))}<div class="plots">{"".join(figures)}</div>')


def _plots(run: RunFiles) -> list[Plot]:
    """The pictures for the metrics that were logged, then those of the metrics that the task reports."""

    def lines(*labels: tuple[str, str]) -> dict[str, Line]:
        return {label: run.series[name] for label, name in labels if name in run.series}

    def both(name: str) -> dict[str, Line]:
        return lines(("train", name), ("held-out", f"eval_{name}"))

    unit = next((f"{unit}/s" for unit in _UNITS if f"{unit}_per_second" in run.series), "")
    unit_of_loss, best = "nats per token" if run.task == "language_modeling" else "loss", run.best()
    rates = lines(*((unit, f"{unit}_per_second") for unit in _UNITS))
    return [
        Plot(
            "Loss",
            unit_of_loss,
            both("loss"),
            smooth=("train",),
            may_be_log=True,
            reference=run.baseline(),
            best=best if best is not None and len(run.finite("eval_loss")) > 1 else None,
        ),
        Plot("Accuracy", "share correct", both("accuracy"), smooth=("train",), from_zero=True),
        Plot("Learning rate", "learning rate", lines(("rate", "learning_rate"))),
        Plot("Throughput", unit, rates, smooth=_UNITS, from_zero=True),
        Plot("Gradient norm", "global norm before clipping", lines(("norm", "grad_norm")), ("norm",), may_be_log=True),
        _time_plot(run, lines(("step", "step_seconds"), ("data wait", "data_wait_seconds"))),
        *(Plot(name.replace("_", " "), name, both(name), ("train",)) for name in _own_metrics(run)[:_MOST_OWN_PLOTS]),
    ]


def _own_metrics(run: RunFiles) -> list[str]:
    """The metrics that the task reports; entries of a vector (`name_0`, `name_1`, ...) are many, and come last."""
    names = dict.fromkeys(name.removeprefix("eval_") for name in run.series)
    own = [name for name in names if name not in (*STANDARD, "loss", "accuracy")]
    return sorted(own, key=lambda name: re.search(r"_\d+$", name) is not None)


def _time_plot(run: RunFiles, lines: dict[str, Line]) -> Plot:
    """Times of steps, without the first of each process, which is slower by far."""
    longest = max((np.nanmax(values, initial=0.0) for _, values in lines.values()), default=0.0)
    factor, unit = (1e3, "milliseconds") if longest < 1 else (1.0, "seconds")
    shown = {}
    for label, (steps, values) in lines.items():
        first = {int(np.searchsorted(steps, start, side="right")) for start in (0, *run.resumed_steps)}
        warm = [place not in first for place in range(len(steps))]
        warm = warm if sum(warm) > 1 else [True] * len(steps)
        shown[label] = (steps[warm], factor * values[warm])
    return Plot("Step time and data wait", unit, shown, smooth=tuple(shown), from_zero=True)
