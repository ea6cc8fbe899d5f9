"""The tables of a report: checkpoints, settings, parameters, and what ran."""

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.files import is_replaced
from jaxtrain.config.load import describe, load_config, value_text
from jaxtrain.config.schema import is_higher_better
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.metrics.report.files import RunFiles
from jaxtrain.metrics.report.headline import resumed_steps
from jaxtrain.metrics.report.html import breakable, facts, folded, grid, mapping, moment, number, section, text
from jaxtrain.metrics.runinfo import compared_after

_MOST_PARAMETERS = 400
_FEW_PARAMETERS = 12


def checkpoints(run: RunFiles) -> str:
    """List the checkpoints of a run: step, size, held-out loss, and why each is kept."""
    from jaxtrain.checkpoint.directory import read_info
    from jaxtrain.checkpoint.going_back import live_steps
    from jaxtrain.checkpoint.where import checkpoint_folder

    try:
        folder = checkpoint_folder(run.run_dir)
        steps = live_steps(folder)
    except CheckpointError:
        return ""
    if not steps:
        return ""
    settings = mapping(run.config.get("checkpoint"))
    keep_last, keep_every = int(number(settings.get("keep_last")) or 1), number(settings.get("keep_every"))
    stopping = mapping(mapping(run.config.get("evaluation")).get("early_stopping"))
    metric = str(stopping.get("metric") or "eval_loss")
    sign = -1.0 if is_higher_better(metric, stopping.get("mode")) else 1.0
    # Scores in the records of earlier parts of a run may be of another metric.
    evaluated = {int(step): sign * float(value) for step, value in zip(*run.series.get(metric, ((), ())), strict=True)}
    after = compared_after(run.info)
    after = after if any(step > after for step in evaluated) else 0
    evaluated = {step: value for step, value in evaluated.items() if step > after}
    rows, losses = [], {}
    for step in steps:
        try:
            info = read_info(folder, step)
        except CheckpointError:
            # A run that trains deletes old steps meanwhile.
            if step in live_steps(folder):
                rows.append((step, "-", "damaged", "-"))
            continue
        losses[step] = evaluated.get(step, info.eval_loss if metric == "eval_loss" else info.score)
        loss = "-" if info.eval_loss is None else f"{info.eval_loss:.4g}"
        rows.append((step, loss, format_bytes(info.num_bytes), moment(info.saved_at)))
    scored = {step: loss for step, loss in losses.items() if loss is not None and step > after}
    best = min(scored, key=lambda step: (scored[step], step)) if len(scored) > 1 else None
    # Without early stopping, the best evaluation may be of a step that was not saved.
    is_lowest = best is not None and scored[best] <= min(evaluated.values(), default=scored[best])

    def reason(step: int) -> str:
        reasons = []
        if step == best:
            named = "lowest held-out loss" if metric == "eval_loss" else f"best {metric}"
            reasons.append(named + ("" if settings.get("keep_best") and is_lowest else " of these"))
        if step in steps[-keep_last:]:
            reasons.append("newest" if step == steps[-1] else f"one of the newest {keep_last}")
        if keep_every and step % keep_every == 0:
            reasons.append(f"a multiple of {keep_every:,}")
        return ", ".join(reasons)

    table = grid(
        ("step", "held-out loss", "size", "kept as", "saved"),
        [(f"{step:,}", loss, size, reason(step), saved) for step, loss, size, saved in rows],
        numbers=(0, 1, 2),
    )
    return section("Checkpoints", table)


def settings(run: RunFiles) -> str:
    """Show the settings that differ from their defaults; all the others are folded."""
    config = run.config
    if not config:
        return ""
    own = {part: str(name) for part, name in mapping(run.info.get("from_python")).items() if name}
    every = {key: value_text(value) for key, value in flat(config).items() if not is_replaced(key, own)}
    try:
        described = [key for group in describe(load_config(config)) for key in group.keys]
        keys = [key for key in described if not is_replaced(key.path, own)]
    except ConfigError:
        # Another version wrote it, and this one does not know its keys.
        return section("Settings", facts(every, keep_empty=True))
    changed = {
        key.path: (key.value, "required" if key.default == "(required)" else key.default)
        for key in keys
        if key.value != key.default and not key.path.startswith("compiler_options")
    }
    kinds = {key.path: key.value for key in keys if key.path.endswith(".kind") and key.path not in changed}
    shown = grid(("setting", "value", "default"), [(path, *values) for path, values in changed.items()])
    others = {path: value for path, value in every.items() if path not in changed}
    note = ", ".join(f"{path} {value}" for path, value in kinds.items())
    given = ", ".join(f"{part} {name}" for part, name in own.items())
    body = f"<p>From Python: {breakable(given)}</p>" if own else ""
    body += (shown if changed else '<p class="soft">Every setting has its default.</p>') + (
        f'<p class="soft">{breakable(note)}</p>' if note else ""
    )
    return section(
        "Settings that differ from the defaults", body + folded(f"the other {len(others)} settings", facts(others))
    )


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested config to dotted keys; an empty group is a value of its own."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{path}.")
        else:
            found[path] = dict(value) if isinstance(value, Mapping) else value
    return found


