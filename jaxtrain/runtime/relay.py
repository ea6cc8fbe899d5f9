"""A relay between jax's client and the coordinator, so that the end of process 0 is ours to report. No jax here.

jax's C++ client aborts its process (SIGABRT, a stack trace) within 20 ms after the connection to the coordinator
closed, with `jax_enable_recoverability` too (jax 0.10.2, measured): before any Python code can say which process was
lost. Behind the relay the client sees a connection that stays open and silent, which it bears for the time of jax's
heartbeats.

The relay is a process of its own. jax asks whether to stop (`reached_preemption_sync_point`) while it holds Python's
lock and waits for the coordinator: a thread of the same process, which needs that lock, could never pass the answer on.
"""

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
    """Start a relay to the coordinator, on a Unix socket in a folder of this user.

    Args:
        coordinator: `host:port` of process 0.
        timeout: seconds for which the coordinator is tried; it starts when process 0 does.
        lost: called where the coordinator has closed its connection for 5 seconds and the client has not.

    Returns:
        The address that jax's client is given in place of the coordinator's.
    """
    host, _, port = coordinator.rpartition(":")
    folder = tempfile.mkdtemp(prefix="jaxtrain-")
    path = os.path.join(folder, "coordinator")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(4)
        number = listener.fileno()
        # Neither the user's settings nor site packages: it starts in some 20 ms. It runs until its input is closed.
        words = [sys.executable, "-I", "-S", __file__, str(number), folder, host.strip("[]"), port, str(timeout)]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[number], start_new_session=True
        )

    def await_loss() -> None:
        assert process.stdout is not None
        if process.stdout.read(1):
            lost()
        process.wait()

    _start(await_loss)
    return f"unix:{path}"


def _serve(number: int, folder: str, upstream: tuple[str, int], timeout: float) -> None:
    """Be the relay until the process that started it has ended."""
    # They are for the process that trains, which may need the coordinator while it saves.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    _start(_accept, socket.socket(fileno=number), folder, upstream, timeout)
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _start(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, name="jaxtrain-relay", daemon=True)
    thread.start()
    return thread


def _accept(listener: socket.socket, folder: str, upstream: tuple[str, int], timeout: float) -> None:
    """Serve connections for as long as the client may still need a first or second one."""
    deadline = time.monotonic() + timeout
    listener.settimeout(timeout)
    with contextlib.suppress(OSError), listener:
        while time.monotonic() < deadline:
            client, _ = listener.accept()
            _start(_connect, client, upstream, deadline)
    shutil.rmtree(folder, ignore_errors=True)


def _connect(client: socket.socket, upstream: tuple[str, int], deadline: float) -> None:
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
        answers = _start(_answer, server, client, has_ended)
        _copy(client, server)
        # The coordinator may have gone: what the client says is heard until it ends the connection itself.
        with contextlib.suppress(OSError):
            while client.recv(_CHUNK_BYTES):
                pass
        has_ended.set()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        answers.join()


def _answer(server: socket.socket, client: socket.socket, has_ended: threading.Event) -> None:
    _copy(server, client)
    if not has_ended.wait(_LOST_SECONDS):
        with contextlib.suppress(OSError):
            os.write(1, b"x")


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until one side closes; the other one is left open."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2], (sys.argv[3], int(sys.argv[4])), float(sys.argv[5]))
