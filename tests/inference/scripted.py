"""An engine for tests of the server: it answers from a script, at once or slowly, and compiles nothing."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from jaxtrain.data.chat.templates import BUILT_IN, ChatFormat
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.inference.engine.request import Emitted, EngineCounters, EngineFull, OnEvent, Request, Ticket
from jaxtrain.inference.prompts import PromptReader, SpecialTokens
from jaxtrain.inference.server.app import Service, build_app
from jaxtrain.inference.server.serve import address_of, bind

TOKENIZER = ByteTokenizer(("<|im_start|>", "<|im_end|>"))
START, END = 256, 257
CHAT = ChatFormat(BUILT_IN["chatml"], "chatml", {"eos_token": "<|im_end|>"}, (END,))
READER = PromptReader(TOKENIZER, CHAT, SpecialTokens())
LENGTH = 64


def repeats(request: Request) -> list[int]:
    """The prompt again and again."""
    return list(request.tokens) * 64


class ScriptedEngine:
    """Answers each request with what a function says, `seconds` between tokens, for at most `most` at a time."""

    length = LENGTH

    def __init__(self, says: Callable[[Request], Sequence[int]] = repeats, *, seconds: float = 0.0, most: int = 1000):
        self.says, self.seconds, self.most = says, seconds, most
        self.tickets: list[Ticket] = []
        self.error: str | None = None

    @property
    def running(self) -> int:
        return sum(ticket.finish_reason is None for ticket in self.tickets)

    def submit(self, request: Request, on_event: OnEvent | None = None) -> Ticket:
        if self.running >= self.most:
            raise EngineFull(f"{self.most} requests run or wait; try again later")
        ticket = Ticket(request, on_event)
        self.tickets.append(ticket)
        threading.Thread(target=self._run, args=(ticket,), daemon=True).start()
        return ticket

    def _run(self, ticket: Ticket) -> None:
        request = ticket.request
        for token in self.says(request)[: request.new_tokens]:
            time.sleep(self.seconds)
            if ticket.cancelled:
                return ticket.finish(ticket.cancelled)
            if token < 0:
                return ticket.finish("failed", "the engine stopped, because a step on its device failed")
            ticket.emit(Emitted(token, -0.5, ((token, -0.5), (0, -1.5))[: request.top]))
            if token in request.stop_tokens:
                return ticket.finish("stop")
        return ticket.finish("length")

    def counters(self) -> EngineCounters:
        return EngineCounters(requests=len(self.tickets), slots_in_use=self.running)


def service(engine: Any, **changed: Any) -> Service:
    """A service over bytes, whose bodies may have 20,000 bytes."""
    settings = {"name": "tiny", "created": 1, "reader": READER, "engine": engine, "length": LENGTH}
    return Service(**{**settings, "body_bytes": 20_000, **changed})


@contextmanager
def serving(given: Service):
    """The address of a server of a service, in a thread of its own."""
    taken = bind("127.0.0.1", 0, has_key=False)
    taken.listen()  # clients may come before the thread runs
    config = uvicorn.Config(build_app(given), lifespan="off", log_config=None, access_log=False, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
    thread.start()
    try:
        yield address_of(taken)
    finally:
        server.should_exit = True
        thread.join(10)
        taken.close()
