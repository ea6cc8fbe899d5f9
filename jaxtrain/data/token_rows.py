"""Rows of a stream of tokens, each its inputs and the same tokens shifted by one."""

from collections.abc import Sequence

import numpy as np

from jaxtrain.data.rows import Row, Rows
from jaxtrain.data.tokens import Span


class TokenRows(Rows):
    """Row i is tokens[i * L : i * L + L + 1] of a span: inputs int32 [L], and targets shifted by one.

    Args:
        segments: The stream of tokens as consecutive arrays, which may be memory-mapped.
        span: The part of the stream to read.
        sequence_length: L.
    """

    def __init__(self, segments: Sequence[np.ndarray], *, span: Span, sequence_length: int):
        super().__init__(span.num_rows(sequence_length))
        # Every slice of a memmap builds a Python object with metadata; a slice of a plain view of it does not.
        self._segments = [np.asarray(segment) for segment in segments]
        self._starts = np.concatenate([[0], np.cumsum([len(segment) for segment in segments])])
        self._span = span
        self._length = sequence_length

    def name_of(self, number: int) -> str:
        first = self._span.start + number * self._length
        return f"tokens {first:,} to {first + self._length:,} of its source"

    def gather(self, indices: np.ndarray) -> Row:
        starts = self._span.start + (indices % len(self)) * self._length
        first = np.searchsorted(self._starts, starts, side="right") - 1
        rows_BxL1 = np.empty((len(indices), self._length + 1), np.int32)
        for row, start, segment in zip(rows_BxL1, starts.tolist(), first.tolist(), strict=True):
            filled = 0
            while filled < len(row):
                offset = start + filled - int(self._starts[segment])
                part = self._segments[segment][offset : offset + len(row) - filled]
                row[filled : filled + len(part)] = part
                filled += len(part)
                segment += 1
        return {
            "inputs": np.ascontiguousarray(rows_BxL1[:, :-1]),
            "targets": np.ascontiguousarray(rows_BxL1[:, 1:]),
        }
