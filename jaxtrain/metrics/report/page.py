"""`report.html`: one page about a run that needs no network, no script and no other file."""

import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.metrics.format import format_bytes, format_count, format_duration
from jaxtrain.metrics.report.curves import Curve, curve, read_series, thin
from jaxtrain.metrics.report.plots import Plot, draw_svg
from jaxtrain.metrics.report.style import STYLE
from jaxtrain.runtime.files import write_text_atomic

Series = Mapping[str, tuple[np.ndarray, np.ndarray]]
_MOST_SAMPLE_CHARACTERS = 20_000
_UNITS = (("tokens", "tokens/s"), ("examples", "examples/s"))


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from `run.json`, `metrics.jsonl` and `sample.txt`; the file is replaced atomically.

    Args:
        run_dir: a run directory; the run may still be running. The page omits the parts whose files are missing.

    Returns:
        Path of the page.
    """
    run_dir = Path(run_dir)
    run = _read_run(run_dir / "run.json")
    series = read_series(run_dir / "metrics.jsonl")
    name = str(run.get("name") or run_dir.resolve().name)
    sections = [
        _header(name, run),
        _headline(run, series),
        _sample(run_dir / "sample.txt"),
        _curves(run, series),
        _about(run),
        _config(_mapping(run.get("config"))),
        _versions(run),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(name)} - jaxtrain</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )
    path = run_dir / "report.html"
    write_text_atomic(path, page)
    return path


def _read_run(path: Path) -> Mapping[str, Any]:
    try:
        return _mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        # A page without its header still shows the curves.
        return {}


def _header(name: str, run: Mapping[str, Any]) -> str:
    model = _mapping(run.get("model"))
    facts = [str(model.get("name") or "")]
    if isinstance(model.get("num_parameters"), int):
        facts.append(f"{model['num_parameters']:,} parameters")
    devices = _mapping(run.get("devices"))
    if devices.get("kind"):
        facts.append(f"{devices.get('count', 1)} x {devices['kind']}")
    facts.append(_moment(run.get("created")))
    status = str(run.get("status") or "unknown")
    kind = "good" if status == "done" else "plain" if status in ("running", "preempted", "unknown") else "bad"
    line = " · ".join(_text(fact) for fact in facts if fact)
    return f'<header><h1>{_text(name)} <span class="status {kind}">{_text(status)}</span></h1><p>{line}</p></header>'


def _headline(run: Mapping[str, Any], series: Series) -> str:
    """Make the row of the most important numbers."""
    final = _mapping(run.get("final"))

    def last(name: str) -> float | None:
        value = final.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
        # A null in the final metrics was a number that is not finite; an earlier value would not be the last one.
        return float(series[name][1][-1]) if name in series and name not in final else None

    def shown(name: str) -> str | None:
        return "not finite" if name in final and final[name] is None else _rounded(last(name))

    cards = [("final loss", shown("loss")), ("eval loss", shown("eval_loss"))]
    perplexity, eval_loss = last("eval_perplexity"), last("eval_loss")
    is_language = _is_language(run)
    if perplexity is None and eval_loss is not None and is_language and eval_loss < 50:
        perplexity = math.exp(eval_loss)
    cards.append(("eval perplexity", _rounded(perplexity)))
    accuracy = last("eval_accuracy")
    cards.append(("eval accuracy", None if accuracy is None else f"{100 * accuracy:.2f} %"))
    for unit, label in _UNITS:
        if f"{unit}_per_second" in series:
            # The median is the usual rate: the last window may include a save or an evaluation.
            cards.append((label, format_count(float(np.median(series[f"{unit}_per_second"][1])))))
    if "model_flops_utilization" in series:
        utilization = float(np.median(series["model_flops_utilization"][1]))
        cards.append(("model FLOPs utilization", f"{100 * utilization:.1f} %"))
    cards.append(("wall time", _wall_time(run, final)))
    if "device_memory_bytes" in series:
        cards.append(("peak device memory", format_bytes(float(series["device_memory_bytes"][1].max()))))
    for unit, _ in _UNITS:
        if unit in series:
            cards.append((f"{unit} seen", format_count(float(series[unit][1][-1]))))
    steps = max((float(steps[-1]) for steps, _ in series.values()), default=None)
    cards.append(("steps", None if steps is None else f"{steps:,.0f}"))
    skipped = last("skipped_steps")
    if skipped:
        cards.append(("skipped steps", f"{skipped:.0f}"))
    items = "".join(f"<div><dd>{_text(value)}</dd><dt>{_text(label)}</dt></div>" for label, value in cards if value)
    return f'<dl class="cards">{items}</dl>' if items else ""


def _sample(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if len(text) > _MOST_SAMPLE_CHARACTERS:
        text = text[:_MOST_SAMPLE_CHARACTERS] + "\n[...]"
    return f"<section><h2>Sample</h2><pre>{_text(text)}</pre></section>"


def _curves(run: Mapping[str, Any], series: Series) -> str:
    plots = _plots(run, series)
    if not plots:
        return "<section><h2>Curves</h2><p>No metrics were logged yet.</p></section>"
    figures = "\n".join(
        f"<figure><figcaption>{_text(plot.title)}</figcaption>{draw_svg(plot, prefix=f'plot{index}')}</figure>"
        for index, plot in enumerate(plots)
    )
    is_thinned = any(line.is_thinned for plot in plots for _, line in plot.curves)
    note = (
        "<p>Lines are means over neighbouring rows; bands show the smallest and largest value of these rows.</p>"
        if is_thinned
        else ""
    )
    return f'<section><h2>Curves</h2>{note}<div class="plots">{figures}</div></section>'


def _is_language(run: Mapping[str, Any]) -> bool:
    """Return whether the loss is that of a language model; a task from Python is not in the config."""
    own = _mapping(run.get("from_python")).get("task")
    return (own or _mapping(run.get("config")).get("task")) == "language_modeling"


def _plots(run: Mapping[str, Any], series: Series) -> list[Plot]:
    """Choose the pictures for the metrics that were logged."""
    is_language = _is_language(run)
    loss_unit = "loss (nats per token)" if is_language else "loss"
    rate_unit = next((label for unit, label in _UNITS if f"{unit}_per_second" in series), "")
    rates = {"tokens": "tokens_per_second", "examples": "examples_per_second"}

    def lines(names: Mapping[str, str]) -> list[tuple[str, Curve]]:
        return [(label, line) for label, name in names.items() if (line := curve(series, name)) is not None]

    plots = [
        Plot("Loss", loss_unit, lines({"train": "loss", "eval": "eval_loss"}), may_be_log=True),
        Plot("Accuracy", "share correct", lines({"train": "accuracy", "eval": "eval_accuracy"}), from_zero=True),
        Plot("Learning rate", "learning rate", lines({"learning rate": "learning_rate"})),
        Plot("Throughput", rate_unit, lines(rates), from_zero=True),
        Plot("Gradient norm", "global norm", lines({"gradient norm": "grad_norm"}), may_be_log=True),
        _time_plot(series),
    ]
    return [plot for plot in plots if plot.curves]


def _time_plot(series: Series) -> Plot:
    times = {"step": "step_seconds", "data wait": "data_wait_seconds"}
    times = {label: series[name] for label, name in times.items() if name in series}
    if all(len(steps) > 2 for steps, _ in times.values()):
        # The first step warms everything up; several times slower, it would press the others against the axis.
        times = {label: (steps[1:], values[1:]) for label, (steps, values) in times.items()}
    in_milliseconds = max((float(values.max()) for _, values in times.values()), default=0.0) < 1
    factor, unit = (1e3, "milliseconds") if in_milliseconds else (1.0, "seconds")
    lines = [(label, thin(steps, factor * values)) for label, (steps, values) in times.items()]
    return Plot("Step time and data wait", unit, lines)


def _about(run: Mapping[str, Any]) -> str:
    """Make the table of the model, data, mesh and devices."""
    rows: dict[str, Any] = {}
    model, data, devices = (_mapping(run.get(name)) for name in ("model", "data", "devices"))
    rows["model"] = model.get("name")
    rows["parameters"] = f"{model['num_parameters']:,}" if isinstance(model.get("num_parameters"), int) else None
    rows["data"] = data.get("description")
    rows["data fingerprint"] = data.get("fingerprint")
    rows["devices"] = f"{devices.get('count', '?')} x {devices['kind']}" if devices.get("kind") else None
    rows["processes"] = devices.get("process_count")
    rows["mesh"] = ", ".join(f"{axis} {size}" for axis, size in _mapping(run.get("mesh")).items())
    rows["host"] = ", ".join(str(value) for value in _mapping(run.get("host")).values() if isinstance(value, str))
    rows["started"] = _moment(run.get("created"))
    rows["finished"] = _moment(run.get("finished"))
    command = run.get("command")
    rows["command"] = " ".join(str(part) for part in command) if isinstance(command, list) else command
    table = _table(rows)
    return f"<section><h2>Run</h2>{table}</section>" if table else ""


def _config(config: Mapping[str, Any]) -> str:
    """Make the tables of the resolved config, one per group."""
    if not config:
        return ""
    single = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    groups = [("run", single), *((key, value) for key, value in config.items() if isinstance(value, Mapping))]
    tables = "".join(
        f"<div><h3>{_text(name)}</h3>{_table(dict(_flat(group)), keep_empty=True)}</div>"
        for name, group in groups
        if group
    )
    return f'<section><h2>Config</h2><div class="groups">{tables}</div></section>'


def _flat(group: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in group.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _versions(run: Mapping[str, Any]) -> str:
    rows = dict(_mapping(run.get("versions")))
    commit = run.get("git_commit")
    if commit:
        rows["git commit"] = f"{commit} (with changes)" if run.get("git_dirty") else commit
    table = _table(rows)
    return f"<section><h2>Versions</h2>{table}</section>" if table else ""


def _table(rows: Mapping[str, Any], *, keep_empty: bool = False) -> str:
    """Make a table of keys and values; a list of texts has one line per text."""
    cells = []
    for key, value in rows.items():
        if value in (None, "") and not keep_empty:
            continue
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            shown = "<br>".join(_text(item) for item in value)
        else:
            shown = _text(value if isinstance(value, str) else json.dumps(value, default=str))
        cells.append(f"<tr><th>{_text(key)}</th><td>{shown}</td></tr>")
    return f"<table>{''.join(cells)}</table>" if cells else ""


def _wall_time(run: Mapping[str, Any], final: Mapping[str, Any]) -> str | None:
    seconds = final.get("wall_seconds")
    if isinstance(seconds, (int, float)):
        return format_duration(seconds)
    created, finished = _parse(run.get("created")), _parse(run.get("finished"))
    if created is None or finished is None or (created.tzinfo is None) != (finished.tzinfo is None):
        return None
    return format_duration((finished - created).total_seconds())


def _moment(value: object) -> str:
    moment = _parse(value)
    return "" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S %Z").strip()


def _parse(value: object) -> datetime | None:
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    """Escape a text for HTML; control characters, which a sample of raw bytes may hold, become visible characters."""
    text = "".join(character if character >= " " or character in "\n\t" else "\ufffd" for character in str(value))
    return escape(text, quote=True)
