"""What comes over a connection: a body within its limits, and the end of the client."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxtrain.inference.server.refused import RefusedError

_Result = TypeVar("_Result")
Receive = Callable[[], Awaitable[Any]]

# A client that still sends does not read an answer: so much of a body that is too large is read and thrown away.
_MOST_DISCARDED = 256 * 2**20


class GoneError(Exception):
    """The client left before it had its answer."""


@dataclass(frozen=True)
class Limits:
    """Limits of a body.

    Attributes:
        body_bytes: of one body.
        body_seconds: from its first byte to its last.
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0


async def read_body(receive: Receive, limits: Limits) -> bytes:
    """The body of a request.

    Args:
        receive: of the connection.
        limits: of the body.

    Raises:
        RefusedError: it is too large, or comes too slowly.
        GoneError: the client left in the middle of it.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
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
        raise RefusedError(
            408, f"the body did not arrive within {limits.body_seconds:g} seconds; send it at once"
        ) from None
    if size > limits.body_bytes:
        raise RefusedError(
            413, f"the body has more than {limits.body_bytes} bytes, which this server takes", code="body_too_large"
        )
    return b"".join(parts)


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
