"""Shows a pipeline schedule as text or as a picture, to compare numbers of stages and microbatches.

python scripts/show_schedule.py 1f1b --stages 4 --microbatches 16
python scripts/show_schedule.py interleaved_1f1b --stages 4 --microbatches 16 --chunks 2 --picture schedule.png
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from jaxtrain.errors import UserError
from jaxtrain.parallel.schedules import SCHEDULES, Cell, Schedule, make_schedule

_FORWARD = ("#2f6fb7", "#a9cdf2")
_BACKWARD = ("#2e8b57", "#aadcbb")
"""Fill of the first and of the last chunk; those between are mixed."""

_INCH_POINTS = 72


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str):
        self.exit(2, f"show_schedule: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the schedule, and return the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--stages", type=int, required=True, help="pipeline stages (parallel.pipe)")
    parser.add_argument("--microbatches", type=int, required=True, help="microbatches per step (parallel.microbatches)")
    parser.add_argument(
        "--chunks", type=int, default=1, help="chunks of layers per stage (parallel.chunks); default: 1"
    )
    parser.add_argument("--picture", metavar="PNG", help="also draw the schedule to this file")
    options = parser.parse_args(arguments)
    try:
        schedule = make_schedule(options.schedule, options.stages, options.microbatches, options.chunks)
    except UserError as error:
        print(f"show_schedule: {error}", file=sys.stderr)
        return error.exit_code
    print(draw_text(schedule, width=shutil.get_terminal_size((120, 24)).columns))
    if options.picture:
        try:
            draw_picture(schedule, options.picture)
        except OSError as error:
            print(f"show_schedule: --picture: {error}", file=sys.stderr)
            return 2
    return 0


def draw_text(schedule: Schedule, *, width: int = 120) -> str:
    """A schedule as text: a header, then a row a stage and a column a tick.

    A row has two lines, forwards (F) above backwards (B), because a stage may do both in one tick. A cell is the
    number of the microbatch, with a letter for the chunk where there is more than one; a dot is an idle half tick.

    Args:
        schedule: the table.
        width: columns of the terminal; a longer table goes on in further blocks below.
    """
    cells = [_label(schedule, cell) for table in (schedule.forward, schedule.backward) for row in table for cell in row]
    column = 1 + max(map(len, (*cells, str(schedule.num_ticks - 1))))
    margin = len(_stage_label(schedule.num_stages - 1)) + 2
    per_block = max(1, (width - margin) // column)
    lines = [headline(schedule)]
    for start in range(0, schedule.num_ticks, per_block):
        ticks = range(start, min(start + per_block, schedule.num_ticks))
        lines += ["", "tick".ljust(margin) + "".join(str(tick).rjust(column) for tick in ticks)]
        for stage in range(schedule.num_stages):
            for letter, table in (("F", schedule.forward), ("B", schedule.backward)):
                name = _stage_label(stage) if letter == "F" else ""
                row = "".join(_label(schedule, table[tick][stage]).rjust(column) for tick in ticks)
                lines.append(f"{name.ljust(margin - 2)} {letter}{row}")
    return "\n".join(lines)


def headline(schedule: Schedule) -> str:
    """One line: the schedule's name and counts, its bubble, and its peak of live inputs."""
    chunks = f", {schedule.num_chunks} chunks a stage" if schedule.num_chunks > 1 else ""
    live = [schedule.peak_live(stage) for stage in range(schedule.num_stages)]
    stages = f" (by stage {', '.join(map(str, live))})" if 1 < len(live) <= 8 else ""
    return (
        f"{schedule.name}: {_count(schedule.num_stages, 'stage')}{chunks}, "
        f"{_count(schedule.num_microbatches, 'microbatch', 'microbatches')}, {_count(schedule.num_ticks, 'tick')}; "
        f"bubble {schedule.bubble_fraction():.1%}; peak live inputs {max(live)}{stages}"
    )


