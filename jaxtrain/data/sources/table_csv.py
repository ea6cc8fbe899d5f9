"""Numbers and targets of a CSV file with a header; bad rows are errors, or are left out and counted."""

import math
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxtrain.data.files import BYTE_ORDER_MARK, decode_utf8, read_file
from jaxtrain.data.skipped import NAMED, BadRecordError, SkippedRecords, without_advice
from jaxtrain.data.sources.table_columns import AskedColumns, FirstText, TableRows, input_columns
from jaxtrain.data.sources.table_targets import as_known_classes, target_of
from jaxtrain.data.text.records import TRUTH, csv_rows, number_in, stripped_header
from jaxtrain.errors import DataError
from jaxtrain.runtime.terminal import print_remark


def read_csv(path: Path, asked: AskedColumns, *, skipped: SkippedRecords | None) -> TableRows:
    """Reads a CSV file with a header.

    Args:
        path: The file.
        asked: Which columns.
        skipped: Counts the bad rows, which are left out; None: a bad row is an error.

    Raises:
        DataError: The file is no CSV of numbers, or has too many bad rows.
    """
    values = array("d")
    targets: list[str] = []
    found: list[float] = []
    kept: list[int] = []
    bad: list[str] = []
    num_rows = 0

    def leave_out(error: BadRecordError) -> None:
        nonlocal num_rows
        if skipped is None:
            raise error
        num_rows += 1
        if num_rows - len(kept) <= NAMED:
            bad.append(without_advice(error))

    rows = csv_rows(_text(path, keeps_bytes=skipped is not None), path=path, bad=leave_out)
    _, header = next(rows, ("", []))
    header = stripped_header(header)
    chosen = _target_column(header, target=asked.target, path=path)
    columns = asked.columns and [name if name in header else name.strip() for name in asked.columns]
    names = input_columns(_usual(header, chosen, asked, path), header[chosen], columns, where=f"{path}:1")
    places = [header.index(name) for name in names]
    first_text = None
    for where, row in rows:
        try:
            numbers, value, number = _parsed(row, header, chosen, places, where=where)
            if number is None and asked.as_numbers:
                target_of(value, where=where, column=header[chosen], as_numbers=True)  # which says what is wrong
        except BadRecordError as error:
            leave_out(error)
            continue
        if number is not None:
            found.append(number)
        elif first_text is None:
            first_text = FirstText(f"{where} column '{header[chosen]}'", value)
        values.extend(numbers)
        targets.append(value)
        kept.append(num_rows)
        num_rows += 1
    # Names of numbers alone may be names, beside a class that is one of the rows they are not.
    if names and header[chosen] in targets and all(number_in(name) is not None for name in names):
        raise DataError(
            f"{path}:1 is a row ({names[0]}, ..., {header[chosen]}), not names of columns; write names above it, such "
            "as a,b,class"
        )
    inputs = np.array(values, np.float64).reshape(len(targets), len(places))
    if skipped is not None:
        skipped.set(bad, num_rows - len(kept), of=num_rows)
        skipped.tell()
    kept_targets = found if first_text is None else targets
    if asked.classes is not None:
        kept_targets = as_known_classes(targets, asked.classes, are_numbers=first_text is None)
    return TableRows(inputs, kept_targets, names, np.array(kept, np.int64), found, first_text)


def _usual(header: Sequence[str], chosen: int, asked: AskedColumns, path: Path) -> Sequence[str]:
    """Returns the columns that may be inputs: a first one without a name is none, unless it was asked for."""
    # pandas writes the numbers of rows into it, by which a table in the order of its classes is learned by heart.
    if header[0] or chosen == 0 or len(header) < 3 or asked.columns is not None:
        return header
    print_remark(
        f"{path}: the first column has no name, as row numbers of pandas have none, and is no input; to use it, list "
        "all inputs in data.columns, '' among them"
    )
    return header[1:]


def _text(path: Path, *, keeps_bytes: bool) -> str:
    """Returns the text of a file; with `keeps_bytes`, bytes that are no UTF-8 as half characters, below the header."""
    content = read_file(path)
    end = content.find(b"\n") + 1 if keeps_bytes else 0
    if not end:
        return decode_utf8(content, path=path).removeprefix(BYTE_ORDER_MARK)
    header = decode_utf8(content[:end], path=path).removeprefix(BYTE_ORDER_MARK)
    return header + content[end:].decode("utf-8", errors="surrogateescape")


def _parsed(
    row: Sequence[str], header: Sequence[str], chosen: int, places: Sequence[int], *, where: str
) -> tuple[list[float], str, float | None]:
    """Returns the inputs of a line, its target, and the number that the target writes, or None.

    Raises:
        BadRecordError: It has another number of fields than the header, or a field without a value.
    """
    if len(row) != len(header):
        raise BadRecordError(f"{where} has {len(row)} fields, the header has {len(header)}; fix or remove the line")
    numbers = [_number(row[place], where, header[place]) for place in places]
    value = row[chosen].strip()
    number = number_in(value)
    if number is None and (not value or _is_no_value(value)):
        raise BadRecordError(f"{where} column '{header[chosen]}' has no value; fill it or remove the line")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise BadRecordError(f"{where} column '{header[chosen]}' is not UTF-8; write it again, or remove the line")
    return numbers, value, number


def _target_column(header: Sequence[str], *, target: str | None, path: Path) -> int:
    if len(header) < 2:
        raise DataError(f"{path}:1 has {len(header)} columns; give a header with at least one input and the target")
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise DataError(f"{path}:1 names column '{repeated[0]}' twice; rename one")
    if all(number_in(name) is not None for name in header):
        raise DataError(f"{path}:1 holds only numbers; the first line must name the columns")
    if target is None:
        return len(header) - 1
    target = target if target in header else target.strip()
    if target not in header:
        raise DataError(
            f"{path} has no column '{target}' (it has: {', '.join(header)}); set data.target to one of them"
        )
    return list(header).index(target)


def _number(cell: str, where: str, name: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = TRUTH.get(cell.strip().lower(), math.nan)
    if not math.isfinite(number) or "_" in cell:  # as `float_of`, in half of its time
        text = cell.strip()
        found = "empty" if not text else text if _is_no_value(text) else f"{cell!r}, not a number"
        raise BadRecordError(f"{where} column '{name}' is {found}; fill it, or remove the line or the column")
    return number


def _is_no_value(text: str) -> bool:
    """Returns whether a text is NaN or infinite, as Python writes and reads them."""
    try:
        return not math.isfinite(float(text))
    except ValueError:
        return False
