"""Rows with one more entry, whose values are kept by the number of the row."""

from typing import Any

import grain
import numpy as np

from jaxtrain.data.rows import MappedRows, Row, Rows


def with_entry(rows: grain.MapDataset, name: str, values: np.ndarray) -> grain.MapDataset:
    """Adds an entry to rows; their training order stays.

    Args:
        rows: A finite number of rows with an index; an entry of this name is replaced.
        name: Name of the entry.
        values: [num_rows, ...], the value of each row, whatever the epoch.

    Returns:
        The rows with the entry.
    """
    assert len(values) == len(rows), (len(values), len(rows))
    if isinstance(rows, Rows):

        def change(found: Row, indices: np.ndarray) -> Row:
            return {**found, name: values[indices % len(values)]}

        return MappedRows(rows, change)

    def add(index: int, row: Any) -> Any:
        return {**row, name: values[index % len(values)]}

    return rows.map_with_index(add)
