"""The top of a report: name and status, the most important numbers, and what they mean in words."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.metrics.format import format_bytes, format_count, format_duration
from jaxtrain.metrics.report.curves import smoothed
from jaxtrain.metrics.report.files import OF_MEAN, RunFiles
from jaxtrain.metrics.report.html import mapping, moment, number, parse_moment, rounded, text

UNITS = (("tokens", "tokens/s"), ("examples", "examples/s"))
# A held-out loss that is higher by less than this share of the best is as good as the best.
_AS_GOOD = 0.005
# Share of the time of steps that is worth a word where it is spent waiting for data.
_LONG_WAIT = 0.1


def header(run: RunFiles) -> str:
    """Make the name of the run, its status and one line of facts."""
    info = run.info
    model = mapping(info.get("model"))
    facts = [str(model.get("name") or "")]
    if isinstance(model.get("num_parameters"), int):
        facts.append(f"{model['num_parameters']:,} parameters")
    devices = mapping(info.get("devices"))
    if devices.get("kind"):
        facts.append(f"{devices.get('count', 1)} x {devices['kind']}")
    facts.append(moment(info.get("created")))
    kind = status_kind(run.status)
    line = " · ".join(text(fact) for fact in facts if fact)
    return (
        f'<header><h1>{text(run.name)} <span class="status {kind}">{text(run.status)}</span></h1><p>{line}</p></header>'
    )


def status_kind(status: str) -> str:
    """The CSS class of a status."""
    if status in ("done", "early stopped"):
        return "good"
    return "plain" if status in ("running", "preempted", "stopped by a callback", "unknown") else "bad"


def cards(run: RunFiles) -> str:
    """Make the row of the most important numbers."""
    series = run.series
    values = [("final loss", run.shown("loss")), ("held-out loss", run.shown("eval_loss"))]
    perplexity, eval_loss = run.last("eval_perplexity"), run.last("eval_loss")
    if perplexity is None and eval_loss is not None and run.is_language and eval_loss < 50:
        perplexity = math.exp(eval_loss)
    values.append(("held-out perplexity", rounded(perplexity)))
    accuracy = run.last("eval_accuracy")
    values.append(("held-out accuracy", None if accuracy is None else f"{100 * accuracy:.2f} %"))
    for unit, label in UNITS:
        rate = usual_rate(run, unit)
        values.append((label, None if rate is None else format_count(rate)))
    if "model_flops_utilization" in series:
        utilization = float(np.median(series["model_flops_utilization"][1]))
        values.append(("model FLOPs utilization", f"{100 * utilization:.1f} %"))
    values.append(("wall time", wall_time(run)))
    if "device_memory_bytes" in series:
        values.append(("peak device memory", format_bytes(float(series["device_memory_bytes"][1].max()))))
    for unit, _ in UNITS:
        if unit in series:
            values.append((f"{unit} seen", format_count(float(series[unit][1][-1]))))
    values.append(("steps", None if run.last_step is None else f"{run.last_step:,}"))
    skipped = run.last("skipped_steps")
    if skipped:
        values.append(("skipped steps", f"{skipped:.0f}"))
    items = "".join(f"<div><dd>{text(value)}</dd><dt>{text(label)}</dt></div>" for label, value in values if value)
    return f'<dl class="cards">{items}</dl>' if items else ""


def usual_rate(run: RunFiles, unit: str) -> float | None:
    """The median of the rates of a run: the last window may include a save or an evaluation."""
    name = f"{unit}_per_second"
    return float(np.median(run.series[name][1])) if name in run.series else None


def wall_time(run: RunFiles) -> str | None:
    """The wall time of all processes of the run, as people read it."""
    seconds = number(run.final.get("wall_seconds"))
    if seconds is None and run.info.get("seconds"):
        seconds = sum(filter(None, map(number, mapping(run.info["seconds"]).values())))
    if seconds is not None:
        return format_duration(seconds)
    created, finished = parse_moment(run.info.get("created")), parse_moment(run.info.get("finished"))
    if created is None or finished is None or (created.tzinfo is None) != (finished.tzinfo is None):
        return None
    return format_duration((finished - created).total_seconds())


def words(run: RunFiles) -> str:
    """Say in sentences what the numbers mean: how the run ended, overfitting, the uniform guess, lost time."""
    lines = [*_ending(run), *_not_finite(run), *_held_out(run), *_against_guess(run), *_lost(run)]
    items = "".join(f'<li class="{kind}">{text(line)}</li>' for kind, line in lines)
    return f'<ul class="words">{items}</ul>' if items else ""


def _ending(run: RunFiles) -> Iterator[tuple[str, str]]:
    last, planned = run.last_step, run.planned_steps
    reached = f"step {last or 0:,}" + ("" if planned is None else f" of {planned:,}")
    if run.status == "running":
        yield "", f"The run has not ended: it still trains, or was killed. The last row is of {reached}."
    elif run.status in ("preempted", "stopped"):
        yield "", f"The run was {run.status} at {reached}; the same command goes on from its newest checkpoint."
    elif run.status == "diverged":
        yield (
            "bad",
            "The run diverged: its gradients were not finite in too many steps in a row. The last row is of "
            f"{reached}. A lower optimizer.learning_rate, more warmup_steps or a lower optimizer.clip_norm may help.",
        )
    elif run.status == "failed":
        yield "bad", f"The run failed after {reached}; the same command goes on from its newest checkpoint."


def _not_finite(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Say where the training loss is lost; of a run that diverged it is said already."""
    if not run.is_lost("loss") or run.status == "diverged":
        return
    if "loss" not in run.series:
        yield "bad", "Training loss was never finite."
    else:
        steps, values = run.series["loss"]
        yield (
            "bad",
            f"Training loss is not finite; it last was at step {int(steps[-1]):,} ({rounded(float(values[-1]))}).",
        )


