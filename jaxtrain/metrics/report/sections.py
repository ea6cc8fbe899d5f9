"""The parts of a report below its curves: mistakes, rows, time, checkpoints, settings, parameters, what ran."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.config.files import is_replaced
from jaxtrain.config.load import describe, load_config, value_text
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.metrics.format import format_bytes, format_count, format_duration
from jaxtrain.metrics.history import flat, read_rows
from jaxtrain.metrics.report.html import (
    breakable,
    facts,
    folded,
    grid,
    mapping,
    moment,
    number,
    picture,
    rounded,
    section,
    soft,
    text,
)
from jaxtrain.metrics.report.run_files import RunFiles, read_json
from jaxtrain.metrics.time_spent import OTHER, PARTS, read_restarts

_MOST_CLASSES, _MOST_CONFUSIONS, _LONG_NAME = 20, 10, 5
_MOST_LOGGED = 24
_MOST_PARAMETERS, _FEW_PARAMETERS = 400, 12
# The colours of the page by their names in its style sheet.
_PART_COLORS = {
    **{"steps": "series-1", "waiting for data": "series-2", "compiling": "series-4", "evaluation": "series-3"},
    **{"saving": "series-5", "sampling": "series-6", "reading data": "series-7", "creating state": "series-8"},
    **{"starting": "ink", "lost steps": "series-1", "restarting": "series-8"},
}


def logged(run: RunFiles) -> str:
    """Show what callbacks logged beside numbers: the last histogram and the last image of each name."""
    found: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for row in read_rows(run.run_dir / "metrics.jsonl"):
        found |= {name: (row["step"], value) for name, value in row.items() if isinstance(value, dict)}
    figures = "".join(
        f"<figure><figcaption>{text(name)}, step {step:,}</figcaption>"
        f"{picture(value['png'], name) if 'png' in value else _bars(value['counts'], value['edges'])}</figure>"
        for name, (step, value) in list(found.items())[:_MOST_LOGGED]
    )
    return section("Logged by callbacks", f'<div class="plots">{figures}</div>' if figures else "")


def _bars(counts: Sequence[float], edges: Sequence[float]) -> str:
    highest, wide = max([*counts, 1]), 320 / max(len(counts), 1)
    bars = "".join(
        f'<rect x="{place * wide:.1f}" y="{90 * (1 - count / highest):.1f}" width="{wide:.1f}" '
        f'height="{90 * count / highest:.1f}"/>'
        for place, count in enumerate(counts)
        if count
    )
    ends = f'<text y="104" class="soft">{edges[0]:.3g}</text>' + (
        f'<text x="320" y="104" text-anchor="end" class="soft">{edges[-1]:.3g}</text>'
    )
    return f'<svg viewBox="0 0 320 108"><g fill="var(--series-1)">{bars}</g>{ends}</svg>'


def mistakes(run: RunFiles) -> str:
    """Show what a classifier gets wrong, from `held_out.json`: the confusion matrix, and the worst mistakes."""
    found = read_json(run.run_dir / "held_out.json")
    if found.get("task") != "classification":
        return ""
    rows, right, step = (int(number(found.get(key)) or 0) for key in ("rows", "right", "step"))
    of_rows = int(number(found.get("of_rows")) or rows)
    spread = f" (spread over {of_rows:,})" if of_rows > rows else ""
    past = ", an earlier end of this run" if (run.last_step or 0) > step else ""
    note = f"{right:,} of {rows:,} held-out rows{spread} were classified correctly after step {step:,}{past}."
    ignored = int(number(found.get("read")) or rows) - rows
    if ignored > 0:
        note += f" {ignored:,} further rows are not counted, for an ignored target or the weight 0."
    if right == rows:
        return section("Mistakes", soft(note))
    listed = found.get("classes")
    names = list(map(str, listed)) if isinstance(listed, list) else []
    columns = [part for part in (_confusions(found, names), _worst(found, names)) if part]
    return section(
        "Mistakes", soft(note) + f'<div class="beside">{"".join(f"<div>{one}</div>" for one in columns)}</div>'
    )


def _class(names: Sequence[str], number: int) -> str:
    return names[number] if 0 <= number < len(names) else str(number)


def _cells(found: Mapping[str, Any], key: str) -> dict[tuple[int, int], int]:
    return {(cell[0], cell[1]): cell[2] for cell in found.get(key) or () if isinstance(cell, list) and len(cell) == 3}


def _confusions(found: Mapping[str, Any], names: Sequence[str]) -> str:
    """A row per class and a column per prediction, shaded by the share of the row; many classes are told in words."""
    cells, count = _cells(found, "matrix"), int(number(found.get("num_classes")) or 0)
    if not cells or not 2 <= count <= _MOST_CLASSES:
        items = "".join(
            f"<li>{text(_class(names, target))} taken for {text(_class(names, predicted))}: "
            f"{times:,} {'time' if times == 1 else 'times'}</li>"
            for (target, predicted), times in list(_cells(found, "confusions").items())[:_MOST_CONFUSIONS]
        )
        return f'<h3>Most frequent confusions</h3><ul class="words">{items}</ul>' if items else ""
    # Long names would make the columns wide: these have the numbers of the classes, which the rows explain.
    is_numbered = any(len(_class(names, i)) > _LONG_NAME for i in range(count))
    labels = [text(_class(names, i)) for i in range(count)]
    head = "".join(f'<th title="{label}">{i if is_numbered else label}</th>' for i, label in enumerate(labels))
    lines = []
    for target, label in enumerate(labels):
        whole, row = sum(cells.get((target, predicted), 0) for predicted in range(count)), ""
        for predicted in range(count):
            here = cells.get((target, predicted), 0)
            color = "var(--series-1)" if target == predicted else "var(--series-2)"
            # The square root lifts the few mistakes of a good classifier above the page's colour.
            strength = round(70 * math.sqrt(here / whole)) if whole else 0
            style = f' style="background:color-mix(in srgb,{color} {strength}%,transparent)"' if here else ""
            row += f'<td{style} title="{label} taken for {labels[predicted]}: {here} of {whole}">{here or "·"}</td>'
        shown = f"{target} {label}" if is_numbered else label
        lines.append(f'<tr><th scope="row" title="{label}">{shown}</th>{row}</tr>')
    return (
        f"<h3>Confusion matrix</h3>{soft('A row is a class, a column what the model took it for.')}"
        f'<div class="wide"><table class="matrix"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _worst(found: Mapping[str, Any], names: Sequence[str]) -> str:
    items = []
    for one in map(mapping, found.get("mistakes") or ()):
        row, target, predicted = (number(one.get(key)) for key in ("row", "target", "predicted"))
        if row is None or target is None or predicted is None:
            continue
        sure, loss = number(one.get("confidence")), rounded(number(one.get("loss"))) or "not finite"
        items.append(
            f"<li>{picture(one.get('picture'), f'held-out row {row}')}<b>{text(_class(names, int(target)))}</b> taken "
            f"for <b>{text(_class(names, int(predicted)))}</b>{'' if sure is None else f', {100 * sure:.0f} % sure'}"
            f'<br><span class="soft">row {row:,}, loss {loss}</span></li>'
        )
    note = "The wrong predictions of the largest loss; rows are numbered within the held-out rows, from 0."
    return f'<h3>Worst mistakes</h3>{soft(note)}<ul class="mistakes">{"".join(items)}</ul>' if items else ""


def chats(run: RunFiles) -> str:
    """Show what a run on chats read, from `rows.json`: its first conversations, and what was cut or dropped."""
    found = read_json(run.run_dir / "rows.json")
    counts = mapping(found.get("counts"))
    nouns = {"conversations": "conversations", "pairs": "pairs of answers", "tokens": "tokens"}
    said = [f"{counts[key]:,} {noun}" for key, noun in nouns.items() if number(counts.get(key)) is not None]
    if counts.get("tokens") and "trained_tokens" in counts:
        said.append(f"{100 * counts['trained_tokens'] / counts['tokens']:.0f} % of them with a loss")
    if "row_length" in counts:
        cut, dropped = counts.get("cut") or 0, counts.get("dropped") or 0
        said.append(f"{cut:,} cut to {counts['row_length']:,} tokens, {dropped:,} dropped")
    shown = ""
    for part in map(mapping, found.get("parts") or ()):
        words = "".join(
            f'<span class="{"trained" if span.get("trained") else "untrained"}">{text(span.get("text", ""))}</span>'
            for span in map(mapping, part.get("spans") or ())
        )
        sizes = f"{part.get('tokens') or 0:,} tokens, {part.get('trained') or 0:,} with a loss"
        title = text(f"row {part.get('row') or 0}, {part.get('name')}: {sizes}")
        shown += f'<figure class="chat"><figcaption>{title}</figcaption><pre>{words}</pre></figure>'
    key = (
        '<p class="key"><b class="trained">tokens with a loss</b> and <span class="untrained">tokens that the model '
        "only reads</span></p>"
    )
    return section("Rows as the model sees them", f"<p>{text(', '.join(said))}.</p>{key}{shown}" if shown else "")


def time_bar(run: RunFiles) -> str:
    """Show where the wall time went, as one stacked bar with its numbers; below it the restarts, if there were any."""
    recorded = mapping(run.info.get("seconds"))
    seconds = {part: number(recorded.get(part)) or 0.0 for part in ("steps", *PARTS, OTHER)}
    total = sum(seconds.values())
    if total <= 0:
        return ""
    bar = key = ""
    for part, spent in sorted(seconds.items(), key=lambda item: (item[0] == OTHER, -item[1])):
        color = f"var(--{_PART_COLORS.get(part, 'line')})"
        if part in ("lost steps", "restarting"):  # told apart from the others without its color too
            color = f"repeating-linear-gradient(45deg,{color} 0 4px,transparent 4px 8px)"
        share = 100 * spent / total
        label = f"{part}: {format_duration(spent)} ({share:.1f} %)"
        if spent >= 0.0005:
            bar += f'<span style="width:{share:.2f}%;background:{color}" title="{label}"></span>'
            key += f'<li><i style="background:{color}"></i>{label}</li>'
    starts = f", over {len(run.resumed_steps) + 1} starts of the run" if run.resumed_steps else ""
    note = f"{format_duration(total)} in all{starts}."
    cost = seconds["lost steps"] + seconds["restarting"]
    goodput = f"Goodput {100 * seconds['steps'] / total:.1f} %: the share of the time that went into steps that count. "
    if cost:
        goodput += f"Failures cost {format_duration(cost)}: lost steps, and the time until the run went on (hatched)."
    body = f'{soft(note)}<div class="bar" role="img" aria-label="{note}">{bar}</div><ul class="bar-key">{key}</ul>'
    return section("Where the time went", body + (soft(goodput) if cost else "") + _restarts(run))


def _restarts(run: RunFiles) -> str:
    """List the failures after which a supervisor started the run again."""
    rows = read_restarts(run.run_dir)
    shown = [
        (
            moment(row.get("time")),
            row.get("signal") or f"exit code {row.get('exit_code')}",
            *(f"{number(row.get(key)) or 0:,}" for key in ("step", "saved_step", "lost_steps")),
        )
        for row in rows
    ]
    table = grid(("failed", "how", "at step", "newest checkpoint", "lost steps"), shown, numbers=(2, 3, 4))
    return folded("1 restart:" if len(rows) == 1 else f"{len(rows)} restarts:", table) if rows else ""


def checkpoints(run: RunFiles) -> str:
    """List the checkpoints of a run: step, size, held-out loss, and why each is kept."""
    from jaxtrain.checkpoint.directory import live_steps, read_info
    from jaxtrain.checkpoint.run_folder import checkpoint_folder

    try:
        folder = checkpoint_folder(run.run_dir)
        infos = {step: read_info(folder, step) for step in live_steps(folder)}
    except CheckpointError:  # there are none, or a run that trains deleted one meanwhile
        return ""
    settings = mapping(run.config.get("checkpoint"))
    steps, values = run.series.get("eval_loss", ((), ()))
    losses = {int(step): value for step, value in zip(steps, values, strict=True) if int(step) in infos}
    best = min(losses, key=lambda step: (losses[step], step)) if len(losses) > 1 else None
    newest, every = sorted(infos)[-int(settings.get("keep_last") or 1) :], settings.get("keep_every")

    def reason(step: int) -> str:
        reasons = ["lowest held-out loss"] if step == best else []
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
        key.path: (key.value, "required" if key.default == "(required)" else key.default)
        for key in described
        if (key.value != key.default or key.path.endswith(".kind")) and not is_replaced(key.path, own)
    }
    shown = grid(("setting", "value", "default"), [(path, *values) for path, values in changed.items()])
    others = {path: value for path, value in every.items() if path not in changed}
    given = ", ".join(f"{part} {name}" for part, name in own.items())
    body = (f"<p>From Python: {breakable(given)}</p>" if own else "") + shown
    folded_rest = folded(f"the other {len(others)} settings", facts(others))
    return section("Settings that differ from the defaults", body + folded_rest)


def parameters(run: RunFiles) -> str:
    """List the parameters; many are folded by the first part of their paths."""
    rows: dict[str, list[tuple[str, str, str, int, str]]] = {}
    for path, described in mapping(run.info.get("parameters")).items():
        found = re.fullmatch(r"(\w+)\[([\d,]*)\](?: (.*))?", str(described))
        if found is not None:
            shape = [int(size) for size in found[2].split(",") if size]
            row = (path, " x ".join(map(str, shape)) or "scalar", found[1], math.prod(shape), found[3] or "")
            rows.setdefault(path.partition("/")[0], []).append(row)
    total, count = sum(row[3] for group in rows.values() for row in group), sum(map(len, rows.values()))
    if not rows:
        return ""

    def share(numbers: int) -> str:
        return f"{100 * numbers / max(total, 1):.1f} %"

    def table(group: Sequence[tuple[str, str, str, int, str]]) -> str:
        cells = [
            (path, shape, dtype, f"{size:,}", share(size), sharding.replace(",", ", ") or "replicated")
            for path, shape, dtype, size, sharding in group
        ]
        return grid(("path", "shape", "dtype", "numbers", "share", "sharding"), cells, numbers=(3, 4))

    body, left = "", _MOST_PARAMETERS
    for name, group in rows.items():
        size, shown = sum(row[3] for row in group), group[: max(0, left)]
        left -= len(shown)
        more = f"and {len(group) - len(shown):,} more" if len(shown) < len(group) else ""
        noun = "array" if len(group) == 1 else "arrays"
        body += folded(f"{name}: {size:,} ({share(size)}) in {len(group)} {noun}", table(shown) + soft(more))
    if count <= _FEW_PARAMETERS:
        body = table([row for group in rows.values() for row in group])
    mesh = ", ".join(f"{axis} {size}" for axis, size in mapping(run.info.get("mesh")).items() if size != 1)
    head = f"{total:,} numbers ({format_count(total)}) in {count} arrays.{f' Mesh: {mesh}.' if mesh else ''}"
    return section("Parameters", soft(head) + body)


def about(run: RunFiles) -> str:
    """Make the tables of the model, data, mesh and devices, and of versions."""
    info = run.info
    model, data, devices, host = (mapping(info.get(name)) for name in ("model", "data", "devices", "host"))
    command, commit = info.get("command"), info.get("git_commit")
    rows = {
        "model": model.get("name"),
        "parameters": None if model.get("num_parameters") is None else f"{model['num_parameters']:,}",
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
        "command": " ".join(map(str, command)) if isinstance(command, list) else command,
    }
    versions = dict(mapping(info.get("versions")))
    versions["git commit"] = f"{commit} (with changes)" if info.get("git_dirty") else commit
    return section("Run", facts(rows)) + section("Versions", facts(versions))
