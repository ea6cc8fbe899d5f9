"""What the engine is asked and what it answers: a request, and the ticket on which its tokens come."""

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxtrain.errors import UserError
from jaxtrain.inference.sampling import Sampling

MOST_ALTERNATIVES = 20
"""Alternatives per token that a request may ask for."""


class EngineFull(UserError):
    """All slots are taken, and as many requests wait as the engine's queue takes; a later attempt may succeed.

    Example:
        >>> try:
        ...     raise jt.EngineFull("264 requests run or wait, as many as the engine takes")
        ... except jt.EngineFull as error:
        ...     print("try again later")
        try again later
    """


class EngineDead(UserError):
    """The engine serves no more requests: it was closed, or its device failed.

    Example:
        >>> try:
        ...     raise jt.EngineDead("the engine is closed; start another one")
        ... except jt.EngineDead as error:
        ...     print(error)
        the engine is closed; start another one
    """


@dataclass(frozen=True)
class Request:
    """A prompt, and how it is to be continued.

    Attributes:
        tokens: ids of the prompt, at least one.
        new_tokens: how many tokens may follow, at least 1.
        sampling: how they are chosen.
        seed: of the random choices; the same request with the same seed gets the same tokens.
        stop_tokens: ids that end the answer; the one that does is emitted too.
        top: alternatives that are reported with each token, the likeliest first, 0 to 20.
        row: which of several answers with this seed it is, 0 or more: row 2 is sampled as row 2 of `generate_text`.

    Example:
        >>> request = jt.Request((72, 105), new_tokens=4, sampling=jt.Sampling(temperature=0))
        >>> request.tokens
        (72, 105)
    """

    tokens: tuple[int, ...]
    new_tokens: int
    sampling: Sampling
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    top: int = 0
    row: int = 0


@dataclass(frozen=True)
class Emitted:
    """A token with its log-probability.

    Attributes:
        token: its id.
        log_probability: natural logarithm of its probability by the model alone, before temperature and penalties.
        top: the likeliest tokens at its place, with their log-probabilities, as many as the request asked for.
    """

    token: int
    log_probability: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class EngineCounters:
    """What an engine did since it was started; every count is of the engine alone.

    Attributes:
        requests: that were accepted.
        finished: of them that have ended, for whatever reason.
        generated_tokens: that were emitted.
        slots_in_use: rows of the cache that a request has.
        queued: requests that have no slot yet.
    """

    requests: int = 0
    finished: int = 0
    generated_tokens: int = 0
    slots_in_use: int = 0
    queued: int = 0


class Ticket:
    """What `Engine.submit` gives for a request; it may be used from any thread.

    Iterating over it gives the tokens as they come, and waits for the next one.

    Args:
        request: what was asked.
        on_event: (ticket, token) is called on the engine's thread with each token, and with None at the end.
        wake: tells the engine that the request was cancelled.

    Attributes:
        request: what was asked.
        finish_reason: "stop", "length", "cancelled" or "failed"; None while the request waits or runs.
        cached_tokens: of the prompt, that the engine did not have to read again.
        error: what failed, in one line; None: nothing did.
        cancelled: the reason given to `cancel`; None: it was not called.

    Example:
        >>> ticket = engine.submit(jt.Request((72, 105), new_tokens=4, sampling=jt.Sampling(temperature=0)))
        >>> len([emitted.token for emitted in ticket]), ticket.finish_reason
        (4, 'length')
    """

    def __init__(self, request: Request, on_event: "OnEvent | None" = None, wake: Callable[[], None] | None = None):
        self.request = request
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.error: str | None = None
        self.cancelled: str | None = None
        self._on_event = on_event
        self._wake = wake
        self._events: queue.SimpleQueue[Emitted | None] = queue.SimpleQueue()

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
        """
        self.cancelled = self.cancelled or reason
        if self._wake is not None:
            self._wake()

    def emit(self, emitted: Emitted) -> None:
        """Hand out a token; for the engine."""
        self._events.put(emitted)
        if self._on_event is not None:
            self._on_event(self, emitted)

    def finish(self, reason: str, error: str | None = None) -> None:
        """End the request; for the engine."""
        self.error = error
        self.finish_reason = reason
        self._events.put(None)
        if self._on_event is not None:
            self._on_event(self, None)


OnEvent = Callable[[Ticket, Emitted | None], None]
