"""What all pictures of a plan's page share: escaped text, colours, legends, ticks of an axis. No jax here."""

import itertools
import math
from collections.abc import Iterable, Sequence
from html import escape

from jaxtrain.plan.report.rows import merged
from jaxtrain.plan.search.estimate import Estimate

# Told apart from their neighbours, and visible on white and on black.
PALETTE = (
    *("#4c78c8", "#e8853d", "#4fa866", "#c94f4f", "#8f6bbf", "#b08a3e", "#d976b4", "#3aa6b9"),
    *("#a3b944", "#8a6552", "#6f8fa8", "#e3b23c", "#5b5fc7", "#2f8f83", "#b7638a", "#93a0ad"),
)


def text(value: str) -> str:
    """Escape a text for HTML. Spaces that align numbers become as wide as digits, which HTML keeps."""
    stripped = value.lstrip(" ")
    return "\u2007" * (len(value) - len(stripped)) + escape(stripped, quote=True)


def hover(words: str) -> str:
    """The attributes of an element whose words a browser shows under the pointer; the script shows them at once."""
    return f'title="{text(words)}" aria-label="{text(words)}"'


def colors(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name: the palette, then its tints, because a ResNet has more kinds of blocks."""
    tints = ("#" + "".join(f"{(int(color[at : at + 2], 16) + 255) // 2:02x}" for at in (1, 3, 5)) for color in PALETTE)
    return dict(zip(names, itertools.cycle((*PALETTE, *tints))))


def block_colors(estimates: Sequence[Estimate]) -> dict[str, str]:
    """The colour of each kind of block, the same in every picture."""
    return colors(merged([block.name for block in one.time.blocks] for one in estimates if one.time))


def legend(keys: Iterable[tuple[str, str]]) -> str:
    """A legend.

    Args:
        keys: (the `<i>` element that shows the mark, its name) in order.
    """
    items = "".join(f"<li>{mark}{text(name)}</li>" for mark, name in keys)
    return f'<ul class="legend">{items}</ul>' if items else ""


def swatch(color: str, kind: str = "") -> str:
    """The mark of a legend for an area of a colour; `kind` is a class of the style sheet, as in `assumed`."""
    return f'<i class="swatch {kind}" style="--c:{color}"></i>'


def ticks(reach: float) -> list[float]:
    """Round values from 0 to `reach`, four to six of them."""
    if not 0 < reach < math.inf:
        return [0.0]
    power = 10 ** math.floor(math.log10(reach / 4))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if reach / (power * factor) <= 5)
    return [step * index for index in range(int(reach / step + 1e-9) + 1)]


def axis(reach: float, unit: str) -> str:
    """The labelled axis under bars that share a scale from 0 to `reach`."""
    labels = []
    for value in ticks(reach):
        # A label at the right end would reach out of the page.
        edge = " class=last" if value > 0.93 * reach else ""
        labels.append(f'<span{edge} style="left:{100 * value / reach:.3f}%">{value:,.4g}</span>')
    return f'<div class="axis">{"".join(labels)}</div><p class="unit">{text(unit)}</p>'


def digits(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def seconds_text(seconds: float) -> str:
    """A time of one step with its unit: `37.5 ms`, `2.31 s`."""
    if not math.isfinite(seconds):
        return "not known"
    if seconds < 1e-3:
        return f"{digits(1e6 * seconds)} µs" if seconds else "0 ms"
    return f"{digits(1e3 * seconds)} ms" if seconds < 1 else f"{digits(seconds)} s"


def rate_text(rate: float, unit: str) -> str:
    """A rate with a decimal prefix: `989 TFLOP/s`, `3.35 TB/s`, `450 GB/s`."""
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
    factor, prefix = next((one for one in prefixes if rate >= 0.995 * one[0]), prefixes[-1])
    scaled = rate / factor
    return f"{scaled:,.0f} {prefix}{unit}" if scaled >= 99.5 else f"{scaled:.3g} {prefix}{unit}"


def size_text(count: float) -> str:
    """Bytes in binary units with three digits: `0.81 GiB`, `1.27 MiB`."""
    scaled, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        # As in the table: 0.81 GiB and not 831 MiB.
        if scaled < (1000 if unit == "B" else 102.4):
            break
        scaled, unit = scaled / 1024, larger
    return f"{scaled:.0f} B" if unit == "B" else f"{digits(scaled)} {unit}"
