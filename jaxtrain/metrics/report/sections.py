"""The parts of a report below its curves: time, checkpoints, settings, parameters, what ran."""

from jaxtrain.config.load import describe, load_config, value_text
from jaxtrain.config.optimizers import is_replaced
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.metrics.format import format_bytes, format_duration
from jaxtrain.metrics.history import flat
from jaxtrain.metrics.report.html import (
    breakable,
    facts,
    folded,
    grid,
    mapping,
    moment,
    number,
    rounded,
    section,
    soft,
)
from jaxtrain.metrics.report.run_files import RunFiles
from jaxtrain.metrics.throughput import OTHER, PARTS

# The colours of the page by their names in its style sheet.
_PART_COLORS = {
    **{"steps": "series-1", "waiting for data": "series-2", "compiling": "series-4", "evaluation": "series-3"},
    **{"saving": "series-5", "sampling": "series-6", "reading data": "series-7", "creating state": "series-8"},
}


def time_bar(run: RunFiles) -> str:
    """Show where the wall time went, as one stacked bar with its numbers."""
    recorded = mapping(run.info.get("seconds"))
    seconds = {part: recorded.get(part) or 0.0 for part in (*PARTS, OTHER)}
    total = sum(seconds.values())
    if total <= 0:
        return ""
    bar = key = ""
    for part, spent in sorted(seconds.items(), key=lambda item: (item[0] == OTHER, -item[1])):
        color = f"var(--{_PART_COLORS.get(part, 'line')})"
        label = f"{part}: {format_duration(spent)} ({100 * spent / total:.1f} %)"
        if spent >= 0.0005:
            bar += f'<span style="width:{100 * spent / total:.2f}%;background:{color}" title="{label}"></span>'
            key += f'<li><i style="background:{color}"></i>{label}</li>'
    starts = f", over {len(run.resumed_steps) + 1} starts of the run" if run.resumed_steps else ""
    note = f"{format_duration(total)} in all{starts}."
    body = f'{soft(note)}<div class="bar" role="img" aria-label="{note}">{bar}</div><ul class="bar-key">{key}</ul>'
    return section("Where the time went", body)


def checkpoints(run: RunFiles) -> str:
    """List the checkpoints of a run: step, size, held-out loss, and why each is kept."""
    from jaxtrain.checkpoint.directory import list_steps, read_info
    from jaxtrain.checkpoint.run_folder import checkpoint_folder

    try:
        folder = checkpoint_folder(run.run_dir)
        infos = {step: read_info(folder, step) for step in list_steps(folder)}
    except CheckpointError:  # there are none, or a run that trains deleted one meanwhile
        return ""
    settings = mapping(run.config.get("checkpoint"))
    values = {step: one.eval_loss for step, one in infos.items() if one.eval_loss is not None}
    best_of = "lowest held-out loss"
    if any(one.score is not None for one in infos.values()):
        values = {step: one.score for step, one in infos.items() if one.score is not None}
        best_of = "best evaluation"
    best = min(values, key=lambda step: (values[step], step)) if len(values) > 1 else None
    newest, every = sorted(infos)[-int(settings.get("keep_last") or 1) :], settings.get("keep_every")

    def reason(step: int) -> str:
        reasons = [best_of] if step == best else []
        reasons += [f"one of the newest {len(newest)}" if len(newest) > 1 else "newest"] if step in newest else []
        return ", ".join([*reasons, *([f"a multiple of {every:,}"] if every and step % every == 0 else [])])

    rows = [
        (f"{step:,}", rounded(one.eval_loss) or "-", format_bytes(one.num_bytes), reason(step), moment(one.saved_at))
        for step, one in infos.items()
    ]
    table = grid(("step", "held-out loss", "size", "kept as", "saved"), rows, numbers=(0, 1, 2))
    return section("Checkpoints", table if rows else "")


def settings(run: RunFiles) -> str:
    """Show the settings that differ from their defaults; all the others are folded."""
    own = {part: str(name) for part, name in mapping(run.info.get("from_python")).items() if name}
    every = {key: value_text(value) for key, value in flat(run.config).items() if not is_replaced(key, own)}
    try:
        described = describe(load_config(run.config)) if every else []
    except ConfigError:  # another version wrote it, and this one does not know its keys
        described = []
    if not described:
        return section("Settings", facts(every))
    changed = {
        key.path: (key.value, {"(required)": "required", key.value: ""}.get(key.default, key.default))
        for key in described
        if (key.value != key.default or key.path.endswith(".kind")) and not is_replaced(key.path, own)
    }
    shown = grid(("setting", "value", "default"), [(path, *values) for path, values in changed.items()])
    others = {path: value for path, value in every.items() if path not in changed}
    given = ", ".join(f"{part} {name}" for part, name in own.items())
    body = (f"<p>From Python: {breakable(given)}</p>" if own else "") + shown
    folded_rest = folded(f"the other {len(others)} settings", facts(others))
    return section("Settings that differ from the defaults", body + folded_rest)


def about(run: RunFiles) -> str:
    """Make the tables of the model, data, mesh and devices, and of versions."""
    info = run.info
    model, data, devices, host = (mapping(info.get(name)) for name in ("model", "data", "devices", "host"))
    count, commit = number(model.get("num_parameters")), info.get("git_commit")
    rows = {
        "model": model.get("name"),
        "parameters": None if count is None else f"{count:,}",
        "task": run.task,
        "data": data.get("description"),
        "data fingerprint": data.get("fingerprint"),
        "devices": f"{devices.get('count', '?')} x {devices['kind']}" if devices.get("kind") else None,
        "processes": devices.get("process_count"),
        "mesh": ", ".join(f"{axis} {size}" for axis, size in mapping(info.get("mesh")).items()),
        "choices of the step": info.get("choices"),
        "host": ", ".join(value for value in host.values() if isinstance(value, str)),
        "started": moment(info.get("created")),
        "finished": moment(info.get("finished")),
        "resumed after step": ", ".join(f"{step:,}" for step in run.resumed_steps),
        "command": " ".join(map(str, info.get("command") or ())),
    }
    versions = dict(mapping(info.get("versions")))
    versions["git commit"] = f"{commit} (with changes)" if info.get("git_dirty") else commit
    return section("Run", facts(rows)) + section("Versions", facts(versions))
