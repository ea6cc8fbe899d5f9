"""Numbers and targets of a table in a file of rows (Parquet, Arrow, JSON lines); bad rows are left out and counted."""

import math
import re
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.formats.arrow import ArrowReader, with_names
from jaxtrain.data.formats.opened import DataFile, named_classes, open_file, pass_over_file
from jaxtrain.data.formats.parquet import ParquetReader
from jaxtrain.data.formats.reader import missing_column
from jaxtrain.data.skipped import NAMED, BadRecordError, SkippedRecords, without_advice
from jaxtrain.data.sources.table_columns import AskedColumns, FirstText, TableRows, input_columns
from jaxtrain.data.sources.table_targets import target_of
from jaxtrain.data.text.records import float_of
from jaxtrain.errors import DataError
from jaxtrain.runtime.terminal import print_remark

_INDEX = re.compile(r"__index_level_\d+__")


def read_table_rows(files: Sequence[DataFile], asked: AskedColumns, *, skipped: SkippedRecords | None) -> TableRows:
    """Reads the columns of a table into memory.

    Args:
        files: With the same columns.
        asked: Which columns.
        skipped: Counts the bad rows, which are left out; None: a bad row is an error.

    Raises:
        DataError: A file is damaged or lacks a column, a value is no number, or too many rows are bad.
    """
    target, columns = asked.target, asked.columns
    # The first file with rows: writers in parallel leave empty ones.
    first_where, first = next((found for file in files for found in pass_over_file(file, None)), ("", {}))
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
    first_text = None
    num_rows = num_bad = 0

    def leave_out(error: BadRecordError) -> None:
        nonlocal num_bad, num_rows
        if skipped is None:
            raise error
        num_rows, num_bad = num_rows + 1, num_bad + 1
        if len(bad) < NAMED:
            bad.append(without_advice(error))

    told = columns is not None or asked.are_known

    def tell_others(where: str, found: Iterable[str]) -> None:
        nonlocal told
        more = [name for name in found if name not in first and not _INDEX.fullmatch(name)]
        if more and not told:
            told = True
            print_remark(
                f"{where} has column '{more[0]}', which {first_where} lacks: it is no input; give all rows the same "
                "columns, or list the inputs in data.columns"
            )

    wanted = [*(("columns" if columns else None, name) for name in names), ("target", chosen)]
    for file in files:
        if not told:
            tell_others(str(file.path), _columns_of(file))
        classes = None if asked.as_numbers else named_classes(file, chosen)
        for where, row in pass_over_file(file, wanted, bad=leave_out):
            try:
                if not told and not row.keys() <= first.keys():
                    tell_others(where, row)
                numbers = [_number(row[name], where, name) for name in names]
                given = row[chosen] if classes is None else with_names(row[chosen], classes)
                if classes is not None and isinstance(given, int):
                    raise BadRecordError(
                        f"{where} column '{chosen}' is {given}, no class that the file names; remove it"
                    )
                value = target_of(given, where=where, column=chosen, as_numbers=asked.as_numbers)
            except BadRecordError as error:
                leave_out(error)
                continue
            if first_text is None and isinstance(value, str):
                first_text = FirstText(f"{where} column '{chosen}'", value)
            values.extend(numbers)
            targets.append(value)
            kept.append(num_rows)
            num_rows += 1
    if skipped is not None:
        skipped.set(bad, num_bad, of=num_rows)
        skipped.tell()
    inputs = np.array(values, np.float64).reshape(len(targets), len(names))
    found = [value for value in targets if not isinstance(value, str)]
    return TableRows(inputs, targets, names, np.array(kept, np.int64), found, first_text)


def _columns_of(file: DataFile) -> list[str]:
    """Returns the columns that all rows of a file have; nothing for a format whose rows have columns of their own."""
    reader = open_file(file, None) if file.format in ("parquet", "arrow") else None
    return reader.schema.names if isinstance(reader, ParquetReader | ArrowReader) and len(reader) else []


def _number(value: Any, where: str, name: str) -> float:
    number = float_of(value)
    if math.isnan(number):
        found = "has no value" if value is None else f"is {repr(value)[:40]}, not a finite number"
        raise BadRecordError(f"{where} column '{name}' {found}; fill it, or remove the row or the column")
    return number
