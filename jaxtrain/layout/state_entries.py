"""How optimizer state that is smaller than its parameter is sharded. No jax here."""

from collections.abc import Mapping, Sequence

from jaxtrain.layout.rules import AxesTable, Entry, entry_axes, entry_degree, spread_axis, table_row


def block_entries(entries: Sequence[Entry], num_blocks: int, degrees: Mapping[str, int]) -> tuple[Entry, ...]:
    """How one number a block lies, where its parameter has these entries: alike, if the blocks divide."""
    last = entries[-1] if num_blocks % entry_degree(entries[-1], degrees) == 0 else None
    return (*entries[:-1], last)


# Mesh axes that say only where bytes are.
_STORAGE = ("fsdp", "pipe", "data")


def kept_entries(
    entries: Sequence[Entry],
    shape: Sequence[int],
    kept: Sequence[int],
    *,
    degrees: Mapping[str, int],
    counting: Sequence[int],
) -> tuple[Entry, ...] | None:
    """How statistics of shape `kept` are sharded that lack one dim of their parameter: as its other dims are.

    Of dims of one size the last counts as the missing one. Axes that store it go to another dim, if one divides.

    Args:
        entries: mesh axes of each dim of the parameter.
        shape: of the parameter.
        kept: of the statistics.
        degrees: size of each mesh axis.
        counting: dims of the parameter that count layers and experts, which get no further axis.

    Returns:
        Mesh axes of each dim of the statistics; None where no dim of the parameter can be the missing one.
    """
    for gone in reversed(range(len(shape))):
        if (*shape[:gone], *shape[gone + 1 :]) == tuple(kept):
            found = [*entries[:gone], *entries[gone + 1 :]]
            skip = {dim - (dim > gone) for dim in counting}
            lost = [axis for axis in _STORAGE if axis in entry_axes(entries[gone])]
            if "fsdp" in lost:
                # It takes a free dim only, so that the others make room and go beside it.
                beside = [dim for dim, entry in enumerate(found) if entry in ("pipe", "data") and dim not in skip]
                lost += [axis for dim in beside for axis in entry_axes(found[dim])]
                found = [None if dim in beside else entry for dim, entry in enumerate(found)]
            for axis in lost:
                found = spread_axis(found, kept, axis, degrees, skip)
            return tuple(found)
    return None


# Logical axes that count equal arrays: a layer or an expert of a stack is an array of its own.
COUNTING = ("layers", "experts")


def is_stacked(path: str, stack: str | None) -> bool:
    return stack is not None and path.startswith(f"{stack}/")


def named_dims(path: str, shape: Sequence[int], axes: AxesTable, stack: str | None) -> tuple[str | None, ...] | None:
    """The row of a parameter, in which a stack's first dim counts layers, named or not; None: no row of its rank."""
    row = table_row(path, axes)
    if row is None or len(row) != len(shape):
        return None
    return ("layers", *row[1:]) if is_stacked(path, stack) and row[:1] == (None,) else tuple(row)


def counting_dims(path: str, shape: Sequence[int], axes: AxesTable, *, stack: str | None = None) -> tuple[int, ...]:
    """The dims that count layers and experts: each index of them has one matrix, vector or number of the model.

    Args:
        path: `blocks/attention/query/kernel`.
        shape: of the whole parameter.
        axes: the model's table.
        stack: top-level path of the parameters that are stacked layer by layer.
    """
    row = named_dims(path, shape, axes, stack)
    if row is None:
        return (0,) if is_stacked(path, stack) and shape else ()
    return tuple(dim for dim, name in enumerate(row) if name in COUNTING)
