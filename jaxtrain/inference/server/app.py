"""The endpoints: what comes in is read, asked of the engine, and sent back."""

import asyncio
import hmac
import ipaddress
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from jaxtrain.inference.engine.engine import Engine
from jaxtrain.inference.server.answers import chunk, first_chunk, last_chunk, new_envelope, whole_answer
from jaxtrain.inference.server.bodies import chat_call, completion_call
from jaxtrain.inference.server.call import Call, engine_requests
from jaxtrain.inference.server.choices import Piece
from jaxtrain.inference.server.embeddings import embedding_answer, embedding_call
from jaxtrain.inference.server.fields import parse_body, shown
from jaxtrain.inference.server.incoming import SEND_SECONDS, GoneError, Limits, read_body, while_there
from jaxtrain.inference.server.prometheus import HttpCounters, metrics_text
from jaxtrain.inference.server.prompts import PromptReader
from jaxtrain.inference.server.refused import RefusedError
from jaxtrain.inference.server.running import Running
from jaxtrain.inference.server.tokens import detokenize, tokenize, tokenizer_info
from jaxtrain.inference.text_stream import TokenTexts
from jaxtrain.runtime.terminal import print_remark

_LIMITS = Limits()
_Handler = Callable[[HttpRequest], Awaitable[Response]]
Embed = Callable[[list[list[int]]], np.ndarray]

_PAGE = Path(__file__).with_name("page.html")
# The page loads nothing from elsewhere, and asks this server alone.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# What nobody needs a key for: whether the server lives, and the page, which asks for the key itself.
_OPEN = ("/", "/health")
_LEFT_NO_ANSWER = 499


@dataclass(frozen=True)
class Service:
    """What the endpoints serve.

    Attributes:
        name: of the model.
        created: when it was opened, seconds since 1970.
        reader: makes prompts.
        engine: writes text; None: the model does not.
        embed: ids of texts -> float32 [texts, D]; None: the model does not embed.
        length: tokens of prompt and answer together, or of a text to embed.
        most: answers that run and wait at a time.
        api_key: that clients must give; None: none.
        limits: of bodies.
        compiled: counts the programs that `embed` compiled after its start; None: it compiles none.
    """

    name: str
    created: int
    reader: PromptReader
    engine: Engine | None
    embed: Embed | None
    length: int
    most: int
    api_key: str | None = None
    limits: Limits = _LIMITS
    compiled: Callable[[], int] | None = None


def build_app(service: Service, *, host: str = "127.0.0.1") -> Starlette:
    """The application of a service, for any ASGI server.

    Args:
        service: what is served.
        host: where the server has no key, the one name or address besides localhost and loopback addresses that clients
            may have in the header Host.

    Returns:
        The application; its `state.ending` is an event to set, on the event loop, once no more bodies are waited for.
    """
    counters, ending = HttpCounters(), asyncio.Event()
    endpoints = _Endpoints(service, counters, ending)
    table: list[tuple[str, str, _Handler]] = [
        ("GET", "/", endpoints.page),
        ("GET", "/health", endpoints.health),
        ("GET", "/metrics", endpoints.metrics),
        ("GET", "/v1/models", endpoints.models),
        ("GET", "/v1/models/{name:path}", endpoints.model),
        ("POST", "/v1/completions", endpoints.completions),
        ("POST", "/v1/chat/completions", endpoints.chat),
        ("POST", "/v1/embeddings", endpoints.embeddings),
        ("GET", "/tokenizer_info", endpoints.tokenizer_info),
        ("POST", "/tokenize", endpoints.tokenize),
        ("POST", "/detokenize", endpoints.detokenize),
    ]
    routes = [
        Route(path, _guarded(handler, path, service, counters, host), methods=[method])
        for method, path, handler in table
    ]

    def unknown(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = ", ".join(path for _, path, _ in table if path.startswith("/v1") and "{" not in path)
        # Starlette names the methods of the path where there are any.
        headers = dict(error.headers or {})
        allowed = sorted(one for one in headers.get("Allow", "").split(", ") if one not in ("", "HEAD"))
        said = f"use {allowed[0]} for {request.url.path!a}" if allowed else f"there is nothing here; there are {known}"
        counters.answered("other", error.status_code)
        return _refusal(RefusedError(error.status_code, said), headers=headers)

    app = Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})
    app.state.ending = ending
    return app


