"""What was chosen while a step was traced, and why: one line per choice, for the log and for `run.json`."""

import contextlib
import contextvars
from collections.abc import Iterator

_notes: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("jaxtrain_choices", default=None)


@contextlib.contextmanager
def record_choices() -> Iterator[list[str]]:
    """Collects what `note_choice` notes inside, each line once."""
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def note_choice(operation: str, chosen: str, refused: list[tuple[str, str]]) -> None:
    """Note what an operation runs on.

    Args:
        operation: attention, ...
        chosen: name of the implementation.
        refused: name and reason of each that stood before it in the table.
    """
    notes = _notes.get()
    line = f"{operation}: {chosen}" + "".join(f", not {name} ({why})" for name, why in refused)
    if notes is not None and line not in notes:
        notes.append(line)
