"""Whether rows that a program gives are batches: refused where that is sure, remarked where it is likely."""

import functools
from typing import Any

import grain
import jax
import numpy as np

from jaxtrain.errors import DataError


def check_no_list_of_batches(rows: grain.MapDataset, name: str, *, shown: str) -> None:
    """Raises a DataError where the entries of a list look like batches.

    Args:
        rows: Of the list.
        name: Of the argument, in messages.
        shown: The entries of the first row, as text.
    """
    size = _common_size(rows)
    if size is None:
        return
    iterator = f"give batches as an iterator, {name}=iter(batches), and " if name == "data" else ""
    raise DataError(
        f"{name} is a list of rows, but its entries look like batches of {size} rows ({shown}); {iterator}give rows as "
        f"arrays [num_rows, ...], {name}={{'inputs': x, 'targets': y}} (np.concatenate for batches, np.stack for rows)"
    )


def check_not_batched(rows: grain.MapDataset, name: str) -> None:
    """Raises a DataError where the rows of a dataset are the batches that grain made last.

    Args:
        rows: With at least one row.
        name: Of the argument, in messages.
    """
    if not isinstance(rows, _batched_type()):
        return
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(rows[0])]
    if all(len(shape) < 2 for shape in shapes):
        return  # of tokens, which a batch makes a sequence: a row
    size = shapes[0][0] if shapes and shapes[0] else "..."
    instead = f" and set the batch size (batch_size={size} in fit)" if name == "data" else ""
    raise DataError(
        f"{name} is a grain dataset of batches, and batches are made of single rows: leave .batch({size}) out{instead}"
    )


def looks_like_batches(rows: grain.MapDataset, given: Any) -> str:
    """Returns the end of a line about rows that are batches by what the dataset says of itself; "" for other rows.

    The form of the rows alone does not say it: a sequence [L, D] with a target per place is a row.

    Args:
        rows: With at least one row.
        given: The dataset that they are of, which may have a `batch_size` (that of Keras).
    """
    size = _common_size(rows)
    said = getattr(given, "batch_size", None)
    if size is None or not (_has_batched(rows) or (isinstance(said, int) and said == size)):
        return ""
    return f"; its rows look like batches of {size} rows: if they are, give single rows and batch_size={size}"


def _common_size(rows: grain.MapDataset) -> int | None:
    """Returns the number of rows in a row, where this has the form of a batch; None for another form.

    A batch has one leading size in two entries or more, and one of more dimensions (`inputs` [B, D], `targets` [B]).
    Rows of pairs of sequences [L] have no such entry; rows that do (a label per pixel) have another form: stacked.
    """
    row: Any = rows[0]
    leaves = jax.tree.leaves(row)
    sizes = {np.shape(leaf)[:1] for leaf in leaves}
    if len(row) < 2 or len(sizes) != 1 or min(sizes) < (2,) or max(np.ndim(leaf) for leaf in leaves) < 2:
        return None
    return np.shape(leaves[0])[0]


def _has_batched(rows: grain.MapDataset) -> bool:
    """Whether grain made batches on the way to the rows."""
    return isinstance(rows, _batched_type()) or any(
        _has_batched(parent) for parent in rows.parents if isinstance(parent, grain.MapDataset)
    )


@functools.cache
def _batched_type() -> type:
    """Returns the type of what `batch` makes, which has no public name."""
    return type(grain.MapDataset.source([0]).batch(1))
