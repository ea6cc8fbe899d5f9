"""The rows of metrics of a run, whatever happens to their file: full disks and files that vanish are survived.

A row that cannot be written waits in memory and is tried again with the next one. A file that was deleted, moved or
replaced is written again: as long as it is open its rows can be read, whoever deleted its name.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.errors import StorageError
from jaxtrain.metrics.writers import JsonlWriter, Scalars, row_of, text_row_of

# Rows that wait while nothing can be written; at a row per second these are three hours.
_MOST_WAITING = 10_000


class LastingWriter:
    """Writes rows through a `JsonlWriter`; an error of the disk never reaches the training.

    Args:
        writer: of metrics.jsonl.
        report: called with one line when rows begin to wait, and when they are written.
    """

    def __init__(self, writer: JsonlWriter, report: Callable[[str], None]) -> None:
        self._writer, self._report = writer, report
        self._waiting: list[tuple[int, Mapping[str, object]]] = []
        self._lost = 0
        self._reason: str | None = None

    def scalars(self, step: int, values: Scalars) -> None:
        self._add(step, row_of(step, values))

    def text(self, step: int, name: str, text: str | Mapping[str, Any]) -> None:
        self._add(step, text_row_of(step, name, text))

    def close(self) -> None:
        """Write the rows that wait, and close the file.

        Raises:
            StorageError: rows are still waiting, or were lost.
        """
        reason = self._write()
        self._writer.close()
        if reason is not None:
            first = self._waiting[0][0]
            count = len(self._waiting) + self._lost
            raise StorageError(
                f"{count} rows of metrics from step {first} on could not be written to {self._writer.path}: {reason}; "
                "free space, and train the steps again for them"
            )
        if self._lost:
            raise StorageError(
                f"rows of metrics are missing in {self._writer.path}, which could not be written or read for too long; "
                "train the steps again for them"
            )

    def is_in_place(self) -> bool:
        """Whether the file that rows are written to is the one at its path."""
        return self._writer.file.is_in_place()

    def write_again(self) -> str:
        """Write a file that vanished from its path again, with the rows that it had.

        Returns:
            What became of the rows, for people.
        """
        content = self._writer.file.content()
        try:
            self._writer.file.replace(b"" if content is None else content)
        except OSError as error:
            self._reason = error.strerror or str(error)
            return f"metrics.jsonl cannot be written again: {self._reason}"
        if content is None:
            self._lost += 1
            return "the rows of metrics.jsonl so far cannot be had back"
        return f"metrics.jsonl is written again ({len(content.splitlines())} rows)" if content else "metrics.jsonl"

    def _add(self, step: int, row: Mapping[str, object]) -> None:
        self._waiting.append((step, row))
        if len(self._waiting) > _MOST_WAITING:
            del self._waiting[0]
            self._lost += 1
        self._write()

    def _write(self) -> str | None:
        """Write the rows that wait, in their order; returns why some still wait."""
        before, self._reason = self._reason, None
        while self._waiting:
            step, row = self._waiting[0]
            try:
                self._writer.file.append(row)
            except OSError as error:
                self._reason = error.strerror or os.strerror(error.errno or 0)
                if before is None:
                    self._report(
                        f"metrics from step {step} on cannot be written to {self._writer.path}: {self._reason}; "
                        "training goes on, and the rows wait in memory"
                    )
                return self._reason
            del self._waiting[0]
        if before is not None:
            self._report(f"metrics are written to {self._writer.path} again, with the rows that waited")
        return None
