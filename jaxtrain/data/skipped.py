"""Records that cannot be read: skipped where the config says so, counted, and never more than a bound."""

import json
import threading
from collections.abc import Sequence
from typing import Any

from jaxtrain.errors import DataError
from jaxtrain.runtime.terminal import print_remark

# So many are named; the others are counted alone, so that a file of a billion bad lines costs no memory.
NAMED = 20


class BadRecordError(DataError):
    """The content of one record is wrong: reading it again gives the same, so that every process may skip it."""


class SkippedRecords:
    """Counts the skipped records of a source; above a fraction of 0, one always may be skipped."""

    def __init__(self, label: str, *, max_fraction: float):
        self._label, self._max_fraction = label, max_fraction
        # Images are decoded on several threads.
        self._lock = threading.Lock()
        self._seen: dict[str, None] = {}
        self._num_told = 0
        self.count = 0

    @property
    def named(self) -> tuple[str, ...]:
        """What is wrong with the first of them, with the file and the place."""
        return tuple(self._seen)[:NAMED]

    def add(self, error: BadRecordError, *, of: int) -> None:
        """Counts a record of a source of `of` that is read row by row, once; a DataError where there are too many."""
        text = without_advice(error)
        with self._lock:
            if text not in self._seen:
                # Before it is counted, so that reading it once more is the same error.
                self._check(of, self.count + 1, text)
                self._seen[text] = None
                self.count += 1
                self.tell()

    def set(self, named: Sequence[str], count: int, *, of: int) -> None:
        """Counts the records skipped in a pass over a source of `of`; a DataError where there are too many."""
        if count:
            self._check(of, count, named[0])
        self._seen, self.count = dict.fromkeys(named), count

    def tell(self) -> None:
        """Prints the names that were not printed yet."""
        for text in self.named[self._num_told :]:
            self._num_told += 1
            print_remark(f"skipped bad record {self._num_told}: {text}")

    def _check(self, of: int, count: int, example: str) -> None:
        allowed = max(1, int(self._max_fraction * of)) if self._max_fraction else 0
        if count > allowed:
            raise DataError(
                f"{self._label} has at least {count:,} bad records of {of:,}, more than data.max_bad_fraction="
                f"{self._max_fraction:g} allows ({allowed:,}), such as: {example}; repair them, or raise it"
            )


def skipped_records(label: str, *, on_bad_record: str, max_bad_fraction: float) -> SkippedRecords | None:
    """Returns what counts the bad records of a source; None where the first one is an error."""
    return SkippedRecords(label, max_fraction=max_bad_fraction) if on_bad_record == "skip" else None


def without_advice(error: BadRecordError) -> str:
    """Returns what is wrong, without what the user could do about it."""
    text = str(error)
    return text.rpartition("; ")[0] or text


def json_object(line: str, *, where: str) -> dict[str, Any]:
    """Returns the object of a line of JSON at `where`; a BadRecordError where it holds none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRecordError(f"{where} is not JSON ({error}); fix or remove the line") from None
    if not isinstance(found, dict):
        raise BadRecordError(f"{where} is {type(found).__name__} and no object; write one object per line")
    return found
