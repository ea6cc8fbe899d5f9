"""Documents of any source of text, and rows of one document each, which are encoded when they are read.

Shapes: B rows of a batch, L tokens per row.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxtrain.config.data import DocumentsData, JsonlData, TextData, added_tokens
from jaxtrain.data.documents import Documents, builtin_documents
from jaxtrain.data.end_of_text import end_lines, named_end
from jaxtrain.data.examples import split_examples
from jaxtrain.data.files import find_files
from jaxtrain.data.formats.open import DataFile, find_rows, open_rows, pass_over_file
from jaxtrain.data.formats.reader import Cells, Reader, good_value
from jaxtrain.data.rows import Row, Rows
from jaxtrain.data.skipped import NAMED, BadRecordError, SkippedRecords, skipped_records, without_advice
from jaxtrain.data.sources.dataset import Data
from jaxtrain.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer, encode_all, tokenizer_sha256
from jaxtrain.errors import DataError

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
    if config.path is None:
        if not isinstance(config, TextData) or config.builtin is None:
            raise DataError("data.path and data.builtin are both null; set one, for example data.builtin=python_prose")
        return builtin_documents(config.builtin)
    skipped, field = None, "text"
    if isinstance(config, TextData):
        files = [DataFile(name, path, "text") for name, path in find_files(config.path, suffix=".txt")]
    else:
        field = config.field
        skipped = skipped_records(
            config.path, on_bad_record=config.on_bad_record, max_bad_fraction=config.max_bad_fraction
        )
        if isinstance(config, JsonlData):
            files = [DataFile(name, path, "lines") for name, path in find_files(config.path, suffix=".jsonl")]
        else:
            files = find_rows(config.path, what="data.path")
    sizes = tuple((file.name, file.path.stat().st_size) for file in files)
    return Documents(config.path, sizes, lambda: _texts(files, field, skipped), skipped)


def _texts(files: Sequence[DataFile], field: str, skipped: SkippedRecords | None) -> Iterator[str]:
    """Yields the texts of a column; rows without one are left out and counted where `skipped` is given."""
    num_rows = num_bad = 0
    named: list[str] = []

    def leave_out(error: BadRecordError) -> None:
        nonlocal num_bad
        if skipped is None:
            raise error
        num_bad += 1
        if len(named) < NAMED:
            named.append(without_advice(error))

    for file in files:
        for where, row in pass_over_file(file, [("field", field)], bad=leave_out):
            try:
                text = text_of_row(row, field, where=where)
            except BadRecordError as error:
                leave_out(error)
                continue
            num_rows += 1
            yield text
    if skipped is not None:
        skipped.set(named, num_bad, of=num_rows + num_bad)


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


def tokenizer_lines(tokenizer: Tokenizer | None, vocab_size: int) -> list[str]:
    """Returns a line about a tokenizer, and one about what ends documents where it is not what its kind says."""
    kind = "none" if tokenizer is None else "bytes" if isinstance(tokenizer, ByteTokenizer) else "byte-level BPE"
    return [f"tokenizer: {kind}, {vocab_size:,} ids", *end_lines(tokenizer)]


def row_length(configured: int | None, default: int | None) -> int:
    """Returns the tokens per row: the configured number, or else that of the model.

    Raises:
        DataError: Neither is given.
    """
    length = configured or default
    if length is None:
        raise DataError("data.sequence_length is null and the model has no max_sequence_length; set it, such as 256")
    return length


def open_document_rows(config: DocumentsData, *, sequence_length: int | None) -> Data:
    """Opens texts by row: files of any size need no pass before the first step.

    Args:
        config: Which texts.
        sequence_length: L where `config` does not say it.

    Returns:
        Rows of `inputs` and `targets` int32 [L], and `weights` float32 [L], 0 after the end of the text.

    Raises:
        DataError: A file is damaged, lacks the column, or cannot be read by row. Reading a row raises it where the row
            holds no text and is not to be skipped.
    """
    sequence_length = row_length(config.sequence_length, sequence_length)
    files = find_rows(config.path, what="data.path")
    reader = open_rows(files, [("field", config.field)], label=config.path)
    tokenizer = build_tokenizer(config.tokenizer, documents_of(config).read(), special=added_tokens(config))
    skipped = skipped_records(config.path, on_bad_record=config.on_bad_record, max_bad_fraction=config.max_bad_fraction)
    sides = split_examples(len(reader), validation_fraction=config.validation_fraction, label=config.path)
    # In the order of the files, so that evaluation reads them from the first row to the last.
    train, validation = (
        DocumentRows(reader, config.field, tokenizer, np.sort(side), sequence_length, skipped) for side in sides
    )
    return Data(
        train=train,
        validation=validation if len(validation) else None,
        fingerprint={
            "kind": config.kind,
            "rows": config.rows,
            "files": [file.identity for file in files],
            "field": config.field,
            "sequence_length": sequence_length,
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            **named_end(tokenizer),
            "num_rows": len(train),
            "num_validation_rows": len(validation),
        },
        vocab_size=tokenizer.vocab_size,
        input_shape=(sequence_length,),
        unit="tokens",
        units_per_row=sequence_length,
        tokenizer=tokenizer,
        description=(
            f"{config.path}: {len(reader):,} texts in {len(files):,} files, each cut to {sequence_length:,} tokens",
            f"{len(train):,} training rows and {len(validation):,} validation rows, encoded when they are read",
            *tokenizer_lines(tokenizer, tokenizer.vocab_size),
        ),
        skipped=() if skipped is None else (skipped,),
    )


class DocumentRows(Rows):
    """Rows of one text each, with the end of the text after it, filled up at the end.

    Args:
        reader: The texts.
        field: Column of the text.
        tokenizer: Makes the ids.
        numbers: Which rows of the reader, int64.
        sequence_length: L.
        skipped: Counts the bad rows, in whose place the next good one is read; None: a bad row is an error.
    """

    def __init__(
        self,
        reader: Reader,
        field: str,
        tokenizer: Tokenizer,
        numbers: np.ndarray,
        sequence_length: int,
        skipped: SkippedRecords | None,
    ):
        super().__init__(len(numbers))
        self._reader, self._field, self._tokenizer, self._numbers = reader, field, tokenizer, numbers
        self._length, self._skipped = sequence_length, skipped
        end = tokenizer.end_of_text
        self._mark = tokenizer.encode("\n") if end is None else np.array([end], np.int32)

    def name_of(self, number: int) -> str:
        return self._reader.name_of(int(self._numbers[number]))

    def gather(self, indices: np.ndarray) -> Row:
        encoded = encode_all(self._tokenizer, self._texts(indices % len(self)))
        shape = (len(indices), self._length)
        inputs_BL, targets_BL = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        weights_BL = np.zeros(shape, np.float32)
        for place, ids in enumerate(encoded):
            ids = np.concatenate([ids[: self._length + 1], self._mark])[: self._length + 1]
            count = len(ids) - 1
            inputs_BL[place, :count], targets_BL[place, :count] = ids[:-1], ids[1:]
            weights_BL[place, :count] = 1
        return {"inputs": inputs_BL, "targets": targets_BL, "weights": weights_BL}

    def _texts(self, places: np.ndarray) -> Sequence[str]:
        numbers = self._numbers[places].tolist()
        try:
            rows = self._reader.rows(numbers)
            names = map(self._reader.name_of, numbers)
            return [text_of_row(row, self._field, where=name) for row, name in zip(rows, names, strict=True)]
        except BadRecordError:
            if self._skipped is None:
                raise
        label, size = self._reader.label, len(self)
        return [good_value(self._text, i, num_rows=size, skipped=self._skipped, label=label) for i in places.tolist()]

    def _text(self, place: int) -> str:
        number = int(self._numbers[place])
        return text_of_row(self._reader.rows([number])[0], self._field, where=self._reader.name_of(number))
