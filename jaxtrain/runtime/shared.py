"""A setting of the whole process that several threads may need at once, as where two runs train in two threads."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager


class SharedSetting:
    """A context that the first of several threads enters and the last one leaves, so that all is as it was before.

    Each entering on its own would keep, and put back at its end, what another thread had set.

    Args:
        setting: makes the context, which sets something of the process and puts it back.
    """

    def __init__(self, setting: Callable[[], AbstractContextManager[object]]) -> None:
        self._setting, self._undo = setting, contextlib.ExitStack()
        # What is freed meanwhile may come here in the same thread.
        self._lock, self._num_inside = threading.RLock(), 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._num_inside:
                self._undo.enter_context(self._setting())
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    self._undo.close()
