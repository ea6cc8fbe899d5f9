"""What comes over a connection: a body within its limits, and the end of the client, or of its patience."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxtrain.inference.server.refused import RefusedError

_Result = TypeVar("_Result")
Receive = Callable[[], Awaitable[Any]]

# A client that still sends does not read an answer: so much of a body that is too large is read and thrown away.
_MOST_DISCARDED = 256 * 2**20
# A client that takes nothing for so long counts as gone. It is less than the 30 seconds that Kubernetes leaves between
# SIGTERM and the kill, so that a server ends in order although somebody does not read.
SEND_SECONDS = 20.0


class GoneError(Exception):
    """The client left before it had its answer."""


@dataclass(frozen=True)
class Limits:
    """Limits of a body.

    Attributes:
        body_bytes: of one body.
        body_seconds: from its first byte to its last.
        ending_seconds: the same, once the server is to end.
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    ending_seconds: float = 1.0


async def read_body(receive: Receive, limits: Limits, ending: asyncio.Event) -> bytes:
    """The body of a request.

    Args:
        receive: of the connection.
        limits: of the body.
        ending: set once the server is to end.

    Raises:
        RefusedError: it is too large, or comes too slowly, or not before the server ends.
        GoneError: the client left in the middle of it.
    """
    parts: list[bytes] = []
    size = 0
    hurrying: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(limits.body_seconds) as limit:
            hurrying = asyncio.ensure_future(_hurry(limit, limits.ending_seconds, ending))
            while size <= _MOST_DISCARDED:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise GoneError
                part = message.get("body", b"")
                size += len(part)
                if size <= limits.body_bytes:
                    parts.append(part)
                else:
                    parts.clear()
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        if ending.is_set():
            raise RefusedError(
                503, "the server ends, and the body had not arrived; send the request again", code="server_ends"
            ) from None
        raise RefusedError(
            408, f"the body did not arrive within {limits.body_seconds:g} seconds; send it at once"
        ) from None
    finally:
        if hurrying is not None:
            hurrying.cancel()
    if size > limits.body_bytes:
        raise RefusedError(
            413, f"the body has more than {limits.body_bytes} bytes, which this server takes", code="body_too_large"
        )
    return b"".join(parts)


async def _hurry(limit: asyncio.Timeout, seconds: float, ending: asyncio.Event) -> None:
    """Bring a limit forward once the server is to end."""
    await ending.wait()
    before, at = limit.when(), asyncio.get_running_loop().time() + seconds
    if not limit.expired() and (before is None or at < before):
        limit.reschedule(at)


async def while_there(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of some work, which is cancelled when the client leaves.

    Args:
        receive: of the connection, whose body has been read.
        work: to be done.

    Raises:
        GoneError: the client left first.
    """
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise GoneError
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        # What the work cleans up is done when this returns.
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
