"""The bench as one picture: blocks compared with their rooflines."""

from pathlib import Path
from typing import Any

_MEASURED, _LEAST = "#4269d0", "#a5b8ea"


def draw(answer: dict[str, Any], path: Path) -> None:
    """Write the picture of a bench; the suffix of the path chooses the format.

    Args:
        answer: the result of `measure`.
        path: a file .svg or .png in a folder that exists.
    """
    from matplotlib.figure import Figure

    blocks, step, device = answer["blocks"] or [], answer["step"], answer["device"]
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()
    names = [f"{block['name']} x {block['count']}" for block in blocks]
    bars = [block["count"] * block["seconds"] * 1e3 for block in blocks]
    least = [block["count"] * block["roofline_seconds"] * 1e3 for block in blocks]
    shares = [block["share_of_roofline"] for block in blocks]
    if step is not None:
        names, bars, least = [*names, "step"], [*bars, step["seconds"] * 1e3], [*least, 0.0]
        shares.append(step["share_of_measured_matmul"])
    places = range(len(names))
    axes.barh(places, bars, color=_MEASURED, label="measured")
    axes.barh(places, least, height=0.3, color=_LEAST, label="roofline")
    for place, value, bound, share in zip(places, bars, least, shares, strict=True):
        # Beyond both bars, so that neither lies under the text.
        said = f" {value:.3g} ms" + ("" if share is None else f", {share:.0%}")
        axes.annotate(said, (max(value, bound), place), va="center", fontsize=9)
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlabel("ms per step, forward and backward; share of the roofline (step: of the matmul rate)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    rate = "" if step is None else f": {step['units_per_second']:,.0f} {step['unit']}/s"
    axes.set_title(f"{answer['config']} on {device['count']} x {device['kind']}{rate}", fontsize=11, loc="left")
    figure.savefig(path, dpi=150)
