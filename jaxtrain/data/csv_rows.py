"""The rows of a .csv file, with the line at which each begins; a quote that swallows other lines is an error."""

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxtrain.data.files import MAX_LINE_BYTES
from jaxtrain.data.skipped import BadRecordError
from jaxtrain.errors import DataError


def csv_rows(
    text: str, *, path: Path, bad: Callable[[BadRecordError], None] | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Reads CSV text row by row; lines without anything are left out.

    Args:
        text: The content of the file.
        path: The file, for messages.
        bad: Called for each line below the header that is no CSV, which is left out; None: it is an error.

    Yields:
        The file with the line of the row, or its first and last one, and the fields of the row.

    Raises:
        BadRecordError: A line is no CSV.
        DataError: A quote that is opened in one line is closed wrongly, or nowhere, in a later one: the rows between
            are lost, and nothing says how many they are.
    """
    # A field may be a whole document. The limit is one of the process, so it is raised only.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    # Without `strict`, a field with an unclosed quote takes in the rest of the file.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=_separator(text))
    is_header = True
    while True:
        first = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            found = _error(str(error), path, first, reader.line_num)
            if bad is None or is_header or not isinstance(found, BadRecordError):
                raise found from None
            bad(found)
            continue
        if row is None:
            return
        if row:
            is_header = False
            yield f"{path}:{first}" if first == reader.line_num else f"{path}:{first}-{reader.line_num}", row


def _separator(text: str) -> str:
    """Returns what separates the names of a header: the most frequent of comma, tab and semicolon outside of quotes."""
    header = re.sub(r'"[^"]*"', "", text.lstrip("\r\n").partition("\n")[0])
    return max(",\t;", key=header.count)


def stripped_header(header: Sequence[str]) -> list[str]:
    """Returns names of columns without the spaces around them, as in `a, b, y`."""
    return [name.strip() for name in header]


def _error(reason: str, path: Path, first: int, last: int) -> DataError:
    if reason == "unexpected end of data":
        last_line = "" if first == last else f", so that it runs to the end of the file (line {last})"
        return DataError(
            f'{path}:{first} opens a quote (") that is never closed{last_line}; close it, or write a quote that is '
            'part of a text twice ("") in a field within quotes'
        )
    if first != last:
        return DataError(
            f'{path}:{first} opens a quote (") that runs to line {last}, where text follows the quote that closes it; '
            'close it in its own line, or write a quote that is part of a text twice ("") in a field within quotes'
        )
    if "expected after" in reason:
        return BadRecordError(
            f'{path}:{first} has text after the quote (") that closes a field; write a quote that is part of a text '
            'twice (""), or remove the line'
        )
    return BadRecordError(f"{path}:{first} is not CSV ({reason}); write it with a header and commas")
