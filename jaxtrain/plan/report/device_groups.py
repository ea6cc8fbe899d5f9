"""Devices of a mesh in the order of their numbers, grouped so that a picture of thousands stays readable. No jax here.

The last mesh axis is the innermost: devices with consecutive numbers differ in it first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.layout.degrees import AXES

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
