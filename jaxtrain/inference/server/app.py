"""The endpoints: what comes in is read, asked of the engine, and sent back."""

import asyncio
import contextlib
import functools
import hmac
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive

from jaxtrain.data import Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.inference.engine.engine import Engine
from jaxtrain.inference.engine.request import Emitted, EngineDead, EngineFull, Ticket
from jaxtrain.inference.server.bodies import (
    Answer,
    Call,
    ChatBody,
    Choice,
    CompletionBody,
    Piece,
    PromptReader,
    RefusedError,
    make_call,
    read_body,
)
from jaxtrain.runtime.terminal import print_remark

_Handler = Callable[[HttpRequest], Awaitable[Response]]

_PAGE = Path(__file__).with_name("page.html")
# The page loads nothing from elsewhere, and asks this server alone.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# What nobody needs a key for: whether the server lives, and the page, which asks for the key itself.
_OPEN = ("/", "/health")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_CLIENT_LEFT = 499
# A client that takes nothing or sends no body for so long counts as gone. It is less than the 30 seconds that
# Kubernetes leaves between SIGTERM and the kill, so that a server ends in order although somebody does not go on.
CLIENT_SECONDS = 20.0


@dataclass(frozen=True)
class Service:
    """What the endpoints serve.

    Attributes:
        name: of the model.
        created: when it was opened, seconds since 1970.
        reader: makes prompts.
        engine: writes text.
        length: tokens of prompt and answer together.
        max_answers: that run and wait at a time.
        api_key: that clients must give; None: none.
        body_bytes: of one body, at most.
        body_seconds: from the first byte of a body to its last.
    """

    name: str
    created: int
    reader: PromptReader
    engine: Engine
    length: int
    max_answers: int
    api_key: str | None = None
    body_bytes: int = 4 * 2**20
    body_seconds: float = CLIENT_SECONDS


def build_app(service: Service, *, host: str = "127.0.0.1") -> Starlette:
    """Build the application of a service, for any ASGI server.

    Args:
        service: what is served.
        host: where the server has no key, the one name or address besides those of this machine that clients may have
            in the header Host.
    """
    endpoints = _Endpoints(service, host)
    table: list[tuple[str, str, _Handler]] = [
        ("GET", "/", endpoints.page),
        ("GET", "/health", endpoints.health),
        ("GET", "/metrics", endpoints.metrics),
        ("GET", "/v1/models", endpoints.models),
        ("POST", "/v1/completions", functools.partial(endpoints.write, kind=CompletionBody)),
    ]
    if service.reader.chat is not None:
        table.append(("POST", "/v1/chat/completions", functools.partial(endpoints.write, kind=ChatBody)))
    routes = [Route(path, endpoints.guarded(handler, path), methods=[method]) for method, path, handler in table]

    def unknown(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        endpoints.answers["other", error.status_code] += 1
        paths = ", ".join(f"{method} {path}" for method, path, _ in table)
        message = f"the model {service.name} has {paths}"
        return _refusal(RefusedError(error.status_code, message, headers=dict(error.headers or {})))

    return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})


def _check_site(request: HttpRequest, host: str) -> None:
    """Refuse what a browser asks for a page of another site, whose name may lead here (DNS rebinding)."""
    sent_host = request.headers.get("host", "").lower()
    name = re.sub(r":\d*$", "", sent_host)
    if name != host.lower() and name not in _LOCAL_NAMES:
        raise RefusedError(403, f"Host {sent_host!a:.80} is not this server's; names other than localhost need a key")


def _check_origin(request: HttpRequest) -> None:
    """Refuse what a page of another site asks."""
    host = request.headers.get("host", "").lower()
    origin = request.headers.get("origin")
    if origin is not None and origin.lower().partition("://")[2] != host:
        raise RefusedError(403, f"Origin {origin!a:.80} is not this server's; a proxy must forward Host")


def _check_key(request: HttpRequest, key: str) -> None:
    scheme, _, sent_key = request.headers.get("authorization", "").partition(" ")
    # Compared in the same time wherever they differ.
    is_same = hmac.compare_digest(sent_key.strip().encode(), key.encode())
    if scheme.lower() != "bearer" or not is_same:
        mistake = "wrong" if sent_key else "missing"
        raise RefusedError(
            401, f"the API key is {mistake}; send the header Authorization: Bearer KEY", code="invalid_api_key"
        )


def _refusal(error: RefusedError) -> Response:
    return JSONResponse(error.to_json(), status_code=error.status, headers=error.headers)


