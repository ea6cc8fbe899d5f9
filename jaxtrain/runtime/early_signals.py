"""Signals to a run that has not begun: while jax is imported and the config read, nothing is lost. No jax here."""

import contextlib
import os
import signal
from types import FrameType
from typing import NoReturn

from jaxtrain.errors import PreemptedError, UserError
from jaxtrain.runtime.forks import drop_in_children

# Ctrl-C is Python's own, and ends the process at once as well.
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def end_at_signals() -> None:
    """Ends this process with exit code 75 at a signal that would kill it, until a run sets handlers of its own."""
    deadly = [number for number in _HEARD if signal.getsignal(number) is signal.SIG_DFL]
    for number in deadly:
        signal.signal(number, end_at_signal)
    if deadly:
        drop_in_children(_be_killed_by_signals)


def _be_killed_by_signals() -> None:
    """In a forked child, such as a worker of own data code, which the signal ends and not the run."""
    for number in _HEARD:
        if signal.getsignal(number) is end_at_signal:
            signal.signal(number, signal.SIG_DFL)


def end_at_signal(number: int, frame: FrameType | None) -> NoReturn:
    """The handler.

    Args:
        number: Of the signal.
        frame: Where the main thread was.
    """
    # Imported here, because a process that gets no signal has no use for it.
    from jaxtrain.runtime.cluster import detect_cluster

    try:
        is_alone = detect_cluster() is None
    except UserError:
        is_alone = True
    if not is_alone:
        # The others wait for this process, and must see that it did not end in order.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    with contextlib.suppress(OSError):
        name = signal.Signals(number).name
        os.write(2, f"\njaxtrain: stopped by {name} before the run began: run again to start\n".encode())
    os._exit(PreemptedError.exit_code)
