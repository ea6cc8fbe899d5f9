"""Documents of any source of text: files of plain text, JSON lines, and a column of any other format."""

from collections.abc import Iterator, Sequence

from jaxtrain.config.data import DocumentsData, JsonlData, TextData
from jaxtrain.data.formats.opened import DataFile, find_rows, pass_over_file
from jaxtrain.data.formats.reader import Cells
from jaxtrain.data.skipped import NAMED, BadRecordError, SkippedRecords, skipped_records, without_advice
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.data.tokens import Documents, TokenSource, encoded_source, open_documents

# The sources whose texts become tokens.
TextSource = TextData | JsonlData | DocumentsData


def documents_of(config: TextSource) -> Documents:
    """Finds the documents of a source without reading them.

    Args:
        config: Which text.

    Returns:
        The documents; calling their `read` reads them.

    Raises:
        DataError: A file is missing, empty or of no known format. `read` raises it where a file is damaged.
    """
    if not isinstance(config, DocumentsData):
        return open_documents(config)
    files = find_rows(config.path, what="data.path")
    skipped = skipped_records(config.path, on_bad_record=config.on_bad_record, max_bad_fraction=config.max_bad_fraction)
    sizes = tuple((file.name, file.state.num_bytes) for file in files)
    return Documents(config.path, sizes, lambda: _texts(files, config.field, skipped), skipped)


def text_source(config: TextSource, *, tokenizer: Tokenizer | None = None) -> TokenSource:
    """Encodes a text source into memory.

    Args:
        config: Which text.
        tokenizer: Used in place of the tokenizer of `config`.

    Raises:
        DataError: The text cannot be read, or is empty.
    """
    return encoded_source(config, documents_of(config), tokenizer=tokenizer)


def text_of_row(row: Cells, field: str, *, where: str) -> str:
    """Returns the text of a row.

    Args:
        row: Its columns.
        field: Name of the column.
        where: File and row, for messages.

    Raises:
        BadRecordError: It holds something else, or nothing.
    """
    value = row[field]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRecordError(
                f"{where} column '{field}' is not UTF-8 at byte {error.start}; set data.field"
            ) from None
    if not isinstance(value, str):
        found = "has no value" if value is None else f"holds a value of type {type(value).__name__}, not text"
        raise BadRecordError(f"{where} column '{field}' {found}; set data.field, or remove the row")
    return value


def _texts(files: Sequence[DataFile], field: str, skipped: SkippedRecords | None) -> Iterator[str]:
    """Yields the texts of a column; rows without one are left out and counted where `skipped` is given."""
    num_rows = num_bad = 0
    named: list[str] = []

    def leave_out(error: BadRecordError) -> None:
        nonlocal num_bad
        num_bad += 1
        if len(named) < NAMED:
            named.append(without_advice(error))

    for file in files:
        for where, row in pass_over_file(file, [("field", field)], bad=None if skipped is None else leave_out):
            num_rows += 1
            try:
                text = text_of_row(row, field, where=where)
            except BadRecordError as error:
                if skipped is None:
                    raise
                num_rows -= 1
                leave_out(error)
                continue
            yield text
    if skipped is not None:
        skipped.set(named, num_bad, of=num_rows + num_bad)
