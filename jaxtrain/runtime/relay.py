"""A relay between jax's client and the coordinator, so that the end of process 0 is ours to report. No jax here.

jax's C++ client aborts its process, with a stack trace, within 20 ms after the connection to the coordinator closed:
before any Python code can say which process was lost. Behind the relay the client sees a connection that stays open and
silent, which it bears for the time of jax's heartbeats.
"""

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable

_RETRY_SECONDS = 0.2
_CHUNK_BYTES = 65_536
_LOST_SECONDS = 5.0


def relayed(coordinator: str, *, timeout: float, lost: Callable[[], None]) -> str:
    """Start a relay to the coordinator.

    It listens on a Unix socket in a folder of this user, so that nothing else can use it. The folder is removed once
    the client has connected.

    Args:
        coordinator: `host:port` of process 0.
        timeout: seconds for which the coordinator is tried; it starts when process 0 does.
        lost: called where the coordinator has closed its connection for 5 seconds and the client has not: whoever
            watches the run has said more by then, and ended the process.

    Returns:
        The address that jax's client is given in place of the coordinator's; the coordinator's own where this system
        has no such sockets.
    """
    if os.name != "posix":
        return coordinator
    host, _, port = coordinator.rpartition(":")
    upstream = (host.strip("[]"), int(port))
    folder = tempfile.mkdtemp(prefix="jaxtrain-")
    path = os.path.join(folder, "coordinator")
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        listener.listen(4)
    except OSError:
        # The path may be too long for a socket.
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)
        return coordinator
    _start(_accept, listener, folder, upstream, timeout, lost)
    return f"unix:{path}"


def _start(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, name="jaxtrain-relay", daemon=True)
    thread.start()
    return thread


def _accept(
    listener: socket.socket, folder: str, upstream: tuple[str, int], timeout: float, lost: Callable[[], None]
) -> None:
    """Serve connections for as long as the client may still need a first or second one."""
    deadline = time.monotonic() + timeout
    listener.settimeout(timeout)
    with contextlib.suppress(OSError), listener:
        while time.monotonic() < deadline:
            client, _ = listener.accept()
            _start(_connect, client, upstream, deadline, lost)
    shutil.rmtree(folder, ignore_errors=True)


def _connect(client: socket.socket, upstream: tuple[str, int], deadline: float, lost: Callable[[], None]) -> None:
    while True:
        try:
            server = socket.create_connection(upstream, timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                client.close()
                return
            time.sleep(_RETRY_SECONDS)
    with client, server:
        server.settimeout(None)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        has_ended = threading.Event()
        answers = _start(_answer, server, client, has_ended, lost)
        _copy(client, server)
        # The coordinator may have gone: what the client says is heard until it ends the connection itself.
        with contextlib.suppress(OSError):
            while client.recv(_CHUNK_BYTES):
                pass
        has_ended.set()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        answers.join()


def _answer(server: socket.socket, client: socket.socket, has_ended: threading.Event, lost: Callable[[], None]) -> None:
    _copy(server, client)
    if not has_ended.wait(_LOST_SECONDS):
        lost()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until one side closes; the other one is left open."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)
