"""Where a row comes from, in words: the file of an image, the tokens of a stream."""

from pathlib import Path
from typing import Any

from jaxtrain.data.rows import ConcatenatedRows, MappedRows, Rows, SelectedDataset, SelectedRows, made_from
from jaxtrain.data.token_rows import TokenRows


def row_name(rows: Any, number: int) -> str | None:
    """Returns where a row comes from; None where its source does not know.

    Args:
        rows: The rows of a `Data`, by index.
        number: Of the row, from 0.
    """
    while isinstance(rows, SelectedRows | SelectedDataset | MappedRows | ConcatenatedRows):
        if isinstance(rows, MappedRows):
            rows = rows.rows
        elif isinstance(rows, ConcatenatedRows):
            rows, number = rows.part_of(number)
        else:
            rows, number = rows.origin(number)
    if isinstance(rows, TokenRows):
        first, last = rows.tokens_of(number)
        return f"tokens {first:,} to {last:,} of the data"
    if isinstance(rows, Rows):
        return None
    origin = made_from(rows)
    if origin is not None:
        return row_name(origin, number)
    # A folder of images is a list of (file, class).
    found = rows[number] if not rows.parents else None
    return str(found[0]) if isinstance(found, tuple) and isinstance(found[0], Path) else None