class _Endpoints:
    """One method per endpoint, and what they count."""

    def __init__(self, service: Service, host: str):
        self._service = service
        self._host = host
        self.answers: Counter[tuple[str, int]] = Counter()

    def guarded(self, handler: _Handler, path: str) -> _Handler:
        """Put a handler behind the key; errors become error objects, and every answer is counted."""

        async def answer(request: HttpRequest) -> Response:
            try:
                self._check_client(request, path)
                response = await handler(request)
            except RefusedError as error:
                response = _refusal(error)
            except UserError as error:  # of a chat template, or of the engine
                response = _refusal(RefusedError(400, str(error)))
            except ClientDisconnect:
                response = Response(status_code=_CLIENT_LEFT)  # nobody reads it
            except Exception as error:
                print_remark(f"jaxtrain serve: {path}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
                response = _refusal(RefusedError(500, f"the server failed: {type(error).__name__}"))
            self.answers[path, response.status_code] += 1
            return response

        return answer

    def _check_client(self, request: HttpRequest, path: str) -> None:
        _check_origin(request)
        if self._service.api_key is None:
            _check_site(request, self._host)
        elif path not in _OPEN:
            _check_key(request, self._service.api_key)

    async def page(self, request: HttpRequest) -> Response:
        headers = {"cache-control": "no-cache", "content-security-policy": _POLICY}
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=headers)

    async def health(self, request: HttpRequest) -> Response:
        if self._service.engine.error is not None:
            raise RefusedError(503, self._service.engine.error, code="engine_stopped")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: HttpRequest) -> Response:
        """Count in the text format of Prometheus."""
        counters = self._service.engine.counters()
        lines = [
            f"jaxtrain_requests_total {counters.requests}",
            f"jaxtrain_generated_tokens_total {counters.generated_tokens}",
            f"jaxtrain_slots_in_use {counters.slots_in_use}",
            f"jaxtrain_queued {counters.queued}",
        ]
        for (path, status), count in sorted(self.answers.items()):
            lines.append(f'jaxtrain_http_answers_total{{path="{path}",status="{status}"}} {count}')
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def models(self, request: HttpRequest) -> Response:
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

    async def write(self, request: HttpRequest, kind: type[CompletionBody | ChatBody]) -> Response:
        raw = await self._raw_body(request)
        # Browsers send other types for every page, and JSON to another site only after OPTIONS, which gets 405 here.
        content_type = request.headers.get("content-type", "").partition(";")[0]
        if content_type.strip().lower() != "application/json":
            raise RefusedError(415, "the body is not declared as JSON; send the header Content-Type: application/json")
        # Encoding a long prompt takes a while, in which others are answered.
        call = await asyncio.to_thread(self._read, kind, raw)
        running = _Running(self._service.engine, call, self._service.reader.tokenizer)
        answer = Answer(call, self._service.name)
        if call.body.stream:
            # Proxies that collect an answer before they pass it on leave events alone that say so.
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return StreamingResponse(_events(answer, running), media_type="text/event-stream", headers=headers)
        leaving = asyncio.create_task(_cancel_when_left(request.receive, running))
        try:
            answers = [Piece()] * len(running.choices)
            async for index, piece in running.pieces():
                answers[index] += piece
            return JSONResponse(answer.complete(answers, running.usage()))
        finally:
            leaving.cancel()
            running.cancel()

    def _read(self, kind: type[CompletionBody | ChatBody], raw: bytes) -> Call:
        service = self._service
        body = read_body(kind, raw, served=service.name)
        return make_call(body, service.reader, length=service.length, max_answers=service.max_answers)

    async def _raw_body(self, request: HttpRequest) -> bytes:
        """Receive the bytes of a body.

        Raises:
            RefusedError: it is too large, or comes too slowly.
            ClientDisconnect: the client left in the middle of it.
        """
        raw = bytearray()
        try:
            async with asyncio.timeout(self._service.body_seconds):
                async for part in request.stream():
                    raw += part
                    if len(raw) > self._service.body_bytes:
                        message = f"the body has more than {self._service.body_bytes} bytes"
                        raise RefusedError(413, message, code="body_too_large")
        except TimeoutError:
            message = f"the body did not arrive within {self._service.body_seconds:g} seconds"
            raise RefusedError(408, message) from None
        return bytes(raw)


async def _events(answer: Answer, running: "_Running") -> AsyncIterator[str]:
    """Give the server-sent events of an answer."""

    def event(content: dict[str, Any]) -> str:
        return f"data: {json.dumps(content)}\n\n"

    try:
        if isinstance(answer.call.body, ChatBody):
            for index in range(len(running.choices)):
                yield event(answer.first_chunk(index))
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

    def __init__(self, engine: Engine, call: Call, tokenizer: Tokenizer):
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Emitted | None]] = asyncio.Queue()
        self._call = call
        self.choices = [Choice(call, tokenizer) for _ in call.requests]
        self._tickets: list[Ticket] = []
        try:
            for index, request in enumerate(call.requests):
                self._tickets.append(engine.submit(request, functools.partial(self._pass_on, index)))
        except UserError as error:
            self.cancel()
            if isinstance(error, EngineFull):
                raise RefusedError(503, str(error), headers={"retry-after": "1"}) from None
            raise RefusedError(503 if isinstance(error, EngineDead) else 400, str(error)) from None

    def _pass_on(self, index: int, ticket: Ticket, event: Emitted | None) -> None:
        """Hand an event to the loop; called on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Give (index of a choice, what it has more than before), until all have ended.

        Raises:
            RefusedError: the engine failed, or the client left.
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
                if choice.finish_reason is not None:
                    ticket.cancel("stop")
            elif ticket.finish_reason in ("stop", "length"):
                piece = choice.finish(ticket.finish_reason)
            elif ticket.error is not None:
                raise RefusedError(500, ticket.error)
            else:
                raise RefusedError(_CLIENT_LEFT, "the answer is incomplete: it was cancelled")
            if choice.finish_reason is not None:
                running.discard(index)
            if piece != Piece():
                yield index, piece

    def usage(self) -> dict[str, Any]:
        """Count the tokens that were read (of every prompt once) and written; one that ends an answer counts."""
        first_tickets = self._tickets[:: self._call.body.n]
        read = sum(len(ticket.request.tokens) for ticket in first_tickets)
        written = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(ticket.cached_tokens for ticket in first_tickets)},
        }

    def cancel(self) -> None:
        """End what still runs."""
        for ticket in self._tickets:
            if ticket.finish_reason is None:
                ticket.cancel()


async def _cancel_when_left(receive: Receive, running: _Running) -> None:
    """End the requests of a client that leaves; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    running.cancel()
