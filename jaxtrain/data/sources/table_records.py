"""Numbers and targets of a table in a file of rows (Parquet, Arrow, JSON lines); bad rows are left out and counted."""

import math
import re
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.data.formats.opened import DataFile, pass_over_file
from jaxtrain.data.formats.reader import missing_column
from jaxtrain.data.skipped import NAMED, BadRecordError, SkippedRecords, without_advice
from jaxtrain.data.sources.table_csv import CsvRows, input_columns
from jaxtrain.errors import DataError

_INDEX = re.compile(r"__index_level_\d+__")


def read_table_rows(
    files: Sequence[DataFile],
    *,
    target: str | None,
    columns: Sequence[str] | None,
    skipped: SkippedRecords | None,
) -> CsvRows:
    """Reads the columns of a table into memory.

    Args:
        files: With the same columns.
        target: Column to predict; None: the last one.
        columns: Those that are inputs; None: all others.
        skipped: Counts the bad rows, which are left out; None: a bad row is an error.

    Raises:
        DataError: A file is damaged or lacks a column, a value is no number, or too many rows are bad.
    """
    # The first file with rows: writers in parallel leave empty ones.
    first = next((row for file in files for _, row in pass_over_file(file, None)), {})
    there = list(first)
    if len(there) < 2:
        raise DataError(f"{files[0].path} has {len(there)} columns; give at least one input and the target")
    if target is not None and target not in there:
        raise missing_column(str(files[0].path), "target", target, there)
    # What pandas writes of the numbers of its rows is no column of the table, unless it is named.
    usual = [name for name in there if not _INDEX.fullmatch(name)] or there
    chosen = target or usual[-1]
    names = input_columns(usual if columns is None else there, chosen, columns, where=str(files[0].path))
    values, targets, kept, bad = array("d"), [], [], []
    num_rows = num_bad = 0

    def leave_out(error: BadRecordError) -> None:
        nonlocal num_bad, num_rows
        if skipped is None:
            raise error
        num_rows, num_bad = num_rows + 1, num_bad + 1
        if len(bad) < NAMED:
            bad.append(without_advice(error))

    wanted = [*(("columns" if columns else None, name) for name in names), ("target", chosen)]
    for file in files:
        for where, row in pass_over_file(file, wanted, bad=leave_out):
            try:
                numbers = [_number(row[name], where, name) for name in names]
                value = _target(row[chosen], where, chosen)
            except BadRecordError as error:
                leave_out(error)
                continue
            values.extend(numbers)
            targets.append(value)
            kept.append(num_rows)
            num_rows += 1
    if skipped is not None:
        skipped.set(bad, num_bad, of=num_rows)
        skipped.tell()
    if any(isinstance(value, str) for value in targets):
        # A number is the same class as its text.
        targets = [
            str(int(value)) if isinstance(value, float) and value.is_integer() else str(value) for value in targets
        ]
    inputs = np.array(values, np.float64).reshape(len(targets), len(names))
    return CsvRows(inputs, np.array(targets), names, np.array(kept, np.int64))


def _number(value: Any, where: str, name: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # JSON has whole numbers of any length
        number = math.inf
    if not math.isfinite(number):
        found = "has no value" if value is None else f"is {repr(value)[:40]}, not a finite number"
        raise BadRecordError(f"{where} column '{name}' {found}; fill it, or remove the row or the column")
    return number


def _target(value: Any, where: str, name: str) -> float | str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    return _number(value, where, name)
