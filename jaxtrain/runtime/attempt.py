"""Which start of a run this process is, where a supervisor starts runs again. No jax here."""

import os

# Set by the supervisor: 0 at its first start, then the number of the restart.
ATTEMPT = "JAXTRAIN_ATTEMPT"


def attempt() -> int | None:
    """The number of restarts before this process; None: no supervisor started it."""
    text = os.environ.get(ATTEMPT, "")
    return int(text) if text.isascii() and text.isdigit() else None