def _guarded(handler: _Handler, path: str, service: Service, counters: HttpCounters, host: str) -> _Handler:
    """The handler behind the key, whose errors become error objects."""

    async def answer(request: HttpRequest) -> Response:
        try:
            _check_site(request, host if service.api_key is None else None)
            if path not in _OPEN:
                _check_key(request, service.api_key)
            response = await handler(request)
        except RefusedError as error:
            response = _refusal(error)
        except GoneError:
            counters.left()
            return Response(status_code=_LEFT_NO_ANSWER)  # nobody reads it
        except Exception as error:
            print_remark(f"jaxtrain serve: {path}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            response = _refusal(RefusedError(500, f"the server failed: {type(error).__name__}"))
        counters.answered(path, response.status_code)
        return response

    return answer


def _check_site(request: HttpRequest, host: str | None) -> None:
    """Refuse what a browser asks for a page of another site, whose name may lead here (DNS rebinding).

    Args:
        request: has the headers Host and Origin.
        host: see `build_app`; None: any name, because clients give a key.
    """
    given, origin = request.headers.get("host", "").lower(), request.headers.get("origin")
    name = re.sub(r":\d*$", "", given)
    if host is not None and name != host.lower() and not _is_loopback(name):
        raise RefusedError(403, f"Host {shown(given)} is not this machine; use localhost, or start it with an API key")
    if origin is not None and origin.lower().partition("://")[2] != given:
        raise RefusedError(403, f"Origin {shown(origin)} is not that of Host {shown(given)}; a proxy must pass Host on")


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _check_key(request: HttpRequest, key: str | None) -> None:
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Compared in the same time wherever they differ.
    same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), key.encode())
    if scheme.lower() != "bearer" or not same:
        said = "another API key than this server's" if given else "no API key"
        raise RefusedError(401, f"{said}; send the header Authorization: Bearer KEY", code="invalid_api_key")


def _refusal(error: RefusedError, *, headers: Mapping[str, str] | None = None) -> Response:
    return _json(error.to_json(), status=error.status, headers={**error.headers, **(headers or {})})


def _json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encoded(value), status_code=status, headers=headers, media_type="application/json")


def _encoded(value: Any) -> bytes:
    # Halves of surrogate pairs can come from a client alone, in what a message quotes.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


