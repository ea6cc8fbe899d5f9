"""A request on its way: its tokens as they come, why it ended, and the way to end it early. No jax here."""

import queue
import threading
from collections.abc import Callable, Iterator

from jaxtrain.errors import ConfigError
from jaxtrain.inference.engine.request import Emitted, EngineDead, Request

REASONS = ("stop", "length", "cancelled", "failed")
"""Why a request ended: a stop token (or the caller's stop text), its number of tokens, the caller, an error."""


class Ticket:
    """What `Engine.submit` gives for a request; it may be used from any thread.

    Iterating over it gives the tokens as they come, and waits for the next one.

    Args:
        request: what was asked.
        on_event: (ticket, token) is called on the engine's thread with each token, and with None at the end.

    Attributes:
        request: what was asked.
        finish_reason: "stop", "length", "cancelled" or "failed"; None while the request waits or runs.
        cached_tokens: of the prompt, that the engine did not have to read again.
        prompt_log_probabilities: one entry per token of the prompt, if the request asked for them; the first is None,
            for nothing stands before it. They are there before the first token is.
        error: what failed, in one line; None: nothing did.

    Example:
        >>> ticket = engine.submit(jt.Request((72, 105), new_tokens=4, sampling=jt.Sampling(temperature=0)))
        >>> len([emitted.token for emitted in ticket]), ticket.finish_reason
        (4, 'length')
    """

    def __init__(self, request: Request, on_event: "OnEvent | None" = None, wake: Callable[[], None] | None = None):
        self.request = request
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.prompt_log_probabilities: list[Emitted | None] | None = None
        self.error: str | None = None
        self.cancelled: str | None = None
        self._on_event, self._wake = on_event, wake
        self._events: queue.SimpleQueue[Emitted | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    def __iter__(self) -> Iterator[Emitted]:
        """Give the tokens that were not taken yet, waiting for each.

        Raises:
            EngineDead: the engine failed before the answer was whole.
        """
        while (event := self._events.get()) is not None:
            yield event
        self._events.put(None)  # another iteration ends too
        if self.error is not None:
            raise EngineDead(self.error)

    def cancel(self, reason: str = "cancelled") -> None:
        """End the request at the engine's next step; its slot is free for others then.

        Args:
            reason: what `finish_reason` becomes: "cancelled", or "stop" where the text came to a stop.

        Raises:
            ConfigError: another reason.
        """
        if reason not in ("cancelled", "stop"):
            raise ConfigError(f"cancel: reason is {reason!r}; use 'cancelled' or 'stop'")
        self.cancelled = self.cancelled or reason
        if self._wake is not None:
            self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the request.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            Whether it has ended.
        """
        return self._ended.wait(timeout)

    def emit(self, emitted: Emitted) -> None:
        """Hand out a token; for the engine."""
        self._events.put(emitted)
        if self._on_event is not None:
            self._on_event(self, emitted)

    def finish(self, reason: str, error: str | None = None) -> None:
        """End the request; for the engine."""
        assert reason in REASONS
        if self.finish_reason is not None:
            return
        self.error = error
        self.finish_reason = reason
        self._events.put(None)
        self._ended.set()
        if self._on_event is not None:
            self._on_event(self, None)


OnEvent = Callable[[Ticket, Emitted | None], None]
