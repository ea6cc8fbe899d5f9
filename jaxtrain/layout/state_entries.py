"""How optimizer state that is smaller than its parameter is sharded. No jax here."""

from collections.abc import Mapping, Sequence

from jaxtrain.layout.rules import AxesTable, Entry, entry_axes, entry_degree, spread_axis, table_row


def block_entries(entries: Sequence[Entry], num_blocks: int, degrees: Mapping[str, int]) -> tuple[Entry, ...]:
    """Returns how an array with one number per block of a parameter's last dim is sharded: as the parameter is.

    Args:
        entries: Mesh axes of each dim of the parameter.
        num_blocks: Number of blocks in the last dim.
        degrees: Size of each mesh axis.

    Returns:
        Mesh axes of each dim of the array; None for its last dim where the number of blocks does not divide.
    """
    last = entries[-1] if num_blocks % entry_degree(entries[-1], degrees) == 0 else None
    return (*entries[:-1], last)


# Mesh axes that decide only where a parameter is stored, not what is computed with it.
_STORAGE = ("fsdp", "pipe", "data")


def kept_entries(
    entries: Sequence[Entry],
    shape: Sequence[int],
    kept: Sequence[int],
    *,
    degrees: Mapping[str, int],
    counting: Sequence[int],
) -> tuple[Entry, ...] | None:
    """Returns how statistics that lack one dim of their parameter are sharded: as the parameter's other dims are.

    Of several dims of equal size the last one is taken for the missing one. Mesh axes that store the missing dim shard
    another dim instead, if one divides.

    Args:
        entries: Mesh axes of each dim of the parameter.
        shape: Shape of the parameter.
        kept: Shape of the statistics.
        degrees: Size of each mesh axis.
        counting: Dims of the parameter that count layers and experts; they are not sharded over more axes.

    Returns:
        Mesh axes of each dim of the statistics; None where no dim of the parameter can be the missing one.
    """
    for gone in reversed(range(len(shape))):
        if (*shape[:gone], *shape[gone + 1 :]) == tuple(kept):
            found = [*entries[:gone], *entries[gone + 1 :]]
            skip = {dim - (dim > gone) for dim in counting}
            lost = [axis for axis in _STORAGE if axis in entry_axes(entries[gone])]
            if "fsdp" in lost:
                # fsdp needs a dim of its own: the storage axes that take one make room and are put beside it.
                beside = [dim for dim, entry in enumerate(found) if entry in ("pipe", "data") and dim not in skip]
                lost += [axis for dim in beside for axis in entry_axes(found[dim])]
                found = [None if dim in beside else entry for dim, entry in enumerate(found)]
            for axis in lost:
                found = spread_axis(found, kept, axis, degrees, skip)
            return tuple(found)
    return None


# Logical names of dims that count equal arrays: each layer or expert of a stack is a separate array of the model.
COUNTING = ("layers", "experts")


def is_stacked(path: str, stack: str | None) -> bool:
    """Returns whether a parameter belongs to the stack of layers, which is given by its top-level path."""
    return stack is not None and path.startswith(f"{stack}/")


def named_dims(path: str, shape: Sequence[int], axes: AxesTable, stack: str | None) -> tuple[str | None, ...] | None:
    """Returns the logical name of each dim of a parameter.

    Args:
        path: Path of the parameter, such as `blocks/attention/query/kernel`.
        shape: Shape of the parameter.
        axes: The model's axes table.
        stack: Top-level path of the parameters that are stacked layer by layer; None: no such stack.

    Returns:
        The row of the table, with "layers" for the first dim of a stacked parameter even if the row does not name it;
        None where the table has no row of the parameter's rank.
    """
    row = table_row(path, axes)
    if row is None or len(row) != len(shape):
        return None
    return ("layers", *row[1:]) if is_stacked(path, stack) and row[:1] == (None,) else tuple(row)


def counting_dims(path: str, shape: Sequence[int], axes: AxesTable, *, stack: str | None = None) -> tuple[int, ...]:
    """Returns the dims that count layers and experts; each index of these is a separate array of the model.

    Args:
        path: Path of the parameter, such as `blocks/attention/query/kernel`.
        shape: Global shape of the parameter.
        axes: The model's axes table.
        stack: Top-level path of the parameters that are stacked layer by layer; None: no such stack.
    """
    row = named_dims(path, shape, axes, stack)
    if row is None:
        return (0,) if is_stacked(path, stack) and shape else ()
    return tuple(dim for dim, name in enumerate(row) if name in COUNTING)
