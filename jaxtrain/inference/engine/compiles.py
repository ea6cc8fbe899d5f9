"""Counts the programs that one thread compiles, so that a server can show that it compiles none."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """How many programs a thread compiled, or read from the cache of compiled programs, while it was watched.

    Attributes:
        count: of them.
    """

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Count what the calling thread compiles inside."""
        thread = threading.get_ident()

        def listen(event: str, duration_secs: float, **_: Any) -> None:
            if event == _EVENT and threading.get_ident() == thread:
                self.count += 1

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
