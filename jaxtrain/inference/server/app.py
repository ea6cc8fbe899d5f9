"""The endpoints: what comes in is read, asked of the engine, and sent back."""

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from jaxtrain.data import Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.inference.engine.engine import Engine
from jaxtrain.inference.engine.request import Emitted, EngineDead, EngineFull, Ticket
from jaxtrain.inference.generate import text_of_token
from jaxtrain.inference.server.bodies import (
    Answer,
    Call,
    ChatBody,
    Choice,
    CompletionBody,
    Piece,
    PromptReader,
    RefusedError,
    chat_call,
    completion_call,
    read_body,
)
from jaxtrain.runtime.terminal import print_remark

_Result = TypeVar("_Result")
_Handler = Callable[[HttpRequest], Awaitable[Response]]

_PAGE = Path(__file__).with_name("page.html")
# The page loads nothing from elsewhere, and asks this server alone.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# What nobody needs a key for: whether the server lives, and the page, which asks for the key itself.
_OPEN = ("/", "/health")
_LEFT_NO_ANSWER = 499
# A client that still sends does not read an answer: so much of a body that is too large is read and thrown away.
_MOST_DISCARDED = 256 * 2**20
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
        most: answers that run and wait at a time.
        api_key: that clients must give; None: none.
        body_bytes: of one body, at most.
        body_seconds: from the first byte of a body to its last.
    """

    name: str
    created: int
    reader: PromptReader
    engine: Engine
    length: int
    most: int
    api_key: str | None = None
    body_bytes: int = 4 * 2**20
    body_seconds: float = CLIENT_SECONDS


def build_app(service: Service, *, host: str = "127.0.0.1") -> Starlette:
    """The application of a service, for any ASGI server.

    Args:
        service: what is served.
        host: where the server has no key, the one name or address besides localhost and loopback addresses that clients
            may have in the header Host.
    """
    endpoints = _Endpoints(service)
    table: list[tuple[str, str, _Handler]] = [
        ("GET", "/", endpoints.page),
        ("GET", "/health", endpoints.health),
        ("GET", "/metrics", endpoints.metrics),
        ("GET", "/v1/models", endpoints.models),
        ("POST", "/v1/completions", endpoints.completions),
    ]
    if service.reader.chat is not None:
        table.append(("POST", "/v1/chat/completions", endpoints.chat))
    routes = [Route(path, endpoints.guarded(handler, path, host), methods=[method]) for method, path, handler in table]

    def unknown(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = ", ".join(f"{method} {path}" for method, path, _ in table)
        endpoints.answers["other", error.status_code] += 1
        said = f"the model {service.name} has {known}"
        return _refusal(RefusedError(error.status_code, said, headers=dict(error.headers or {})))

    return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})


def _check_site(request: HttpRequest, host: str | None) -> None:
    """Refuse what a browser asks for a page of another site, whose name may lead here (DNS rebinding).

    Args:
        request: has the headers Host and Origin.
        host: see `build_app`; None: any name, because clients give a key.
    """
    given, origin = request.headers.get("host", "").lower(), request.headers.get("origin")
    name = re.sub(r":\d*$", "", given)
    is_known = host is None or name == host.lower() or _is_loopback(name)
    if not is_known or (origin is not None and origin.lower().partition("://")[2] != given):
        said = f"Host {given!a:.80} and Origin {origin!a:.80} are not this server's; a proxy must forward Host"
        raise RefusedError(403, f"{said}, and names other than localhost need an API key")


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
        said = "the API key is wrong" if given else "the API key is missing"
        raise RefusedError(
            401,
            f"{said}; send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _refusal(error: RefusedError) -> Response:
    return _json(error.to_json(), status=error.status, headers=error.headers)


def _json(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encoded(value), status_code=status, headers=headers, media_type="application/json")


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


class _Endpoints:
    """One method per endpoint, and what they count."""

    def __init__(self, service: Service):
        self._service, self._texts = service, text_of_token(service.reader.tokenizer)
        self.answers: Counter[tuple[str, int]] = Counter()

    def guarded(self, handler: _Handler, path: str, host: str) -> _Handler:
        """The handler behind the key, whose errors become error objects."""
        key = self._service.api_key

        async def answer(request: HttpRequest) -> Response:
            try:
                _check_site(request, host if key is None else None)
                _check_key(request, None if path in _OPEN else key)
                response = await handler(request)
            except RefusedError as error:
                response = _refusal(error)
            except UserError as error:  # of a chat template, or of the engine
                response = _refusal(RefusedError(400, str(error)))
            except ClientDisconnect:
                response = Response(status_code=_LEFT_NO_ANSWER)  # nobody reads it
            except Exception as error:
                print_remark(f"jaxtrain serve: {path}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
                response = _refusal(RefusedError(500, f"the server failed: {type(error).__name__}"))
            self.answers[path, response.status_code] += 1
            return response

        return answer

    async def page(self, request: HttpRequest) -> Response:
        headers = {"cache-control": "no-cache", "content-security-policy": _POLICY}
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=headers)

    async def health(self, request: HttpRequest) -> Response:
        if self._service.engine.error is not None:
            raise RefusedError(503, self._service.engine.error, code="engine_stopped")
        return _json({"status": "ok"})

    async def metrics(self, request: HttpRequest) -> Response:
        """In the text format of Prometheus."""
        counts = {f'http_answers_total{{path="{path}",status="{status}"}}': count
                  for (path, status), count in sorted(self.answers.items())}  # fmt: skip
        done = self._service.engine.counters()
        counts |= {
            "requests_total": done.requests,
            "generated_tokens_total": done.generated_tokens,
            "compiled_total": done.compiled,
            "slots_in_use": done.slots_in_use,
            "queued": done.queued,
        }
        text = "".join(f"jaxtrain_{name} {count}\n" for name, count in counts.items())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

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
        return _json({"object": "list", "data": [model]})

    async def completions(self, request: HttpRequest) -> Response:
        return await self._write(request, CompletionBody, completion_call)

    async def chat(self, request: HttpRequest) -> Response:
        return await self._write(request, ChatBody, chat_call)

    async def _body(self, request: HttpRequest, kind: type[Any]) -> Any:
        raw = await self._raw_body(request)
        # Browsers send other types for every page, and JSON to another site only after OPTIONS, which gets 405 here.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "the body is not declared as JSON; send the header Content-Type: application/json")
        return await asyncio.to_thread(read_body, kind, raw, served=self._service.name)

    async def _raw_body(self, request: HttpRequest) -> bytes:
        """The bytes of a body.

        Raises:
            RefusedError: it is too large, or comes too slowly.
            ClientDisconnect: the client left in the middle of it.
        """
        parts, size, most, seconds = [], 0, self._service.body_bytes, self._service.body_seconds
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > _MOST_DISCARDED:
                        break
                    parts = [*parts, part] if size <= most else []
        except TimeoutError:
            raise RefusedError(408, f"the body did not arrive within {seconds:g} seconds") from None
        if size > most:
            raise RefusedError(413, f"the body has more than {most} bytes", code="body_too_large")
        return b"".join(parts)

    async def _write(self, request: HttpRequest, kind: type[Any], read: Callable[..., Call]) -> Response:
        service = self._service
        body = await self._body(request, kind)
        # Encoding a long prompt takes a while, in which others are answered.
        call = await asyncio.to_thread(read, body, service.reader, length=service.length, most=service.most)
        running = _Running(service.engine, call, service.reader.tokenizer, self._texts)
        answer = Answer(call, service.name)
        if call.stream:
            return EventStream(self._events(answer, running), running.cancel)
        try:
            return await while_there(request.receive, self._whole(answer, running))
        finally:
            running.cancel()

    async def _whole(self, answer: Answer, running: "_Running") -> Response:
        pieces: list[list[Piece]] = [[] for _ in running.choices]
        async for index, piece in running.pieces():
            pieces[index].append(piece)
        return _json(answer.whole(pieces, running.usage()))

    async def _events(self, answer: Answer, running: "_Running") -> AsyncIterator[dict[str, Any] | None]:
        try:
            if answer.call.is_chat:
                for index in range(answer.call.num_choices):
                    yield answer.first_chunk(index)
            async for index, piece in running.pieces():
                yield answer.chunk(index, piece)
        except RefusedError as error:
            # The status was sent long ago: the stream says it, and ends without [DONE].
            yield error.to_json()
            return
        if answer.call.include_usage:
            yield answer.last_chunk(running.usage())
        yield None


class _Running:
    """The requests of one call in the engine, submitted together or not at all.

    Made on the event loop that reads the pieces. `cancel` must be called at the end, whatever happens; afterwards the
    slots are free.
    """

    def __init__(self, engine: Engine, call: Call, tokenizer: Tokenizer, texts: Callable[[int], str]):
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Emitted | None]] = asyncio.Queue()
        self._call = call
        self.choices = [Choice(call, tokenizer, texts) for _ in call.requests]
        self._tickets: list[Ticket] = []
        try:
            for index, request in enumerate(call.requests):
                self._tickets.append(engine.submit(request, functools.partial(self._pass_on, index)))
        except UserError as error:
            self.cancel()
            status = 503 if isinstance(error, EngineFull | EngineDead) else 400
            headers = {"retry-after": "1"} if isinstance(error, EngineFull) else None
            raise RefusedError(status, str(error), headers=headers) from None

    def _pass_on(self, index: int, ticket: Ticket, event: Emitted | None) -> None:
        """Called on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Gives (index of a choice, what it has more than before), until all have ended.

        Raises:
            RefusedError: the engine failed.
        """
        running = set(range(len(self.choices)))
        while running:
            index, event = await self._events.get()
            if index not in running:
                continue  # what the engine had chosen before it read that the text came to a stop
            choice, ticket = self.choices[index], self._tickets[index]
            reason = ticket.finish_reason
            if event is None and reason not in ("stop", "length"):
                raise RefusedError(500, ticket.error or "the answer is incomplete: the server is shutting down")
            piece = choice.finish(reason or "length") if event is None else choice.feed(event)
            if choice.finish_reason is not None:
                running.discard(index)
                if event is not None:
                    ticket.cancel("stop")
            if piece != Piece():
                yield index, piece

    def usage(self) -> dict[str, Any]:
        """How many tokens were read (of every prompt once) and written so far; one that ends an answer counts."""
        first = self._tickets[:: self._call.num_choices]
        read, written = sum(len(one.request.tokens) for one in first), sum(one.num_tokens for one in self.choices)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(ticket.cached_tokens for ticket in first)},
        }

    def cancel(self) -> None:
        """Ends what still runs."""
        for ticket in self._tickets:
            if ticket.finish_reason is None:
                ticket.cancel()


async def while_there(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of some work, which is cancelled when the client leaves.

    Args:
        receive: of the connection, whose body has been read.
        work: to be done.

    Raises:
        ClientDisconnect: the client left first.
    """

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        # What the work cleans up is done when this returns.
        await asyncio.gather(doing, leaving, return_exceptions=True)


class EventStream(Response):
    """Events that are sent as they come, until they end or the client leaves, or takes none for 20 seconds.

    Args:
        events: objects; None: the last one, [DONE].
        cancel: called at the end, whatever happened.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any] | None], cancel: Callable[[], None]):
        # Proxies that collect an answer before they pass it on leave events alone that say so.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._cancel = events, cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect, TimeoutError):
                await while_there(receive, self._send(send))
        finally:
            self._cancel()

    async def _send(self, send: Send) -> None:
        async def send_one(message: Message) -> None:
            async with asyncio.timeout(CLIENT_SECONDS):
                await send(message)

        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send_one(start)
        async for event in self._events:
            body = b"data: " + (b"[DONE]" if event is None else _encoded(event)) + b"\n\n"
            await send_one({"type": "http.response.body", "body": body, "more_body": True})
        await send_one({"type": "http.response.body", "body": b"", "more_body": False})
