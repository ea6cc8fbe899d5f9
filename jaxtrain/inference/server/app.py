"""The endpoints: what comes in is read, asked of the engine, and sent back."""

import asyncio
import contextlib
import functools
import hmac
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive

from jaxtrain.errors import UserError
from jaxtrain.inference.engine.engine import Engine
from jaxtrain.inference.engine.request import Emitted, EngineDead, EngineFull, Ticket
from jaxtrain.inference.prompts import PromptReader
from jaxtrain.inference.server.bodies import (
    Answer,
    Call,
    ChatBody,
    Choice,
    CompletionBody,
    Piece,
    RefusedError,
    make_call,
    read_body,
)

_PAGE = Path(__file__).with_name("page.html")
# The page loads nothing from elsewhere, and asks this server alone.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Service:
    """What the endpoints serve.

    Attributes:
        name: of the model.
        created: when it was opened, seconds since 1970.
        reader: makes prompts.
        engine: writes text.
        length: tokens of prompt and answer together.
        api_key: that clients must give; None: none.
        body_bytes: of one body, at most.
    """

    name: str
    created: int
    reader: PromptReader
    engine: Engine
    length: int
    api_key: str | None = None
    body_bytes: int = 2**24


def build_app(service: Service, *, host: str = "127.0.0.1") -> Starlette:
    """Build the application of a service, for any ASGI server.

    Args:
        service: what is served.
        host: where the server has no key, the one name or address besides those of this machine that clients may have
            in the header Host.
    """
    endpoints = _Endpoints(service)
    routes = [
        Route("/", endpoints.page),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
        Route("/v1/models", endpoints.models),
        Route("/v1/completions", functools.partial(endpoints.write, CompletionBody), methods=["POST"]),
        Route("/v1/chat/completions", functools.partial(endpoints.write, ChatBody), methods=["POST"]),
    ]
    middleware = []
    if service.api_key is None:
        # A page of another site may have a name that leads here (DNS rebinding).
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=[host, *_LOCAL_NAMES]))
    handlers = dict.fromkeys((RefusedError, UserError, HTTPException, ClientDisconnect, Exception), _refuse)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    """Answer with the error object of OpenAI's interface."""
    if isinstance(error, EngineFull | EngineDead):
        error = RefusedError(503, str(error), headers={"retry-after": "1"})
    elif isinstance(error, UserError):  # of a chat template, or a number that is out of its range
        error = RefusedError(400, str(error))
    elif isinstance(error, HTTPException):
        error = RefusedError(error.status_code, error.detail, headers=error.headers)
    elif not isinstance(error, RefusedError):
        error = RefusedError(500, f"the server failed: {type(error).__name__}")
    return JSONResponse(error.to_json(), status_code=error.status, headers=error.headers)


