"""Records that cannot be read: skipped where the config says so, named once each, and never more than a bound."""

import threading
from collections.abc import Sequence

from jaxtrain.errors import DataError
from jaxtrain.runtime.terminal import print_remark

# So many are named; the others are counted alone, so that a file of a billion bad lines costs no memory.
NAMED = 20


class BadRecordError(DataError):
    """The content of one record is wrong: reading it again gives the same, so that every process may skip it."""


class SkippedRecords:
    """Counts the records of a source that were skipped.

    Args:
        label: The source, for messages.
        max_fraction: Largest fraction of the records that may be skipped; above 0, one always may be.
    """

    def __init__(self, label: str, *, max_fraction: float):
        self._label, self._max_fraction = label, max_fraction
        # Images are decoded on several threads.
        self._lock = threading.Lock()
        self._count = 0
        self._seen: dict[str, None] = {}
        self._is_told = False

    @property
    def count(self) -> int:
        """Number of records that were skipped."""
        return self._count

    @property
    def named(self) -> tuple[str, ...]:
        """What is wrong with the first of them, with the file and the place."""
        return tuple(self._seen)[:NAMED]

    def add(self, error: BadRecordError, *, of: int) -> None:
        """Counts a record of a source that is read row by row, and names it; a second call for it does nothing.

        Args:
            error: What is wrong with it, and where it is.
            of: Number of records in the source.

        Raises:
            DataError: Too many were skipped.
        """
        text = without_advice(error)
        with self._lock:
            if text in self._seen:
                return
            # Before it is counted, so that reading it once more is the same error.
            self._check(of, self._count + 1, text)
            self._seen[text] = None
            self._count += 1
            self._tell(text, self._count)

    def set(self, named: Sequence[str], count: int, *, of: int) -> None:
        """Counts the records that were skipped in a pass over the whole source.

        Args:
            named: What is wrong with the first `NAMED` of them.
            count: Their number.
            of: Number of records in the source.

        Raises:
            DataError: There are too many.
        """
        if count:
            self._check(of, count, named[0])
        self._seen, self._count = dict.fromkeys(named), count

    def tell(self) -> None:
        """Names the records of the last pass, once."""
        if not self._is_told:
            self._is_told = True
            for number, text in enumerate(self.named, start=1):
                self._tell(text, number)
            if self._count > NAMED:
                print_remark(f"skipped {self._count - NAMED:,} more bad records of {self._label}")

    def _tell(self, text: str, number: int) -> None:
        if number <= NAMED:
            print_remark(f"skipped bad record {number}: {text}")

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
