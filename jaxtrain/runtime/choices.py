"""Records the implementations chosen while a step is traced, with reasons: a line each, for the log and `run.json`."""

import contextlib
import contextvars
from collections.abc import Iterator

_notes: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("jaxtrain_choices", default=None)


@contextlib.contextmanager
def record_choices() -> Iterator[list[str]]:
    """Collects the lines of `note_choice` inside the context, each line once; a context around it gets them too.

    Yields:
        The list of lines, which grows while the context is open.
    """
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)
        outer = _notes.get()
        if outer is not None:
            outer += [line for line in notes if line not in outer]


def note_choice(operation: str, chosen: str, refused: list[tuple[str, str]]) -> None:
    """Records which implementation an operation uses.

    Args:
        operation: Name of the operation, such as "attention".
        chosen: Name of the implementation.
        refused: Name of each implementation that comes before it in the table, and why it was not chosen.
    """
    notes = _notes.get()
    line = f"{operation}: {chosen}" + "".join(f", not {name} ({why})" for name, why in refused)
    if notes is not None and line not in notes:
        notes.append(line)
