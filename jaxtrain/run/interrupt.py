"""SIGTERM and Ctrl-C as a wish that the loop reads between two steps: finish the step, save, exit 75.

With several processes all must stop at the same step. JAX's preemption service agrees on one, and it needs the SIGTERM
handler for itself: a Python handler set after `jax.distributed.initialize` silently disables it. So there SIGTERM is
left alone and Ctrl-C is passed on as SIGTERM.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

_FIRST = {
    signal.SIGINT: b"\nCtrl-C: finishing the step, saving, then exit 75; press again to stop at once\n",
    signal.SIGTERM: b"\nSIGTERM: finishing the step, saving, then exit 75\n",
}


class Interrupt:
    """Watches for SIGTERM and Ctrl-C while it is entered; enter it in the main thread, after `jax.distributed`.

    Outside the main thread no handler can be set, and a single process is never interrupted this way.
    """

    def __init__(self) -> None:
        self._several = False
        self._wanted = False
        self._presses = 0
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        import jax

        # Asking for the process count of an undistributed run would start the backend.
        self._several = jax.distributed.is_initialized() and jax.process_count() > 1
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT,) if self._several else (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not set from Python and cannot be set back from it.
            if handler is not None:
                signal.signal(number, handler)
        self._previous.clear()

    def requested(self, step: int) -> bool:
        """Whether to stop after this step. With several processes every one must ask, after every step."""
        if self._several:
            from jax.experimental import multihost_utils

            self._wanted = multihost_utils.reached_preemption_sync_point(step) or self._wanted
        return self._wanted

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._presses += 1
            if self._presses > 1:
                raise KeyboardInterrupt
        # Not print: a handler may run in the middle of another write to the same buffer.
        os.write(2, _FIRST[signal.Signals(number)])
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._wanted = True
