"""Numbers and targets of a CSV file with a header; bad rows are errors, or are left out and counted."""

import csv
import io
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.data.files import BYTE_ORDER_MARK, decode_utf8, read_file
from jaxtrain.data.skipped import NAMED, BadRecordError, SkippedRecords, without_advice
from jaxtrain.errors import DataError


@dataclass(frozen=True)
class CsvRows:
    """The rows of a CSV file.

    Attributes:
        inputs: float64 [N, D].
        targets: Texts or numbers, [N].
        columns: Names of the input columns.
        numbers: Number of each row in the file, from 0: int64 [N].
    """

    inputs: np.ndarray
    targets: np.ndarray
    columns: tuple[str, ...]
    numbers: np.ndarray


def read_csv(
    path: Path, *, target: str | None, columns: Sequence[str] | None = None, skipped: SkippedRecords | None
) -> CsvRows:
    """Reads a CSV file with a header.

    Args:
        path: The file.
        target: Column to predict; None: the last one.
        columns: Those that are inputs; None: all others.
        skipped: Counts the bad rows, which are left out; None: a bad row is an error.

    Raises:
        DataError: The file is no CSV of numbers, or has too many bad rows.
    """
    try:
        return _parse_csv(path, target=target, columns=columns, skipped=skipped)
    except csv.Error as error:
        raise DataError(f"{path} is not CSV ({error}); write it with a header and commas") from None


def _parse_csv(
    path: Path, *, target: str | None, columns: Sequence[str] | None, skipped: SkippedRecords | None
) -> CsvRows:
    values = array("d")
    targets: list[str] = []
    kept: list[int] = []
    bad: list[str] = []
    num_rows = 0
    reader = csv.reader(io.StringIO(_text(path, keeps_bytes=skipped is not None), newline=""))
    header = next(reader, [])
    chosen = _target_column(header, target=target, path=path)
    names = input_columns(header, header[chosen], columns, where=f"{path}:1")
    places = [header.index(name) for name in names]
    for row in reader:
        if not row:
            continue
        num_rows += 1
        try:
            numbers, value = _parsed(row, header, chosen, places, where=f"{path}:{reader.line_num}")
        except BadRecordError as error:
            if skipped is None:
                raise
            if num_rows - len(kept) <= NAMED:
                bad.append(without_advice(error))
            continue
        values.extend(numbers)
        targets.append(value)
        kept.append(num_rows - 1)
    # Names of numbers alone may be names, beside a class that is one of the rows they are not.
    if names and header[chosen].strip() in targets and all(_is_number(name) for name in names):
        raise DataError(
            f"{path}:1 is a row ({names[0]}, ..., {header[chosen]}), not names of columns; write names above it, such "
            "as a,b,class"
        )
    inputs = np.array(values, np.float64).reshape(len(targets), len(places))
    if skipped is not None:
        skipped.set(bad, num_rows - len(kept), of=num_rows)
        skipped.tell()
    return CsvRows(inputs, _numbers_or_strings(targets), names, np.array(kept, np.int64))


def _text(path: Path, *, keeps_bytes: bool) -> str:
    """Returns the text of a file; with `keeps_bytes`, bytes that are no UTF-8 as half characters, below the header."""
    content = read_file(path)
    end = content.find(b"\n") + 1 if keeps_bytes else 0
    if not end:
        return decode_utf8(content, path=path).removeprefix(BYTE_ORDER_MARK)
    header = decode_utf8(content[:end], path=path).removeprefix(BYTE_ORDER_MARK)
    return header + content[end:].decode("utf-8", errors="surrogateescape")


def input_columns(there: Sequence[str], target: str, columns: Sequence[str] | None, *, where: str) -> tuple[str, ...]:
    """Returns the columns of a table that are inputs.

    Args:
        there: All columns.
        target: The one to predict.
        columns: Those that the user chose; None: all but the target.
        where: The file, for messages.

    Raises:
        DataError: One is missing, is the target, or was chosen twice.
    """
    for number, name in enumerate(columns or ()):
        if name not in there:
            raise DataError(f"{where} has no column '{name}' (it has: {', '.join(there)}); set data.columns to some")
        if name == target or name in (columns or ())[:number]:
            why = "is the target" if name == target else "stands there twice"
            raise DataError(f"data.columns names '{name}', which {why}; leave it out")
    return tuple(name for name in there if name != target) if columns is None else tuple(columns)


def _parsed(
    row: Sequence[str], header: Sequence[str], chosen: int, places: Sequence[int], *, where: str
) -> tuple[list[float], str]:
    """Returns the inputs of a line, and its target.

    Raises:
        BadRecordError: It has another number of fields than the header, or a field without a value.
    """
    if len(row) != len(header):
        raise BadRecordError(f"{where} has {len(row)} fields, the header has {len(header)}; fix or remove the line")
    numbers = [_number(row[place], where, header[place]) for place in places]
    value = row[chosen].strip()
    if not value or (_is_number(value) and not math.isfinite(float(value))):
        raise BadRecordError(f"{where} column '{header[chosen]}' has no value; fill it or remove the line")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise BadRecordError(f"{where} column '{header[chosen]}' is not UTF-8; write it again, or remove the line")
    return numbers, value


def _target_column(header: Sequence[str], *, target: str | None, path: Path) -> int:
    if len(header) < 2:
        raise DataError(f"{path}:1 has {len(header)} columns; give a header with at least one input and the target")
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise DataError(f"{path}:1 names column '{repeated[0]}' twice; rename one")
    if all(_is_number(name) for name in header):
        raise DataError(f"{path}:1 holds only numbers; the first line must name the columns")
    if target is None:
        return len(header) - 1
    if target not in header:
        raise DataError(
            f"{path} has no column '{target}' (it has: {', '.join(header)}); set data.target to one of them"
        )
    return list(header).index(target)


def _number(cell: str, where: str, name: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        found = f"{cell!r}, not a number" if cell.strip() else "empty"
        raise BadRecordError(f"{where} column '{name}' is {found}; fill it, or remove the line or the column") from None
    if not math.isfinite(value):
        raise BadRecordError(f"{where} column '{name}' is {cell.strip()}; fill it, or remove the line or the column")
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers_or_strings(targets: Sequence[str]) -> np.ndarray:
    if all(_is_number(text) for text in targets):
        return np.array([float(text) for text in targets], np.float64)
    return np.array(targets)
