"""ArrayRecord files. A record is an object of JSON, or text in the column `text`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtrain.data.files import decode_utf8, reading
from jaxtrain.data.formats.reader import Cells, Column, check_columns, json_object

# Records that are read together.
_RECORDS = 512


def array_records(path: Path, columns: Sequence[Column] | None) -> Iterator[tuple[str, Cells]]:
    """Yields the file and the number of each record, and its columns; the first one decides what records are."""
    with reading(path):
        from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue] compiled

        reader = array_record_module.ArrayRecordReader(str(path))
    are_json = None
    for first in range(0, reader.num_records(), _RECORDS):
        numbers = range(first, min(first + _RECORDS, reader.num_records()))
        with reading(path):
            records = reader.read(list(numbers))
        for number, record in zip(numbers, records, strict=True):
            where = f"{path} record {number + 1}"
            are_json = record.lstrip().startswith(b"{") if are_json is None else are_json
            text = decode_utf8(record, path=Path(where))
            row = json_object(text, where=where) if are_json else {"text": text}
            check_columns(list(row), columns, where=where)
            yield where, row