class _Endpoints:
    """One method per endpoint."""

    def __init__(self, service: Service):
        self._service = service

    def _check_key(self, request: HttpRequest) -> None:
        key = self._service.api_key
        sent = request.headers.get("authorization", "")
        # Compared in the same time wherever they differ.
        if key is not None and not hmac.compare_digest(sent.encode(), f"Bearer {key}".encode()):
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            raise RefusedError(401, message, code="invalid_api_key")

    async def page(self, request: HttpRequest) -> Response:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"content-security-policy": _POLICY})

    async def health(self, request: HttpRequest) -> Response:
        if self._service.engine.error is not None:
            raise RefusedError(503, self._service.engine.error)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: HttpRequest) -> Response:
        """Count in the text format of Prometheus."""
        self._check_key(request)
        counters = self._service.engine.counters()
        return PlainTextResponse(
            f"jaxtrain_requests_total {counters.requests}\n"
            f"jaxtrain_generated_tokens_total {counters.generated_tokens}\n"
            f"jaxtrain_slots_in_use {counters.slots_in_use}\n"
            f"jaxtrain_queued {counters.queued}\n"
        )

    async def models(self, request: HttpRequest) -> Response:
        self._check_key(request)
        service = self._service
        model = {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "jaxtrain",
            "max_model_len": service.length,
            "chat": service.reader.chat is not None,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def write(self, kind: type[CompletionBody | ChatBody], request: HttpRequest) -> Response:
        self._check_key(request)
        # Browsers send other types for every page, and JSON to another site only after OPTIONS, which gets 405 here.
        content_type = request.headers.get("content-type", "").partition(";")[0]
        if content_type.strip().lower() != "application/json":
            raise RefusedError(415, "the body is not declared as JSON; send the header Content-Type: application/json")
        service = self._service
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > service.body_bytes:
                raise RefusedError(413, f"the body has more than {service.body_bytes} bytes")
        body = read_body(kind, bytes(raw), served=service.name)
        # Encoding a long prompt takes a while, in which others are answered.
        call = await asyncio.to_thread(make_call, body, service.reader, length=service.length)
        running = _Running(service, call)
        answer = Answer(call, service.name)
        if body.stream:
            return StreamingResponse(_events(answer, running), media_type="text/event-stream")
        leaving = asyncio.create_task(_cancel_when_left(request.receive, running))
        try:
            answers = [Piece()] * len(running.choices)
            async for index, piece in running.pieces():
                answers[index] += piece
            return JSONResponse(answer.complete(answers, running.usage()))
        finally:
            leaving.cancel()
            running.cancel()


async def _events(answer: Answer, running: "_Running") -> AsyncIterator[str]:
    """Give the server-sent events of an answer."""

    def event(content: dict[str, Any]) -> str:
        return f"data: {json.dumps(content)}\n\n"

    try:
        if isinstance(answer.call.body, ChatBody):
            for index in range(len(running.choices)):
                yield event(answer.chunk(index, Piece(), role="assistant"))
        async for index, piece in running.pieces():
            yield event(answer.chunk(index, piece))
        if answer.call.body.stream_options.include_usage:
            yield event(answer.last_chunk(running.usage()))
        yield "data: [DONE]\n\n"
    except RefusedError as error:
        # The status was sent long ago: the stream reports the error, and ends without [DONE].
        yield event(error.to_json())
    finally:  # the client may have left
        running.cancel()


class _Running:
    """The requests of one call in the engine, submitted together or not at all.

    Made on the event loop that reads the pieces. `cancel` must be called at the end, whatever happens; afterwards the
    slots are free.
    """

    def __init__(self, service: Service, call: Call):
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Emitted | None]] = asyncio.Queue()
        self._call = call
        self.choices = [Choice(call, service.reader.tokenizer) for _ in call.requests]
        self._tickets: list[Ticket] = []
        try:
            for index, request in enumerate(call.requests):
                self._tickets.append(service.engine.submit(request, functools.partial(self._pass_on, index)))
        except UserError:
            self.cancel()
            raise

    def _pass_on(self, index: int, ticket: Ticket, event: Emitted | None) -> None:
        """Hand an event to the loop; called on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Give (index of a choice, what it has more than before), until all have ended.

        Raises:
            RefusedError: the engine failed.
        """
        running = set(range(len(self.choices)))
        while running:
            index, event = await self._events.get()
            if index not in running:
                continue  # what the engine had chosen before it read that the text came to a stop
            choice = self.choices[index]
            ticket = self._tickets[index]
            if event is not None:
                piece = choice.feed(event)
            elif ticket.error is None:
                piece = choice.finish(ticket.finish_reason)
            else:
                raise RefusedError(500, ticket.error)
            if piece.finish_reason is not None:
                ticket.cancel("stop")
                running.discard(index)
            yield index, piece

    def usage(self) -> dict[str, int]:
        """Count the tokens that were read (of every prompt once) and written; one that ends an answer counts."""
        read = sum(len(request.tokens) for request in self._call.requests[:: self._call.body.n])
        written = sum(choice.num_tokens for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def cancel(self) -> None:
        """End what still runs."""
        for ticket in self._tickets:
            ticket.cancel()


async def _cancel_when_left(receive: Receive, running: _Running) -> None:
    """End the requests of a client that leaves; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    running.cancel()