def _held_out(run: RunFiles) -> Iterator[tuple[str, str]]:
    best = run.best()
    is_lost = run.is_lost("eval_loss")
    if best is None:
        if is_lost:
            yield "bad", "Held-out loss was never finite."
        elif "loss" in run.series:
            yield "", "No held-out rows were evaluated: how the model does on rows that it has not seen is not known."
        return
    steps, values = run.series["eval_loss"]
    last_step, last = int(steps[-1]), float(values[-1])
    step, lowest = best
    if is_lost:
        yield (
            "bad",
            f"Held-out loss is not finite; it last was at step {last_step:,} ({rounded(last)}), and best at step "
            f"{step:,} ({rounded(lowest)}). A lower learning rate or a lower clip_norm may help.",
        )
        return
    rise = last - lowest
    if step == last_step or len(values) < 2:
        more = "" if len(values) < 2 else ", its last evaluation: more steps may lower it further"
        yield "good", f"Held-out loss was best at step {step:,} ({rounded(lowest)}){more}."
    elif rise <= _AS_GOOD * abs(lowest):
        yield (
            "good",
            f"Held-out loss was best at step {step:,} ({rounded(lowest)}) and has stayed there since "
            f"({rounded(last)} at step {last_step:,}).",
        )
    else:
        said = f"Held-out loss was best at step {step:,} ({rounded(lowest)}) and has risen by {rise:.2g} since"
        since = values[steps >= step]
        if (np.diff(since) < 0).any():
            yield "", f"{said}, up and down: the model may overfit, or the held-out rows are too few to tell."
        elif _training_fell_since(run, step):
            yield (
                "bad",
                f"{said}; training loss still falls: the model overfits. Fewer steps, more rows, dropout or weight "
                f"decay help{_keeping(run)}.",
            )
        else:
            yield "bad", f"{said}; training loss does not fall either: a lower learning rate may help."


def _keeping(run: RunFiles) -> str:
    """What keeps the best step, where the run does not do it."""
    if mapping(run.config.get("evaluation")).get("early_stopping") is not None:
        return "" if _keeps_best(run) else "; checkpoint.keep_best=true keeps the best step"
    if _keeps_best(run):
        return "; checkpoint.keep_best compares the steps that checkpoint.every saves, and with early stopping all"
    return "; checkpoint.keep_best=true keeps the best of the steps that checkpoint.every saves"


def _keeps_best(run: RunFiles) -> bool:
    return bool(mapping(run.config.get("checkpoint")).get("keep_best"))


def _training_fell_since(run: RunFiles, step: int) -> bool:
    """Whether the training loss at the end is below that around a step."""
    if "loss" not in run.series:
        return False
    steps, values = run.series["loss"]
    even = smoothed(values, run.starts("loss"))
    even = values if even is None else even
    end = run.end("loss")
    return end is not None and end < float(even[int(np.abs(steps - step).argmin())])


def _against_guess(run: RunFiles) -> Iterator[tuple[str, str]]:
    guess = run.baseline()
    held_out = run.last("eval_loss")
    loss = run.last("loss") if held_out is None else held_out
    if guess is None or loss is None:
        return
    name = "Training loss" if held_out is None else "Held-out loss"
    label = guess.name if guess.name == OF_MEAN else f"a {guess.name.replace(',', ' over', 1)}"
    if loss >= 0.98 * guess.value:
        yield (
            "bad",
            f"{name} ({rounded(loss)}) is no better than {label} ({rounded(guess.value)}): the "
            "model has learned nothing yet.",
        )
    else:
        yield "", f"{name} is {rounded(loss)}; {label} gives {rounded(guess.value)}."


def _lost(run: RunFiles) -> Iterator[tuple[str, str]]:
    spikes = run.last("spikes") or 0
    skipped = (run.last("skipped_steps") or 0) - spikes
    if skipped:
        steps = "1 step was" if skipped == 1 else f"{skipped:,.0f} steps were"
        yield "bad", f"{steps} skipped, because gradients were not finite or no target of the batch had a weight."
    if spikes:
        steps = "1 step was" if spikes == 1 else f"{spikes:,.0f} steps were"
        yield "bad", f"{steps} skipped as spikes of the loss or the gradient norm."
    found = run.info.get("rolled_back")
    for back in map(mapping, found if isinstance(found, list) else ()):
        spike, to, left_out = (number(back.get(key)) for key in ("from_step", "to_step", "num_batches"))
        yield "bad", f"A spike at step {spike} took the run back to step {to}; {left_out} batches were left out."
    seconds = mapping(run.info.get("seconds"))
    waited, stepped = number(seconds.get("waiting for data")), number(seconds.get("steps"))
    if waited and stepped is not None and waited > _LONG_WAIT * (waited + stepped):
        yield (
            "bad",
            f"{100 * waited / (waited + stepped):.0f} % of the time of the steps was spent waiting for data; a larger "
            "train.workers or train.prefetch, or smaller rows, may help.",
        )


def resumed_steps(info: Mapping[str, Any]) -> list[int]:
    """The steps after which a run was resumed."""
    found = info.get("resumed_after")
    return [step for step in found if isinstance(step, int)] if isinstance(found, list) else []
