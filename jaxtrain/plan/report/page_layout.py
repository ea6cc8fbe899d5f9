"""The layout of a plan as a picture: hosts with their devices, and what each mesh axis shards over which link.

Devices are in the order of their numbers: consecutive ones differ in the last mesh axis first.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.layout.rules import AXES, stage_over_data
from jaxtrain.plan.catalogue.hardware import Target
from jaxtrain.plan.report.page_html import PALETTE, hover, legend, rate_text, seconds_text, size_text, swatch, text
from jaxtrain.plan.report.rows import labels
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.time.record import Traffic
from jaxtrain.plan.time.step import crossing

# Pictures beyond this many are folded: a page that compares ten targets is about their figures.
_OPEN = 2
# Coordinates of an axis with more than this many cannot be told apart by colour.
_MOST_COLORS = 8
# More boxes than this are not drawn; a box then stands for several devices.
_MOST_BOXES = 64


@dataclass(frozen=True)
class Box:
    """Devices with consecutive numbers, drawn as one box.

    Attributes:
        first: number of the first device.
        count: how many devices it stands for.
        coordinates: mesh axis -> (lowest, highest) coordinate of its devices; axes of degree 1 are left out.
    """

    first: int
    count: int
    coordinates: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Grid:
    """All devices of a mesh.

    Attributes:
        islands: the boxes of each host or slice, in order; one list of all boxes where a box is several islands.
        devices_per_box: the devices of each box.
        islands_per_box: 1, or the number of islands that a box stands for.
        first_group: mesh axis -> indices of the boxes that hold the devices which exchange data with device 0 over it.
    """

    islands: tuple[tuple[Box, ...], ...]
    devices_per_box: int
    islands_per_box: int
    first_group: dict[str, frozenset[int]]


def device_grid(degrees: Mapping[str, int], island: int) -> Grid:
    """Groups the devices of a mesh.

    Args:
        degrees: mesh axis -> degree; an axis that is left out has degree 1.
        island: devices of one host or slice; the last may hold fewer.

    Returns:
        At most 64 boxes, none of which lies in two islands unless it is several of them.
    """
    sizes = {axis: degrees.get(axis, 1) for axis in AXES}
    strides, total = {}, 1
    for axis in reversed(AXES):
        strides[axis] = total
        total *= sizes[axis]
    island = min(island, total)
    per_box = next(
        count
        for count in range(1, total + 1)
        if total % count == 0 and total // count <= _MOST_BOXES and (island % count == 0 or count % island == 0)
    )
    active = [axis for axis in AXES if sizes[axis] > 1]

    def box(first: int) -> Box:
        numbers = range(first, first + per_box)
        found = {axis: [number // strides[axis] % sizes[axis] for number in numbers] for axis in active}
        return Box(first, per_box, {axis: (min(some), max(some)) for axis, some in found.items()})

    boxes = [box(first) for first in range(0, total, per_box)]
    if per_box >= island:
        islands = [boxes] if per_box > island else [[one] for one in boxes]
    else:
        count = island // per_box
        islands = [boxes[at : at + count] for at in range(0, len(boxes), count)]
    groups = {axis: frozenset(index * strides[axis] // per_box for index in range(sizes[axis])) for axis in active}
    return Grid(tuple(map(tuple, islands)), per_box, max(1, per_box // island), groups)


def layout_pictures(estimates: Sequence[Estimate]) -> str:
    """The layouts of all estimates: the first two different ones open, the others folded.

    Args:
        estimates: one or more.
    """
    parts, seen = [], set()
    for name, one in zip(labels(estimates), estimates, strict=True):
        if len(estimates) == 1:
            parts.append(_layout(one))
        else:
            key = (one.target.name, _mesh(one))
            is_open = " open" if key not in seen and len(seen) < _OPEN else ""
            seen.add(key)
            summary = f"<summary><b>{text(name)}</b>: {text(_mesh(one))}</summary>"
            parts.append(f"<details{is_open}>{summary}{_layout(one)}</details>")
    return "".join(parts)


def _mesh(one: Estimate) -> str:
    sizes = [f"{axis} {one.degrees.get(axis, 1)}" for axis in AXES if one.degrees.get(axis, 1) > 1]
    count = one.target.num_devices
    if not sizes:
        return "one device: nothing is sharded"
    return f"{' x '.join(sizes)} = {count:,} devices" if len(sizes) > 1 else f"{sizes[0]}: {count:,} devices"


def _layout(one: Estimate) -> str:
    island = one.target.hardware.island
    # Hosts hold the devices evenly, also where the last island is not full.
    grid = device_grid(one.degrees, -(-one.target.num_devices // max(1, one.target.num_hosts)) or island)
    colored = next((axis for axis in AXES if 1 < one.degrees.get(axis, 1) <= _MOST_COLORS), None)
    mesh = _mesh(one)
    sentences = [f"{mesh} on {_places(one.target)}." if grid.first_group else f"{mesh.capitalize()}."]
    if len(grid.first_group) > 1:
        sentences.append("Devices with consecutive numbers differ in the last axis first.")
    intro = f"<p>{text(' '.join([*sentences, *_grouped(one, grid)]))}</p>"
    keys = []
    if colored is not None:
        numbers = range(one.degrees[colored])
        keys = [(swatch(PALETTE[number]), f"{_coordinate(colored)} {number}") for number in numbers]
    return f'<div class="layout">{intro}{_hosts(one, grid, colored)}{legend(keys)}{_axes(one, grid)}</div>'


def _places(target: Target) -> str:
    place = _place(target)
    return f"1 {place}" if target.num_hosts == 1 else f"{target.num_hosts:,} {place}s"


def _place(target: Target) -> str:
    """What joins devices by the fast link: a slice of TPUs, a host of GPUs."""
    return {"tpu": "slice", "cpu": "machine"}.get(target.hardware.kind, "host")


def _grouped(one: Estimate, grid: Grid) -> list[str]:
    if grid.devices_per_box == 1:
        return []
    place = _place(one.target)
    several = f", {grid.islands_per_box} {place}s," if grid.islands_per_box > 1 else ""
    return [f"Each box is {grid.devices_per_box} devices{several} with consecutive numbers."]


def _coordinate(axis: str) -> str:
    return {"pipe": "stage", "data": "replica", "fsdp": "fsdp shard"}.get(axis, axis)


def _hosts(one: Estimate, grid: Grid, colored: str | None) -> str:
    place, hosts = _place(one.target), []
    for index, boxes in enumerate(grid.islands):
        cells = "".join(_cell(box, place, index, grid, colored) for box in boxes)
        title = f"{place} {index}" if len(grid.islands) > 1 else ""
        if grid.islands_per_box > 1:
            title = f"all {one.target.num_hosts:,} {place}s"
        columns = min(len(boxes), 4 if len(boxes) <= 8 else 8)
        caption = f"<span>{title}</span>" if title else ""
        hosts.append(f'<div class="host">{caption}<div class="cells" style="--n:{columns}">{cells}</div></div>')
    return f'<div class="hosts">{"".join(hosts)}</div>'


def _cell(box: Box, place: str, island: int, grid: Grid, colored: str | None) -> str:
    last = box.first + box.count - 1
    number = f"{box.first}" if box.count == 1 else f"{box.first}-{last}"
    where = [f"{axis} {_span(span)}" for axis, span in box.coordinates.items()]
    home = f" on {place} {island}" if grid.islands_per_box == 1 and len(grid.islands) > 1 else ""
    said = f"device{'s' if box.count > 1 else ''} {number}{home}" + (f": {', '.join(where)}" if where else "")
    style = ""
    if colored is not None and len(set(box.coordinates[colored])) == 1:
        style = f' style="--c:{PALETTE[box.coordinates[colored][0]]}"'
    return f'<span class="cell" {hover(said)}{style}>{number}</span>'


def _span(span: tuple[int, int]) -> str:
    return f"{span[0]}" if span[0] == span[1] else f"{span[0]} to {span[1]}"


def _axes(one: Estimate, grid: Grid) -> str:
    """A row per axis: a small picture of one of its groups, what it shards, and what it sends over which link."""
    crossed = crossing(one.degrees, one.target)
    sent: dict[str, list[Traffic]] = {}
    for traffic in one.time.traffic if one.time else ():
        sent.setdefault(traffic.axis, []).append(traffic)
    rows = []
    for axis in AXES:
        degree = one.degrees.get(axis, 1)
        if degree == 1:
            continue
        lines = [f"<p>{text(_shards(axis, degree, one))}</p>", f"<p>{text(_link(one.target, axis in crossed))}</p>"]
        lines += [f"<p>{text(_sends(each, one))}</p>" for each in sent.pop(axis, [])]
        group = grid.first_group[axis]
        rows.append(
            f'<div class="mesh-axis"><b>{axis} {degree}</b><div>{_small(grid, group, axis)}</div>'
            f"<div>{''.join(lines)}</div></div>"
        )
    for axis, some in sent.items():
        # Not an axis of the mesh: state or activations in the host's memory.
        lines = [f"<p>{text(_sends(each, one))}</p>" for each in some]
        rows.append(f'<div class="mesh-axis"><b>{text(axis)}</b><div></div><div>{"".join(lines)}</div></div>')
    if not rows:
        return ""
    note = ""
    if grid.first_group:
        note = '<p class="unit">The small pictures fill the boxes that exchange data with device 0 over an axis.</p>'
    return f'<div class="mesh-axes">{"".join(rows)}</div>{note}'


def _small(grid: Grid, group: frozenset[int], axis: str) -> str:
    """All boxes as squares, a row per island where that is not too wide; those of one group are filled."""
    counts = [len(boxes) for boxes in grid.islands]
    total = sum(counts)
    columns = counts[0] if 1 < counts[0] <= 16 else min(total, 8)
    outline, filled = [], []
    for index in range(total):
        corner = f"M{10 * (index % columns) + 1} {10 * (index // columns) + 1}h8v8h-8z"
        (filled if index in group else outline).append(corner)
    height = 10 * -(-total // columns)
    words = f"boxes that exchange data with device 0 over {axis}: {len(group)} of {total}"
    # A square is as large in each picture, whatever their number.
    return (
        f'<svg class="small" viewBox="0 0 {10 * columns} {height}" style="width:{0.6 * columns:.2f}rem" role="img" '
        f'aria-label="{words}"><path class="outline" d="{"".join(outline)}"/>'
        f'<path class="filled" d="{"".join(filled)}"/></svg>'
    )


def _shards(axis: str, degree: int, one: Estimate) -> str:
    parallel = one.config.parallel
    match axis:
        case "pipe":
            return f"Shards the layers into {degree} stages, which microbatches pass one after another."
        case "data":
            return {
                0: "Shards the rows of the batch; parameters, gradients and optimizer state are replicated.",
                1: "Shards the batch, optimizer state (ZeRO 1) and stored parameters; a step gathers a copy of them.",
                2: "Shards the batch, state (ZeRO 2), gradients and stored parameters; a step gathers a copy of them.",
            }[stage_over_data(parallel.zero)]
        case "fsdp":
            return (
                "Shards the rows of the batch, parameters, gradients and optimizer state; gathers one layer at a time."
            )
        case "expert":
            return "Shards the rows of the batch and the experts; tokens travel to their experts and back."
        case "context":
            return "Shards the sequence; keys and values travel between its devices."
        case _:
            between = ", and the sequence between blocks" if parallel.sequence_parallel else ""
            return f"Shards heads, MLP width and vocabulary{between}."


def _link(target: Target, is_crossed: bool) -> str:
    hardware, place = target.hardware, _place(target)
    figure, rate = "link_bandwidth", hardware.link_bandwidth
    if is_crossed:
        figure, rate = "network_bandwidth", hardware.network_bandwidth
    source = hardware.sources.get(figure, "")
    if is_crossed:
        where, name = f"Between {place}s", "the network"
    else:
        where = f"Inside a {place}" if target.num_hosts > 1 else f"Inside the {place}"
        found = re.search(r"NVLink|Infinity Fabric|ICI|PCIe", source)
        name = (
            found.group()
            if found
            else "ICI"
            if hardware.kind == "tpu"
            else "memory"
            if hardware.kind == "cpu"
            else "the fast link"
        )
    if not rate:
        return f"{where}, over {name}; its rate is not known."
    assumed = ", assumed" if source.startswith("assumed") else ""
    return f"{where}, over {name}: {rate_text(rate, 'B/s')} per device in one direction{assumed}."


def _sends(traffic: Traffic, one: Estimate) -> str:
    said = f"Sends {size_text(traffic.bytes)} per device and step: {traffic.kind}"
    if one.fits is False or not math.isfinite(traffic.seconds):
        return f"{said}."
    if not traffic.exposed_seconds:
        return f"{said}. It takes {seconds_text(traffic.seconds)}, all of it hidden behind compute."
    if traffic.exposed_seconds == traffic.seconds:
        return f"{said}. It takes {seconds_text(traffic.seconds)}, none of it hidden behind compute."
    exposed = seconds_text(traffic.exposed_seconds)
    return f"{said}. It takes {seconds_text(traffic.seconds)}, of which {exposed} are not hidden behind compute."
