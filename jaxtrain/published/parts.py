"""Which part of a tensor of a file a slice of our parameter needs. No jax here.

A safetensors file is mapped, so that looking at a whole tensor costs nothing. The tensors of a GGUF file are
dequantized, and a process should do that for what its devices hold, not for the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from jaxtrain.published.transforms import Shape, Transform


@dataclass(frozen=True)
class Part:
    """A box of their tensor.

    Attributes:
        box: The box, one slice per dimension of theirs.
        transform: How the box is looked at as a part of our parameter.
        origin: Where that part begins in our parameter, per dimension of ours.
    """

    box: tuple[slice, ...]
    transform: Transform
    origin: Shape


def part_of(transform: Transform, bounds: Sequence[tuple[int, int]]) -> Part:
    """Returns the smallest box of whole rows of splits that holds a slice of our parameter.

    Args:
        transform: How their whole tensor is looked at.
        bounds: (start, stop) per dimension of ours.
    """
    wanted, origin = _outermost(transform, bounds)
    picked = dict(transform.picks)
    remaining = [at for at in range(sum(map(len, transform.splits))) if at not in picked]
    place = {remaining[one]: position for position, one in enumerate(transform.order)}
    box, splits, picks, number = [], [], dict(picked), 0
    for start, split in zip(transform.start, transform.splits, strict=True):
        first, last = 0, split[0]
        if number in picked:
            # One of several that a tensor holds: its neighbours need not be read.
            first, last = picked[number], picked[number] + 1
            picks[number] = 0
        elif place[number] in wanted:
            first, last = wanted[place[number]]
        inner = prod(split[1:])
        box.append(slice(start + first * inner, start + last * inner))
        splits.append((last - first, *split[1:]))
        number += len(split)
    shape = tuple(prod(split) for split in splits)
    smaller = replace(
        transform, theirs=shape, start=(0,) * len(shape), block=shape, splits=tuple(splits), picks=tuple(picks.items())
    )
    return Part(tuple(box), smaller, origin)


def _outermost(
    transform: Transform, bounds: Sequence[tuple[int, int]]
) -> tuple[dict[int, tuple[int, int]], tuple[int, ...]]:
    """Returns the range of each view dimension that leads a dimension of ours, and where these ranges begin in ours.

    Dimensions of the view that follow others in a dimension of ours, or that are inner splits of one of theirs, are
    read whole, and cut after reading.
    """
    leading = _leading_splits(transform)
    wanted, origin, at = {}, [], 0
    for count, (start, stop) in zip(transform.merges, bounds, strict=True):
        begin = 0
        if count and at in leading:
            step = prod(transform.fine[at + 1 : at + count])
            first = start // step
            wanted[at] = (first, -(-stop // step))
            begin = first * step
        origin.append(begin)
        at += count
    return wanted, tuple(origin)


def _leading_splits(transform: Transform) -> set[int]:
    """Returns the view dimensions that are the first split of a dimension of theirs."""
    first, number = set(), 0
    for split in transform.splits:
        first.add(number)
        number += len(split)
    picked = dict(transform.picks)
    remaining = [at for at in range(number) if at not in picked]
    return {position for position, one in enumerate(transform.order) if remaining[one] in first}