def draw_picture(
    schedule: Schedule, path: str | os.PathLike[str], *, forward_cost: float = 1.0, backward_cost: float = 2.0
) -> None:
    """Writes a schedule as a PNG: a row a stage, time to the right, forwards blue, backwards green, idle time white.

    A tick is as wide as its longest work. Chunks go from dark (the first) to light (the last); a box has the number
    of its microbatch if there is room for it.

    Args:
        schedule: the table.
        path: the file to write.
        forward_cost: width of a forward.
        backward_cost: width of a backward.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    costs = schedule.tick_costs(forward_cost, backward_cost)
    starts = [sum(costs[:tick]) for tick in range(len(costs) + 1)]
    p, v = schedule.num_stages, schedule.num_chunks
    width = min(max(9.0, 2 + 0.16 * starts[-1] / min(forward_cost, backward_cost)), 24.0)
    row_height = 0.42 if p <= 16 else 0.25
    margins = {"left": 0.85, "right": 0.15, "top": 0.42, "bottom": 0.85}
    height = row_height * p + margins["top"] + margins["bottom"]
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes(
        (
            margins["left"] / width,
            margins["bottom"] / height,
            (width - margins["left"] - margins["right"]) / width,
            row_height * p / height,
        )
    )
    axes.set(xlim=(0, starts[-1]), ylim=(p - 0.5, -0.5), yticks=range(p), yticklabels=map(_stage_label, range(p)))
    axes.tick_params(left=False, labelsize=9)
    axes.set_xlabel(f"time (forward of a chunk {forward_cost:g}, its backward {backward_cost:g})", fontsize=9)
    axes.set_title(_title(schedule, forward_cost, backward_cost), fontsize=11, loc="left", pad=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for start in starts:
        axes.axvline(start, color="#dddddd", linewidth=0.5, zorder=0)

    unit_points = (width - margins["left"] - margins["right"]) * _INCH_POINTS / starts[-1]
    num_digits = len(str(schedule.num_microbatches - 1))
    for tick, start in enumerate(starts[:-1]):
        for stage in range(p):
            left = start
            for cell, cost, colors in (
                (schedule.forward[tick][stage], forward_cost, _FORWARD),
                (schedule.backward[tick][stage], backward_cost, _BACKWARD),
            ):
                if cell is None:
                    continue
                color = _mix(*colors, cell[1] / max(1, v - 1))
                box = Rectangle((left, stage - 0.42), cost, 0.84, facecolor=color, edgecolor="white", linewidth=0.6)
                axes.add_patch(box)
                # A digit is about 0.62 of the font's size wide; smaller than 5 points nobody reads it.
                size = min(9.0, (cost * unit_points - 1) / (0.62 * num_digits))
                if size >= 5:
                    ink = "white" if cell[1] / max(1, v - 1) < 0.4 else "#1b2a1f"
                    axes.text(
                        left + cost / 2, stage, str(cell[0]), ha="center", va="center_baseline", size=size, color=ink
                    )
                left += cost

    handles = []
    for kind, colors in (("forward", _FORWARD), ("backward", _BACKWARD)):
        for chunk in range(v) if v <= 4 else (0, v - 1):
            name = f"{kind}, chunk {chunk}" if v > 1 else kind
            handles.append(Patch(facecolor=_mix(*colors, chunk / max(1, v - 1)), label=name))
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(margins["left"] / width, 0.08 / height),
        borderaxespad=0.1,
        ncols=len(handles),
        fontsize=9,
        frameon=False,
    )
    figure.savefig(path, dpi=150, format="png")


def _title(schedule: Schedule, forward_cost: float, backward_cost: float) -> str:
    chunks = f", {schedule.num_chunks} chunks a stage" if schedule.num_chunks > 1 else ""
    return (
        f"{schedule.name}, {_count(schedule.num_stages, 'stage')}{chunks}, "
        f"{_count(schedule.num_microbatches, 'microbatch', 'microbatches')}: "
        f"bubble {schedule.bubble_fraction(forward_cost, backward_cost):.1%}, "
        f"at most {_count(schedule.peak_live(), 'input')} live on a stage"
    )


def _stage_label(stage: int) -> str:
    return f"stage {stage}"


def _label(schedule: Schedule, cell: Cell) -> str:
    if cell is None:
        return "."
    microbatch, chunk = cell
    if schedule.num_chunks == 1:
        return str(microbatch)
    return f"{microbatch}{chr(ord('a') + chunk)}" if schedule.num_chunks <= 26 else f"{microbatch}.{chunk}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _mix(first: str, last: str, share: float) -> tuple[float, float, float]:
    """The colour a share of the way from the first (0) to the last (1), as red, green, blue in 0..1."""
    pairs = [(int(first[i : i + 2], 16), int(last[i : i + 2], 16)) for i in (1, 3, 5)]
    red, green, blue = ((a + share * (b - a)) / 255 for a, b in pairs)
    return red, green, blue


if __name__ == "__main__":
    sys.exit(main())
