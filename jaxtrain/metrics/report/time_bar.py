"""Where the time of a run went, and the failures after which it was started again, as parts of the report."""

from pathlib import Path

from jaxtrain.metrics.format import format_duration
from jaxtrain.metrics.report.files import RunFiles
from jaxtrain.metrics.report.headline import resumed_steps
from jaxtrain.metrics.report.html import folded, grid, mapping, moment, number, section, text
from jaxtrain.metrics.time_spent import OTHER, PARTS, read_restarts


def _hatched(color: str) -> str:
    """The background of time that a failure cost, told apart from the others without its color too."""
    return f"repeating-linear-gradient(45deg,{color} 0 4px,transparent 4px 8px)"


_BAR_COLORS = {
    "steps": "var(--series-1)",
    "waiting for data": "var(--series-2)",
    "compiling": "var(--series-4)",
    "evaluation": "var(--series-3)",
    "saving": "var(--series-5)",
    "sampling": "var(--series-6)",
    "reading data": "var(--series-7)",
    "creating state": "var(--series-8)",
    "starting": "var(--ink)",
    "lost steps": _hatched("var(--series-1)"),
    "restarting": _hatched("var(--series-8)"),
    OTHER: "var(--line)",
}
_FEW_RESTARTS = 5


def time_bar(run: RunFiles) -> str:
    """Show where the wall time went, as one stacked bar with its numbers; below it the restarts, if there were any."""
    recorded = mapping(run.info.get("seconds"))
    seconds = {part: number(recorded.get(part)) or 0.0 for part in ("steps", *PARTS, OTHER)}
    total = sum(seconds.values())
    if total <= 0:
        return ""
    bar, key = [], []
    for part, spent in sorted(seconds.items(), key=lambda item: (item[0] == OTHER, -item[1])):
        share = 100 * spent / total
        if spent < 0.0005:
            continue
        label = f"{part}: {format_duration(spent)} ({share:.1f} %)"
        bar.append(f'<span style="width:{share:.2f}%;background:{_BAR_COLORS[part]}" title="{text(label)}"></span>')
        key.append(f'<li><i style="background:{_BAR_COLORS[part]}"></i>{text(label)}</li>')
    resumed = resumed_steps(run.info)
    over = f", over {len(resumed) + 1} starts of the run" if resumed else ""
    note = f'<p class="soft">{format_duration(total)} in all{over}.</p>'
    spoken = text(f"where {format_duration(total)} went")
    return section(
        "Where the time went",
        f'{note}<div class="bar" role="img" aria-label="{spoken}">{"".join(bar)}</div>'
        f'<ul class="bar-key">{"".join(key)}</ul>{_goodput(seconds, total)}{_restarts(run)}',
    )


def _goodput(seconds: dict[str, float], total: float) -> str:
    """The share of the time in which the model was trained, where failures cost some of it."""
    cost = seconds["lost steps"] + seconds["restarting"]
    if not cost:
        return ""
    return (
        f'<p class="soft">Goodput {100 * seconds["steps"] / total:.1f} %: the share of the time that went into steps '
        f"that count. Failures cost {format_duration(cost)}: steps that were lost and done again, and the time until "
        "the run went on (hatched).</p>"
    )


def _restarts(run: RunFiles) -> str:
    """List the failures after which a supervisor started the run again."""
    rows = read_restarts(Path(run.run_dir))
    if not rows:
        return ""
    shown = [
        (
            moment(row.get("time")),
            row.get("signal") or f"exit code {row.get('exit_code')}",
            f"{number(row.get('step')) or 0:,}",
            f"{number(row.get('saved_step')) or 0:,}",
            f"{number(row.get('lost_steps')) or 0:,}",
        )
        for row in rows
    ]
    table = grid(("failed", "how", "at step", "newest checkpoint", "lost steps"), shown, numbers=(2, 3, 4))
    count = "1 restart" if len(rows) == 1 else f"{len(rows)} restarts"
    return f'<p class="soft">{count}:</p>{table}' if len(rows) <= _FEW_RESTARTS else folded(count, table)
