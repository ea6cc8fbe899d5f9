"""Rows of one text each, encoded when they are read: files of any size need no pass before the first step.

Shapes: B rows of a batch, L tokens per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.config.data import DocumentsData, added_tokens
from jaxtrain.data.formats.opened import find_rows, open_rows
from jaxtrain.data.formats.reader import Reader, good_value
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.rows import Row, Rows
from jaxtrain.data.skipped import BadRecordError, SkippedRecords, skipped_records
from jaxtrain.data.sources.parts import tokenizer_lines
from jaxtrain.data.sources.texts import documents_of, text_of_row
from jaxtrain.data.tokenizer import Tokenizer, build_tokenizer, encode_all, named_end, tokenizer_sha256


@dataclass(frozen=True)
class DocumentSides:
    """Rows of texts, and what `Data` says of them.

    Attributes:
        train: The training rows.
        validation: The rows kept for evaluation; None: there are none.
        tokenizer: Makes the ids.
        identity: Values that identify the rows, for the fingerprint.
        description: Lines that describe the rows to the user.
        skipped: Counts the bad rows; None: a bad row is an error.
    """

    train: Rows
    validation: Rows | None
    tokenizer: Tokenizer
    identity: dict[str, Any]
    description: tuple[str, ...]
    skipped: SkippedRecords | None


def open_document_rows(config: DocumentsData, *, sequence_length: int) -> DocumentSides:
    """Opens texts by row.

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
    skipped = skipped_records(config.path, on_bad_record=config.on_bad_record, max_bad_fraction=config.max_bad_fraction)
    sides = split_examples(len(reader), validation_fraction=config.validation_fraction, label=config.path)
    # In the order of the files, so that evaluation reads them from the first row to the last.
    train, validation = (np.sort(side) for side in sides)
    made = [
        DocumentRows(reader, config.field, tokenizer, side, sequence_length, skipped) for side in (train, validation)
    ]
    return DocumentSides(
        train=made[0],
        validation=made[1] if len(validation) else None,
        tokenizer=tokenizer,
        identity={
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
        description=(
            f"{config.path}: {len(reader):,} texts in {len(files):,} files, each cut to {sequence_length:,} tokens",
            f"{len(train):,} training rows and {len(validation):,} validation rows, encoded when they are read",
            *tokenizer_lines(tokenizer, tokenizer.vocab_size),
        ),
        skipped=skipped,
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
        label = self._reader.label
        return [
            good_value(self._text, place, num_rows=len(self), skipped=self._skipped, label=label)
            for place in places.tolist()
        ]

    def _text(self, place: int) -> str:
        number = int(self._numbers[place])
        return text_of_row(self._reader.rows([number])[0], self._field, where=self._reader.name_of(number))
