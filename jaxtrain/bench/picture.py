"""The bench as one picture: blocks compared with their rooflines, and the parts of a step's time."""

from pathlib import Path
from typing import Any

_MEASURED, _LEAST = "#4269d0", "#a5b8ea"
# The bars of the step are other things than those of the blocks, and so of other colours.
_MODEL, _ALONE, _STEP = "#d9d9d9", "#b4b4b4", "#6b7280"
# Rates vary by some percent from one measurement to the next.
_OVER = 1.05
_BUSY = "above 100 %: the limits were measured while the machine was busier, or the data stayed in a cache"


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
    for place, block, value, bound in zip(places, blocks, milliseconds, least, strict=True):
        # Beyond both bars, so that neither lies under the text.
        said = f" {_digits(value)} ms, {block['share_of_roofline']:.0%}"
        left.annotate(said, (max(value, bound), place), va="center", fontsize=9)
    left.set_yticks(list(places), names)
    left.invert_yaxis()
    left.set_xlabel("ms per step, forward and backward")
    left.set_title("Blocks: time, and share of the roofline", fontsize=11, loc="left")
    left.margins(x=0.3)
    if blocks:
        figure.legend(*left.get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower left", ncols=2)
    if any(block["share_of_roofline"] > _OVER for block in blocks):
        figure.supxlabel(_BUSY, fontsize=8.5, x=0.99, ha="right", color="dimgray")
    if step is not None:
        total = step["seconds"] * 1e3
        share = step["share_of_measured_matmul"]
        parts = [] if share is None else [("model FLOPs at the matmul rate", share * total, _MODEL)]
        parts += [("blocks, as timed alone", sum(milliseconds), _ALONE)] if blocks else []
        parts.append(("step, measured", total, _STEP))
        right.barh([name for name, _, _ in parts], [value for _, value, _ in parts], color=[c for _, _, c in parts])
        for place, (_, value, _) in enumerate(parts):
            right.annotate(f" {_digits(value)} ms", (value, place), va="center", fontsize=9)
        right.margins(x=0.25)
        unit = step["unit"]
        right.set_title(f"{step['units_per_second']:,.0f} {unit}/s", fontsize=11, loc="left")
        right.set_xlabel("ms")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    device = answer["device"]
    figure.suptitle(f"{answer['config']} on {device['count']} x {device['kind']}", fontsize=12, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
