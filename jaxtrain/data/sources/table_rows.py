"""Rows of a table without targets, for the predictions of a model that was trained on one."""

from collections.abc import Sequence

import numpy as np

from jaxtrain.data.text.records import column_names, number_of, read_records
from jaxtrain.errors import DataError


def read_input_columns(path: str, columns: Sequence[str] | None, *, num_columns: int, target: str | None) -> np.ndarray:
    """Reads the columns that a model takes, in their own units.

    Args:
        path: A .csv (with header), .jsonl or .parquet file; its other columns are not read.
        columns: Names of the columns that the model was trained on, in their order; None: they had none, and all
            columns of the file but `target` are taken in its order.
        num_columns: How many the model takes.
        target: Column that is no input where `columns` is None; the file need not have it.

    Returns:
        float64 [N, num_columns].

    Raises:
        DataError: A column is missing, or a value is no finite number; names file and row.
    """
    if columns is None:
        columns = [name for name in column_names(path, what="the table") if name != target]
        if len(columns) != num_columns:
            shown = ", ".join(columns[:8]) + (", ..." if len(columns) > 8 else "")
            raise DataError(
                f"{path} has {len(columns)} columns ({shown}), and the run was trained on {num_columns} without names; "
                "give a table of these columns alone, in the same order"
            )
    records = read_records(path, [(None, name) for name in columns], what="the table")
    values = [
        [number_of(value, where=record.where, column=name) for name, value in zip(columns, record.values, strict=True)]
        for record in records
    ]
    return np.array(values, np.float64)
