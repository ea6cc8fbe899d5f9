"""The requests of one call in the engine: their tokens come from its thread to the event loop as pieces of answers."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.inference.engine.engine import Engine
from jaxtrain.inference.engine.request import Emitted, EngineDead, EngineFull, Request
from jaxtrain.inference.engine.ticket import Ticket
from jaxtrain.inference.server.answers import usage
from jaxtrain.inference.server.call import Call
from jaxtrain.inference.server.choices import Choice, Piece
from jaxtrain.inference.server.prompts import PromptReader
from jaxtrain.inference.server.refused import RefusedError
from jaxtrain.inference.text_stream import TokenTexts

_RETRY_SECONDS = 1


class Running:
    """The requests of one call, submitted together or not at all.

    Made on the event loop that reads the pieces. `cancel` must be called at the end, whatever happens; afterwards the
    slots are free.

    Args:
        engine: does the work.
        call: what is asked for.
        requests: from `engine_requests`.
        reader: has the tokenizer.
        texts: of single tokens.

    Raises:
        RefusedError: the queue is full, or the engine serves nothing more.
    """

    def __init__(
        self, engine: Engine, call: Call, requests: Sequence[Request], reader: PromptReader, texts: TokenTexts
    ):
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Emitted | None]] = asyncio.Queue()
        self._call = call
        self._choices = [
            Choice(call, call.prompts[index // call.num_choices], reader.tokenizer, texts)
            for index in range(len(requests))
        ]
        self._tickets: list[Ticket] = []
        try:
            for index, request in enumerate(requests):
                self._tickets.append(engine.submit(request, functools.partial(self._pass_on, index)))
        except EngineFull as error:
            self.cancel()
            raise RefusedError(503, str(error), code="queue_full", retry_after=_RETRY_SECONDS) from None
        except EngineDead as error:
            self.cancel()
            raise RefusedError(503, str(error), code="engine_stopped") from None
        except ConfigError as error:
            self.cancel()
            raise RefusedError(400, str(error)) from None

    def _pass_on(self, index: int, ticket: Ticket, event: Emitted | None) -> None:
        """Called on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Gives (index of a choice, what it has more than before), until all have ended.

        Raises:
            RefusedError: the engine failed.
        """
        begun: set[int] = set()
        open_choices = set(range(len(self._choices)))
        while open_choices:
            index, event = await self._events.get()
            if index not in open_choices:
                continue  # what the engine had chosen before it read that the text came to a stop
            choice, ticket = self._choices[index], self._tickets[index]
            reason = ticket.finish_reason
            if event is None and reason not in ("stop", "length"):  # the scores of its prompt may not be whole
                raise RefusedError(500, ticket.error or "the answer was broken off, because the server ends")
            if index not in begun:
                begun.add(index)
                first = choice.begin(ticket.prompt_log_probabilities)
                if not first.is_empty:
                    yield index, first
            if event is not None:
                piece = choice.feed(event)
                if choice.finish_reason is not None:
                    ticket.cancel("stop")
            else:
                assert reason is not None
                piece = choice.finish(reason)
            if choice.finish_reason is not None:
                open_choices.discard(index)
            if not piece.is_empty:
                yield index, piece

    def usage(self) -> dict[str, Any]:
        """How many tokens were read and written so far."""
        first = self._tickets[:: self._call.num_choices]
        return usage(
            prompt_tokens=sum(len(prompt.tokens) for prompt in self._call.prompts),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(ticket.cached_tokens for ticket in first),
        )

    def cancel(self) -> None:
        """Ends what still runs."""
        for ticket in self._tickets:
            if ticket.finish_reason is None:
                ticket.cancel()
