"""The bench as one picture: blocks compared with their rooflines, and the parts of a step's time."""

from pathlib import Path
from typing import Any

_MEASURED, _LEAST, _REST = "#4269d0", "#a5b8ea", "#d9d9d9"


def draw(answer: dict[str, Any], path: Path) -> None:
    """Write the picture of a bench; the suffix of the path chooses the format.

    Args:
        answer: the result of `measure`.
        path: a file .svg or .png in a folder that exists.
    """
    from matplotlib.figure import Figure

    blocks, step = answer["blocks"] or [], answer["step"]
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for axes, part in ((left, answer["blocks"]), (right, step)):
        if part is None:
            axes.set_axis_off()
            axes.text(0, 0.5, "left out", color="gray")
    names = [f"{block['name']} x {block['count']}" for block in blocks]
    places = range(len(blocks))
    milliseconds = [block["count"] * block["seconds"] * 1e3 for block in blocks]
    least = [block["count"] * block["roofline_seconds"] * 1e3 for block in blocks]
    if blocks:
        left.barh(places, milliseconds, color=_MEASURED, label="measured")
        left.barh(places, least, height=0.3, color=_LEAST, label="roofline")
    for place, block, value in zip(places, blocks, milliseconds, strict=True):
        left.annotate(f" {block['share_of_roofline']:.0%}", (value, place), va="center", fontsize=9)
    left.set_yticks(list(places), names)
    left.invert_yaxis()
    left.set_xlabel("ms per step, forward and backward")
    left.set_title("Blocks and their rooflines", fontsize=11, loc="left")
    left.margins(x=0.12)
    if blocks:
        left.legend(frameon=False, fontsize=9, loc="lower right")
    if step is not None:
        total = step["seconds"] * 1e3
        share = step["share_of_measured_matmul"]
        parts = [] if share is None else [("model FLOPs at the matmul rate", share * total, _MEASURED)]
        parts += [("blocks, as timed alone", sum(milliseconds), _LEAST)] if blocks else []
        parts.append(("step", total, _REST))
        right.barh([name for name, _, _ in parts], [value for _, value, _ in parts], color=[c for _, _, c in parts])
        for place, (_, value, _) in enumerate(parts):
            shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            right.annotate(f" {shown} ms", (value, place), va="center", fontsize=9)
        right.margins(x=0.25)
        unit = step["unit"]
        right.set_title(f"{step['units_per_second']:,.0f} {unit}/s", fontsize=11, loc="left")
        right.set_xlabel("ms")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    device = answer["device"]
    figure.suptitle(f"{answer['config']} on {device['count']} x {device['kind']}", fontsize=12, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