class _Endpoints:
    """One method per endpoint."""

    def __init__(self, service: Service, counters: HttpCounters, ending: asyncio.Event):
        self._service, self._counters, self._ending = service, counters, ending
        self._texts = TokenTexts(service.reader.tokenizer)

    async def page(self, request: HttpRequest) -> Response:
        headers = {"cache-control": "no-cache", "content-security-policy": _POLICY}
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=headers)

    async def health(self, request: HttpRequest) -> Response:
        engine = self._service.engine
        if engine is not None and engine.error is not None:
            raise RefusedError(503, engine.error, code="engine_stopped")
        return _json({"status": "ok"})

    async def metrics(self, request: HttpRequest) -> Response:
        engine, compiled = self._service.engine, self._service.compiled
        text = metrics_text(
            self._counters,
            None if engine is None else engine.counters(),
            compiled=None if compiled is None else compiled(),
        )
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def models(self, request: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name != self._service.name:
            raise RefusedError(
                404, f"there is no model {name!a}; this server has {self._service.name!r}", code="model_not_found"
            )
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "jaxtrain",
            "max_model_len": service.length,
            "chat": service.reader.chat is not None and service.engine is not None,
        }

    async def completions(self, request: HttpRequest) -> Response:
        return await self._write(request, completion_call)

    async def chat(self, request: HttpRequest) -> Response:
        return await self._write(request, chat_call)

    async def embeddings(self, request: HttpRequest) -> Response:
        service, embed = self._service, self._service.embed
        if embed is None:
            raise RefusedError(
                404, f"the model {service.name} gives no embeddings; serve one with model.head.kind=embedding"
            )
        body = await self._body(request)
        texts, form = await asyncio.to_thread(
            embedding_call, body, service.reader, served=service.name, length=service.length
        )
        vectors_ND = await while_there(request.receive, asyncio.to_thread(embed, texts))
        return _json(await asyncio.to_thread(embedding_answer, vectors_ND, texts, form=form, model=service.name))

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        return _json(tokenizer_info(self._service.reader))

    async def tokenize(self, request: HttpRequest) -> Response:
        body, service = await self._body(request), self._service
        return _json(
            await asyncio.to_thread(tokenize, body, service.reader, served=service.name, length=service.length)
        )

    async def detokenize(self, request: HttpRequest) -> Response:
        body, service = await self._body(request), self._service
        return _json(await asyncio.to_thread(detokenize, body, service.reader, served=service.name))

    async def _body(self, request: HttpRequest) -> dict[str, Any]:
        raw = await read_body(request.receive, self._service.limits, self._ending)
        # Browsers send other types for every page, and JSON to another site only after OPTIONS, which gets 405 here.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "the body is not declared as JSON; send the header Content-Type: application/json")
        return await asyncio.to_thread(parse_body, raw)

    async def _write(self, request: HttpRequest, read: Callable[..., Call]) -> Response:
        service, began = self._service, time.monotonic()
        engine = service.engine
        if engine is None:
            raise RefusedError(404, f"the model {service.name} gives embeddings and writes no text; use /v1/embeddings")
        body = await self._body(request)
        # Encoding a long prompt takes a while, in which others are answered.
        call = await asyncio.to_thread(read, body, service.reader, served=service.name)
        requests = engine_requests(call, length=service.length, most=service.most)
        running = Running(engine, call, requests, service.reader, self._texts)
        if call.stream:
            return EventStream(self._events(call, running, began), running.cancel, self._counters)
        try:
            return await while_there(request.receive, self._whole(call, running, began))
        finally:
            running.cancel()

    async def _whole(self, call: Call, running: Running, began: float) -> Response:
        pieces: list[list[Piece]] = [[] for _ in range(len(call.prompts) * call.num_choices)]
        async for index, piece in self._timed(running, began):
            pieces[index].append(piece)
        envelope = new_envelope(call, model=self._service.name, created=int(time.time()))
        return _json(whole_answer(envelope, pieces, running.usage(), call))

    async def _events(self, call: Call, running: Running, began: float) -> AsyncIterator[bytes]:
        envelope = new_envelope(call, model=self._service.name, created=int(time.time()))
        try:
            if call.is_chat:
                for index in range(call.num_choices):
                    yield _event(first_chunk(envelope, index, call))
            async for index, piece in self._timed(running, began):
                yield _event(chunk(envelope, index, piece, call))
        except RefusedError as error:
            # The status was sent long ago: the stream says it, and ends without [DONE].
            yield _event(error.to_json())
            return
        if call.include_usage:
            yield _event(last_chunk(envelope, running.usage()))
        yield b"data: [DONE]\n\n"

    async def _timed(self, running: Running, began: float) -> AsyncIterator[tuple[int, Piece]]:
        first = True
        async for found in running.pieces():
            if first:
                self._counters.timed(first_token=time.monotonic() - began)
                first = False
            yield found
        self._counters.timed(whole=time.monotonic() - began)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encoded(value) + b"\n\n"


class EventStream(Response):
    """Events that are sent as they come, until they end or the client leaves.

    Args:
        events: encoded.
        cancel: called at the end, whatever happened.
        counters: count clients that left.
        seconds: in which the client must take an event, or it counts as gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        cancel: Callable[[], None],
        counters: HttpCounters,
        seconds: float = SEND_SECONDS,
    ):
        # Proxies that collect an answer before they pass it on leave events alone that say so.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._cancel, self._counters, self._seconds = events, cancel, counters, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_there(receive, self._send(send))
        except GoneError:
            self._counters.left()
        finally:
            self._cancel()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._send_one(send, start)
        async for event in self._events:
            await self._send_one(send, {"type": "http.response.body", "body": event, "more_body": True})
        await self._send_one(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_one(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await send(message)
        except TimeoutError:
            raise GoneError from None