def parameters(run: RunFiles) -> str:
    """List the parameters, grouped by the first part of their paths; many are folded group by group."""
    recorded = mapping(run.info.get("parameters"))
    rows = [row for path, described in recorded.items() if (row := _parameter(str(path), described)) is not None]
    if not rows:
        return ""
    total = sum(row[3] for row in rows)
    groups: dict[str, list[tuple[str, str, str, int, str]]] = {}
    for row in rows:
        groups.setdefault(row[0].partition("/")[0], []).append(row)
    with_sharding = any(row[4] for row in rows)
    parts, shown = [], 0
    for name, members in groups.items():
        count = sum(row[3] for row in members)
        kept = members[: max(0, _MOST_PARAMETERS - shown)]
        shown += len(kept)
        table = _parameter_table(kept, total, with_sharding=with_sharding)
        if len(kept) < len(members):
            table += f'<p class="soft">and {len(members) - len(kept):,} more</p>'
        noun = "array" if len(members) == 1 else "arrays"
        parts.append((f"{name}: {count:,} ({_share(count, total)}) in {len(members)} {noun}", table))
    if len(rows) <= _FEW_PARAMETERS:
        body = _parameter_table(rows, total, with_sharding=with_sharding)
    else:
        body = "".join(folded(summary, table) for summary, table in parts)
    mesh = ", ".join(f"{axis} {size}" for axis, size in mapping(run.info.get("mesh")).items() if size != 1)
    where = f" Mesh: {mesh}." if mesh else ""
    head = f"{total:,} numbers ({format_count(total)}) in {len(rows)} arrays.{where}"
    return section("Parameters", f'<p class="soft">{text(head)}</p>{body}')


def _parameter(path: str, described: object) -> tuple[str, str, str, int, str] | None:
    """(path, shape, dtype, count, sharding) of a line of `run.json`; None where it is no such line."""
    found = re.fullmatch(r"(\w+)\[([\d,]*)\](?: (.*))?", str(described))
    if found is None:
        return None
    shape = [int(size) for size in found[2].split(",") if size]
    return path, " x ".join(map(str, shape)) or "scalar", found[1], math.prod(shape), found[3] or ""


def _parameter_table(rows: list[tuple[str, str, str, int, str]], total: int, *, with_sharding: bool) -> str:
    header = ("path", "shape", "dtype", "numbers", "share")
    cells = [(path, shape, dtype, f"{count:,}", _share(count, total)) for path, shape, dtype, count, _ in rows]
    if with_sharding:
        sharding = [row[4].replace(",", ", ") or "replicated" for row in rows]
        return grid(
            (*header, "sharding"), [(*row, one) for row, one in zip(cells, sharding, strict=True)], numbers=(3, 4)
        )
    return grid(header, cells, numbers=(3, 4))


def _share(count: int, total: int) -> str:
    share = 100 * count / total if total else 0.0
    return "<0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"


def about(run: RunFiles) -> str:
    """Make the table of the model, data, mesh and devices."""
    info = run.info
    rows: dict[str, Any] = {}
    model, data, devices = (mapping(info.get(name)) for name in ("model", "data", "devices"))
    rows["model"] = model.get("name")
    rows["parameters"] = f"{model['num_parameters']:,}" if isinstance(model.get("num_parameters"), int) else None
    rows["task"] = run.task
    from_python = [part for part, name in mapping(info.get("from_python")).items() if name is not None]
    rows["given from Python"] = ", ".join(from_python)
    rows["data"] = data.get("description")
    rows["data fingerprint"] = data.get("fingerprint")
    rows["devices"] = f"{devices.get('count', '?')} x {devices['kind']}" if devices.get("kind") else None
    rows["processes"] = devices.get("process_count")
    rows["mesh"] = ", ".join(f"{axis} {size}" for axis, size in mapping(info.get("mesh")).items())
    choices = info.get("choices")
    rows["choices of the step"] = [str(choice) for choice in choices] if isinstance(choices, list) else None
    rows["choices of the step"] = rows["choices of the step"] or None
    rows["host"] = ", ".join(str(value) for value in mapping(info.get("host")).values() if isinstance(value, str))
    rows["started"] = moment(info.get("created"))
    rows["finished"] = moment(info.get("finished"))
    rows["resumed after step"] = ", ".join(f"{step:,}" for step in resumed_steps(info))
    command = info.get("command")
    rows["command"] = " ".join(str(part) for part in command) if isinstance(command, list) else command
    return section("Run", facts(rows))


def versions(run: RunFiles) -> str:
    """Make the table of the versions of packages and of the code."""
    rows = dict(mapping(run.info.get("versions")))
    commit = run.info.get("git_commit")
    if commit:
        rows["git commit"] = f"{commit} (with changes)" if run.info.get("git_dirty") else commit
    return section("Versions", facts(rows))
