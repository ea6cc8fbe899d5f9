"""Documents of any source of text, and rows of one document each, which are encoded when they are read.

Shapes: B rows of a batch, L tokens per row.
"""

from collections.abc import Sequence

import numpy as np

from jaxtrain.config.data import DocumentsData, JsonlData, TextData, added_tokens
from jaxtrain.data.files import find_files
from jaxtrain.data.formats.open import DataFile, find_rows, good_rows, open_rows
from jaxtrain.data.formats.reader import Cells, Reader, good_value
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.rows import Row, Rows
from jaxtrain.data.skipped import BadRecordError, SkippedRecords, skipped_records
from jaxtrain.data.sources.dataset import Data
from jaxtrain.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    build_tokenizer,
    encode_all,
    named_end,
    tokenizer_sha256,
)
from jaxtrain.data.tokens import Documents, builtin_documents
from jaxtrain.errors import DataError

# The sources whose texts become tokens.
TextSource = TextData | JsonlData | DocumentsData


def documents_of(config: TextSource) -> Documents:
    """Finds the documents of a source without reading them; calling their `read` reads them.

    Raises:
        DataError: A file is missing, empty or of no known format. `read` raises it where a file is damaged.
    """
    if isinstance(config, TextData):
        if config.path is None and config.builtin is None:
            raise DataError("data.path and data.builtin are both null; set one, such as data.builtin=python_prose")
        if config.path is None:
            return builtin_documents(config.builtin or "")
        files = [DataFile(name, path, "text") for name, path in find_files(config.path, suffix=".txt")]
        skipped, field = None, "text"
    else:
        skipped, field = _skipped(config), config.field
        if isinstance(config, JsonlData):
            files = [DataFile(name, path, "lines") for name, path in find_files(config.path, suffix=".jsonl")]
        else:
            files = find_rows(config.path, what="data.path")
    return Documents(
        str(config.path),
        tuple((file.name, file.path.stat().st_size) for file in files),
        lambda: good_rows(files, [("field", field)], lambda row, where: _text(row, field, where), skipped=skipped),
        skipped,
    )


def _skipped(config: JsonlData | DocumentsData) -> SkippedRecords | None:
    return skipped_records(config.path, on_bad_record=config.on_bad_record, max_bad_fraction=config.max_bad_fraction)


def _text(row: Cells, field: str, where: str) -> str:
    value = row[field]
    try:
        value = value.decode("utf-8") if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise BadRecordError(f"{where} column '{field}' is not UTF-8 at byte {error.start}; set data.field") from None
    if not isinstance(value, str):
        found = "has no value" if value is None else f"holds a value of type {type(value).__name__}, not text"
        raise BadRecordError(f"{where} column '{field}' {found}; set data.field, or remove the row")
    return value


def tokenizer_line(tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """Returns a line about a tokenizer."""
    kind = "none" if tokenizer is None else "bytes" if isinstance(tokenizer, ByteTokenizer) else "byte-level BPE"
    return f"tokenizer: {kind}, {vocab_size:,} ids"


def open_document_rows(config: DocumentsData, *, sequence_length: int) -> Data:
    """Opens texts by row: files of any size need no pass before the first step.

    Args:
        config: Which texts.
        sequence_length: L.

    Returns:
        Rows of `inputs` and `targets` int32 [L], and `weights` float32 [L], 0 after the end of the text.

    Raises:
        DataError: A file is damaged, lacks the column, or cannot be read by row. Reading a row raises it where the row
            holds no text and is not to be skipped.
    """
    files = find_rows(config.path, what="data.path")
    reader = open_rows(files, [("field", config.field)], label=config.path)
    tokenizer = build_tokenizer(config.tokenizer, documents_of(config).read(), special=added_tokens(config))
    skipped = _skipped(config)
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
            tokenizer_line(tokenizer, tokenizer.vocab_size),
        ),
        skipped=() if skipped is None else (skipped,),
    )


class DocumentRows(Rows):
    """Rows of one text each, with the end of the text after it, filled up at the end.

    Args:
        reader, field: The texts, and their column.
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
            rows = zip(self._reader.rows(numbers), numbers, strict=True)
            return [_text(row, self._field, self._reader.name_of(number)) for row, number in rows]
        except BadRecordError:
            if self._skipped is None:
                raise
        label, size = self._reader.label, len(self)
        return [good_value(self._one, i, num_rows=size, skipped=self._skipped, label=label) for i in places.tolist()]

    def _one(self, place: int) -> str:
        number = int(self._numbers[place])
        return _text(self._reader.rows([number])[0], self._field, self._reader.name_of(number))
