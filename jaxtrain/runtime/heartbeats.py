"""What the processes of a run tell each other every second: what they are doing, and how they leave. No jax here.

Process 0 listens; each other process holds one connection to it and sends JSON lines. Process 0 answers with what it
knows of the others, so that all know which one is behind. A connection that closes without a farewell means that its
process is lost.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jaxtrain.runtime.forks import drop_in_children

# The exit code of a run that stood still, or whose other processes are lost.
LOST = 70
# A process that sends more without a line end is none of ours.
_MOST_BYTES = 1 << 20
# What waits for a process that reads nothing; it is silent itself, and found by that.
_MOST_WAITING = 1 << 20
Status = Mapping[str, Any]
# Status of a process -> seconds of silence after which it counts as lost.
Patience = Callable[[Status], float]


@dataclass(frozen=True)
class Peer:
    """What is known of a process.

    Attributes:
        process: its index.
        host: its host's name.
        status: what it said last, see `Activity.status`.
        age: seconds since then.
    """

    process: int
    host: str
    status: Status
    age: float


@dataclass(frozen=True)
class News:
    """Something that ends a run, or may.

    Attributes:
        kind: `lost` (the connection closed without a farewell, or the process is silent), `left` (it ended with an
            error) or `end` (a process found a reason to end them all).
        process: index of the process.
        text: the reason.
        code: exit code, of `left`.
    """

    kind: Literal["lost", "left", "end"]
    process: int
    text: str
    code: int = 0


class Exchange(Protocol):
    """How a process hears of the others. All but `wake` is called by one thread, the watchdog's."""

    def round(self, status: Status, seconds: float, patience: Patience) -> list[News]:
        """Tell the others the status, listen to them for up to some seconds, and return what happened.

        Args:
            status: of this process.
            seconds: how long to listen; less where something happens.
            patience: how long each process may be silent.
        """
        ...

    def peers(self) -> list[Peer]:
        """What is known of the other processes, in their order."""
        ...

    def end(self, text: str) -> None:
        """Tell the others that all end, and why; returns when they have ended, or after 3 seconds."""
        ...

    def leave(self, code: int, text: str) -> None:
        """Say farewell: this process ends by itself, with an exit code and, for an error, its line."""
        ...

    def is_waiting(self) -> bool:
        """Whether process 0, which jax waits for when a process exits, has not said farewell yet."""
        ...

    def forgive(self) -> None:
        """Count the silence of the others from now on: this process was not running itself."""
        ...

    def wake(self) -> None:
        """End the round that is under way; called by any thread."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...


class Connection:
    """One side of a connection: lines in, lines out, never waiting."""

    def __init__(self, opened: socket.socket) -> None:
        opened.setblocking(False)
        with contextlib.suppress(OSError):
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = opened
        # A worker that outlives its parent would keep the others from seeing that the parent is lost.
        self._keep_in_children = drop_in_children(opened.close)
        self._in, self._out = b"", b""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The messages that have come, and whether the connection is still open."""
        is_open = True
        try:
            while is_open:
                data = self.socket.recv(65_536)
                self._in += data
                is_open = bool(data) and len(self._in) <= _MOST_BYTES
        except BlockingIOError:
            pass
        except OSError:
            is_open = False
        *lines, self._in = self._in.split(b"\n")
        found = []
        for line in lines:
            message = _message(line)
            if message is None:
                return found, False
            found.append(message)
        return found, is_open

    def write(self, message: Mapping[str, Any]) -> None:
        """Send a message, or keep what cannot be sent at once for the next call."""
        self.send(encoded(message))

    def send(self, line: bytes) -> None:
        """Send what `encoded` gave; see `write`."""
        if len(self._out) < _MOST_WAITING:
            self._out += line
        with contextlib.suppress(OSError):
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]

    def close(self) -> None:
        """Close the connection."""
        self._keep_in_children()
        self.socket.close()


def encoded(message: Mapping[str, Any]) -> bytes:
    """A message as it is sent, for many connections."""
    return json.dumps(message).encode() + b"\n"


def _message(line: bytes) -> dict[str, Any] | None:
    """What a line says; None where it is none of ours."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class Waker:
    """A pair of sockets: what is written into one ends a wait for the other."""

    def __init__(self) -> None:
        self.socket, self._write = socket.socketpair()
        self.socket.setblocking(False)
        self._keep_in_children = drop_in_children(self._close)

    def wake(self) -> None:
        """End the wait; called by any thread."""
        with contextlib.suppress(OSError):
            self._write.send(b"x")

    def clear(self) -> None:
        """Take note that the wait has ended."""
        with contextlib.suppress(OSError):
            self.socket.recv(64)

    def close(self) -> None:
        """Close both ends."""
        self._keep_in_children()
        self._close()

    def _close(self) -> None:
        self.socket.close()
        self._write.close()


class Alone:
    """The exchange of a single process: it only waits; see `Exchange`."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def round(self, status: Status, seconds: float, patience: Patience) -> list[News]:
        """Wait."""
        self._woken.wait(seconds)
        self._woken.clear()
        return []

    def peers(self) -> list[Peer]:
        """There are none."""
        return []

    def end(self, text: str) -> None:
        """There is nobody to tell."""

    def leave(self, code: int, text: str) -> None:
        """There is nobody to tell."""

    def is_waiting(self) -> bool:
        """There is nobody to wait for."""
        return False

    def forgive(self) -> None:
        """There is nobody to forgive."""

    def wake(self) -> None:
        """End the wait."""
        self._woken.set()

    def close(self) -> None:
        """There is nothing to close."""
