"""Where a row comes from, in words: the line of a file, the file of an image, the tokens of a stream."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.rows import ArrayRows, Row, Rows, SelectedDataset, made_from


class NamedRows(ArrayRows):
    """Rows in memory that are some of the rows of a table.

    Args:
        columns: As for `ArrayRows`.
        label: The table, for messages.
        numbers: Number of each row in the table, from 0.
    """

    def __init__(self, columns: Row, *, label: str, numbers: np.ndarray):
        super().__init__(columns)
        self._label, self._numbers = label, numbers

    def name_of(self, number: int) -> str:
        return f"row {self._numbers[number] + 1:,} of {self._label}"


def row_name(rows: Any, number: int) -> str | None:
    """Returns where a row comes from; None where its source does not know.

    Args:
        rows: The rows of a `Data`, by index.
        number: Of the row, from 0.
    """
    if isinstance(rows, Rows):
        return rows.name_of(number)
    if isinstance(rows, SelectedDataset):
        return row_name(*rows.origin(number))
    origin = made_from(rows)
    if origin is not None:
        return row_name(origin, number)
    # A folder of images is a list of (file, class).
    found = rows[number] if not rows.parents else None
    return str(found[0]) if isinstance(found, tuple) and isinstance(found[0], Path) else None
