"""A relay between jax's client and the coordinator, so that the end of process 0 is ours to report. No jax here.

jax's C++ client aborts its process (SIGABRT, a stack trace) within 20 ms after the connection to the coordinator
closed, with `jax_enable_recoverability` too (jax 0.10.2, measured): before any Python code can say which process was
lost. Behind the relay the client sees a connection that stays open and silent, which it bears for the time of jax's
heartbeats.

The relay is a process of its own. jax asks whether to stop (`reached_preemption_sync_point`) while it holds Python's
lock and waits for the coordinator: a thread of the same process, which needs that lock, could never pass the answer on.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

_RETRY_SECONDS = 0.2
_CHUNK_BYTES = 65_536
# Whoever watches the run has said more by then, and ended the process.
_LOST_SECONDS = 5.0


def relayed(coordinator: str, *, timeout: float, lost: Callable[[], object]) -> str:
    """Start a relay to a coordinator (`host:port`), and return the address that jax's client is given in its place.

    The coordinator is tried for `timeout` seconds; it starts when process 0 does. `lost` is called where it has closed
    its connection for 5 seconds and the client has not.
    """
    host, _, port = coordinator.rpartition(":")
    folder = tempfile.mkdtemp(prefix="jaxtrain-")
    path = os.path.join(folder, "coordinator")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(4)
        number = listener.fileno()
        # Neither the user's settings nor site packages: it starts within 0.1 s. It runs until its input is closed.
        words = [sys.executable, "-I", "-S", __file__, str(number), folder, host.strip("[]"), port, str(timeout)]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[number], start_new_session=True
        )

    def await_loss() -> None:
        assert process.stdout is not None
        if process.stdout.read(1):
            lost()
        process.wait()

    threading.Thread(target=await_loss, name="jaxtrain-relay", daemon=True).start()
    return f"unix:{path}"


async def _relay(listener: socket.socket, upstream: tuple[str, int], timeout: float) -> None:
    """Be the relay until the process that started it has ended."""
    deadline = time.monotonic() + timeout

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK_BYTES):
                target.write(data)
                await target.drain()

    async def hear_out(client: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):  # a client that was killed resets its connection
            await client.read()

    async def serve(from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        while True:
            try:
                from_server, to_server = await asyncio.open_connection(*upstream)
                break
            except OSError:
                if time.monotonic() > deadline:
                    to_client.close()
                    return
                await asyncio.sleep(_RETRY_SECONDS)
        asks = asyncio.create_task(copy(from_client, to_server))
        answers = asyncio.create_task(copy(from_server, to_client))
        await asyncio.wait([asks, answers], return_when=asyncio.FIRST_COMPLETED)
        if answers.done() and not asks.done():
            # The coordinator may have gone: what the client says is heard until it ends the connection itself.
            asks.cancel()
            await asyncio.wait([asks])
            try:
                await asyncio.wait_for(hear_out(from_client), _LOST_SECONDS)
            except TimeoutError:
                os.write(1, b"x")
                await hear_out(from_client)
        to_server.close()
        to_client.close()

    async def handle(from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # at the end; asyncio would report it on standard error
            await serve(from_client, to_client)

    server = await asyncio.start_unix_server(handle, sock=listener)
    parent = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(parent), sys.stdin)
    await parent.read()
    server.close()


if __name__ == "__main__":
    # Signals are for the process that trains, which may need the coordinator while it saves.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)
    number, folder, host, port, seconds = sys.argv[1:]
    with contextlib.suppress(OSError):
        asyncio.run(_relay(socket.socket(fileno=int(number)), (host, int(port)), float(seconds)))
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)
