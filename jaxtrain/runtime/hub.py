"""Process 0's side of the heartbeats: it listens, and hands on what each process says. No jax here."""

import contextlib
import hmac
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

from jaxtrain.runtime.forks import drop_in_children
from jaxtrain.runtime.heartbeats import Connection, News, Patience, Peer, Status, Waker, encoded

# Who connects and does not say who it is within this time is none of ours.
_HELLO_SECONDS = 10.0
# How long it takes until all are told, at most, before this process ends.
_TELL_SECONDS = 3.0
# Of many processes, those that are furthest behind are told; all of them would be 150 bytes for each pair.
_MOST_TOLD = 16


@dataclass
class _Member:
    """A process that has said who it is; its connection is None once it has closed."""

    connection: Connection | None
    host: str
    status: Status
    heard: float


class Hub:
    """Hears every other process; see `Exchange`.

    Args:
        num_processes: of the run.
        token: what a process must show.
        host: the address to listen on; None: every address of this machine.

    Attributes:
        port: that it listens on.
    """

    def __init__(self, num_processes: int, token: str, *, host: str | None) -> None:
        self._num_processes, self._token = num_processes, token
        self._listener = _listen(host)
        self._listener.setblocking(False)
        # A worker that outlives its parent would take the connections of the next start, and never answer.
        self._keep_in_children = drop_in_children(self._listener.close)
        self.port: int = self._listener.getsockname()[1]
        self._waker = Waker()
        self._strangers: dict[Connection, float] = {}
        self._members: dict[int, _Member] = {}
        self._indices: dict[Connection, int] = {}
        self._left: set[int] = set()
        self._own: Status = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker.socket, selectors.EVENT_READ)

    def round(self, status: Status, seconds: float, patience: Patience) -> list[News]:
        """Listen, then tell all what is known."""
        self._own = status
        end = time.monotonic() + seconds
        news: list[News] = []
        is_woken = False
        while not news and not is_woken and (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is self._waker.socket:
                    self._waker.clear()
                    is_woken = True
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    news += self._read(key.data)
        now = time.monotonic()
        for stranger in [one for one, since in self._strangers.items() if now - since > _HELLO_SECONDS]:
            self._drop(stranger)
        for process, member in self._members.items():
            silent = now - member.heard
            is_here = member.connection is not None and process not in self._left
            if is_here and silent > patience(member.status):
                news.append(News("lost", process, f"silent for {silent:.0f} s"))
        self._tell({"peers": self._told(now)})
        return news

    def peers(self) -> list[Peer]:
        """What each process that has connected said last."""
        now = time.monotonic()
        members = sorted(self._members.items())
        return [Peer(process, member.host, member.status, now - member.heard) for process, member in members]

    def end(self, text: str) -> None:
        """Tell all, and wait until they have ended: jax aborts them once this process has."""
        now = time.monotonic()
        self._tell({"end": text, "peers": self._told(now, most=self._num_processes)})
        while self._are_connected() and (left := now + _TELL_SECONDS - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if isinstance(key.data, Connection):
                    self._read(key.data)
                elif key.fileobj is self._waker.socket:
                    self._waker.clear()

    def leave(self, code: int, text: str) -> None:
        """Tell all."""
        self._tell({"leave": code, "text": text})

    def is_waiting(self) -> bool:
        """This is process 0."""
        return False

    def forgive(self) -> None:
        """Count every silence from now on."""
        for member in self._members.values():
            member.heard = time.monotonic()

    def wake(self) -> None:
        """End the round."""
        self._waker.wake()

    def close(self) -> None:
        """Close every connection."""
        for connection in [*self._strangers, *(member.connection for member in self._members.values())]:
            if connection is not None:
                connection.close()
        self._keep_in_children()
        self._listener.close()
        self._selector.close()
        self._waker.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection = Connection(self._listener.accept()[0])
            self._strangers[connection] = time.monotonic()
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection) -> list[News]:
        messages, is_open = connection.read()
        news: list[News] = []
        for message in messages:
            process = self._indices.get(connection)
            if process is None:
                if not self._welcome(connection, message):
                    self._drop(connection)
                    return news
            else:
                news += self._hear(process, message)
        if not is_open:
            process = self._indices.get(connection)
            self._drop(connection)
            if process is not None and process not in self._left:
                news.append(News("lost", process, "its connection closed"))
        return news

    def _are_connected(self) -> bool:
        return bool(self._indices)

    def _welcome(self, connection: Connection, message: dict[str, Any]) -> bool:
        token, process, host = message.get("token"), message.get("process"), message.get("host")
        if not isinstance(token, str) or not hmac.compare_digest(token.encode(), self._token.encode()):
            return False
        if not isinstance(process, int) or not 0 < process < self._num_processes or process in self._members:
            return False
        self._strangers.pop(connection, None)
        self._members[process] = _Member(connection, str(host), {}, time.monotonic())
        self._indices[connection] = process
        return True

    def _hear(self, process: int, message: dict[str, Any]) -> list[News]:
        member = self._members[process]
        member.heard = time.monotonic()
        status, code = message.get("status"), message.get("leave")
        if isinstance(status, dict):
            member.status = status
        if "end" in message:
            return [News("end", process, str(message["end"]))]
        if isinstance(code, int):
            self._left.add(process)
            return [News("left", process, str(message.get("text")), code)] if code else []
        return []

    def _drop(self, connection: Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()
        self._strangers.pop(connection, None)
        process = self._indices.pop(connection, None)
        if process is not None:
            self._members[process].connection = None

    def _told(self, now: float, most: int = _MOST_TOLD) -> list[list[Any]]:
        known = [[0, socket.gethostname(), self._own, 0.0]]
        known += [
            [process, member.host, member.status, round(now - member.heard, 3)]
            for process, member in self._members.items()
        ]
        return sorted(known, key=lambda one: one[2].get("step", 0))[:most]

    def _tell(self, message: dict[str, Any]) -> None:
        line = encoded(message)
        for member in self._members.values():
            if member.connection is not None:
                member.connection.send(line)


def _listen(host: str | None) -> socket.socket:
    """A listening socket on a host's address, or on all addresses where that is none of this machine's."""
    if host is not None:
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)
