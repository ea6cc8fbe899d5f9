"""The HTTP server of an application, and the signals that end it."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAID = b"finishing what runs, then exit 0; a second signal ends at once\n"
# Seconds that an idle connection is kept for the next request.
_KEEP_ALIVE = 30


class _Server(uvicorn.Server):
    """Ends at the first SIGTERM or Ctrl-C when all answers are given, and at the second at once.

    Args:
        config: of it.
        ending: of the application, see `build_app`.
    """

    def __init__(self, config: uvicorn.Config, ending: asyncio.Event) -> None:
        super().__init__(config)
        self._ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending.set()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._end) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + number)
        os.write(2, _SAID)
        self.should_exit = True


def serve_app(app: Starlette, taken: socket.socket, *, when_ready: Callable[[], None]) -> None:
    """Serve an application until a signal comes; what runs then is finished.

    To be called in the main thread, where signals arrive.

    Args:
        app: from `build_app`.
        taken: a socket that listens.
        when_ready: called when requests are answered.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE,
        backlog=2048,
    )
    server = _Server(config, app.state.ending)

    async def serve() -> None:
        serving = asyncio.ensure_future(server.serve(sockets=[taken]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        if server.started:
            when_ready()
        await serving

    asyncio.run(serve())
