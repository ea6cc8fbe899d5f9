"""What the processes of a run tell each other every second: what they are doing, and how they leave.

Process 0 listens; each other process holds one connection to it and sends JSON lines. Process 0 answers with what it
knows of the others, so that all know which one is behind. A connection that closes without a farewell means that its
process is lost. jax's own heartbeats say that some process is gone after 10 s or more and abort all with a stack trace
of C++ (SIGABRT); they do not see a main thread that stands still, and name neither its phase nor its step.
"""

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxtrain.runtime.cluster import detect_cluster
from jaxtrain.runtime.terminal import print_remark

# The exit code of a run that stood still, or whose other processes are lost.
LOST = 70
# A process that sends more without a line end is none of ours; one that reads nothing is found by its silence.
_MOST_BYTES = 1 << 20
# How long it takes until all are told of the end, at most.
_TELL_SECONDS = 3.0
# Of many processes, those that are furthest behind are told; all of them would be 150 bytes for each pair.
_MOST_TOLD = 16
_CONNECT_SECONDS = 5.0
_GIVE_UP_SECONDS = 60.0
_ADDRESS_BYTES = 512
Status = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """What is known of a process: what it said last (see `Activity.status`), and when, by `time.monotonic()`."""

    process: int
    host: str
    status: Status
    heard: float


@dataclass(frozen=True)
class News:
    """Something that ends a run: a process is lost (silent, or its connection closed without a farewell), left with an
    error and its exit code, or found a reason to end them all."""

    kind: Literal["lost", "left", "end"]
    process: int
    text: str
    code: int = 0


class _Connection:
    """One side of a connection: lines in, lines out, never waiting."""

    def __init__(self, opened: socket.socket) -> None:
        opened.setblocking(False)
        self.socket, self._in, self._out = opened, b"", b""

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
        try:
            return [dict(json.loads(line)) for line in lines], is_open
        except (ValueError, TypeError, RecursionError):  # none of ours
            return [], False

    def send(self, line: bytes) -> None:
        """Send a line, or keep what cannot be sent at once for the next call."""
        if len(self._out) < _MOST_BYTES:
            self._out += line
        with contextlib.suppress(OSError):
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]


class Exchange:
    """How a process hears of the others: process 0 listens, and hands on what each says; one alone hears of nobody.

    One thread calls all but `wake`.

    Args:
        process: index of this process.
        num_processes: of those that tell each other; process 0 of several listens.
        token: what a process must show.
        hosts: names and addresses of process 0, of which the first that answers is used. Process 0 itself listens on
            the first, or on every address of this machine where it is none of this machine's.
        port: that process 0 listens on. Where no host answers, the run goes on without heartbeats, and a line says so.
    """

    def __init__(
        self, process: int = 0, num_processes: int = 1, *, token: str = "", hosts: Sequence[str] = (), port: int = 0
    ) -> None:
        self.process, self.num_processes = process, num_processes
        self._token, self._hosts, self.port = token, hosts, port
        self._status: Status = {}
        self._known: dict[int, Peer] = {}
        self._open: dict[_Connection, int] = {}
        self._left: set[int] = set()
        self._has_heard_end = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._is_main, self._give_up_at = process == 0 and num_processes > 1, 0.0
        if self._is_main:
            self._listener = _listening(hosts[0] if hosts else None)
            self._listener.setblocking(False)
            self.port = self._listener.getsockname()[1]
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif hosts:
            self._give_up_at = time.monotonic() + _GIVE_UP_SECONDS

    def round(self, status: Status, seconds: float, patience: Callable[[Status], float]) -> list[News]:
        """Tell the others the status, listen for up to some seconds, and return what happened.

        `patience` gives the seconds that a process with some status may be silent.
        """
        self._status = status
        if self._is_main:
            self._tell({"peers": self._told(_MOST_TOLD)})
        else:
            if self._give_up_at:
                self._connect()
            self._tell({"status": status})
        news = self._listen(time.monotonic() + seconds)
        now = time.monotonic()
        silent = {process: now - self._known[process].heard for process in self._open.values()}
        return news or [
            News("lost", process, f"silent for {silence:.0f} s")
            for process, silence in silent.items()
            if process not in self._left and silence > patience(self._known[process].status)
        ]

    def peers(self) -> list[Peer]:
        """What is known of the other processes, in their order."""
        return sorted(self._known.values(), key=lambda peer: peer.process)

    def end(self, text: str) -> None:
        """Tell the others that all end, and why; returns when they have ended or know it, or after 3 seconds."""
        until = time.monotonic() + _TELL_SECONDS
        if self._is_main:
            self._tell({"end": text, "peers": self._told(self.num_processes)})
            while self._open and time.monotonic() < until:  # jax aborts them once this process has ended
                self._listen(until)
        elif self._open and not self._has_heard_end:
            self._tell({"end": text})
            self._listen(until)

    def leave(self, code: int, text: str) -> None:
        """Say farewell: this process ends by itself, with an exit code and, for an error, its line."""
        self._tell({"leave": code, "text": text})

    def forgive(self) -> None:
        """Count the silence of the others from now on: this process was not running itself."""
        now = time.monotonic()
        self._known = {process: replace(peer, heard=now) for process, peer in self._known.items()}

    def wake(self) -> None:
        """End the round that is under way; called by any thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def close(self) -> None:
        """Close what is open."""
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._waker.close()

    def _listen(self, until: float) -> list[News]:
        news: list[News] = []
        while not news and (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._woken.recv(64)
                    return news
                news += key.data()
        return news

    def _tell(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for connection in self._open:
            connection.send(line)

    def _told(self, most: int) -> list[list[Any]]:
        """What process 0 tells of itself and of those that are furthest behind."""
        now = time.monotonic()
        known = [[peer.process, peer.host, peer.status, now - peer.heard] for peer in self._known.values()]
        known.append([0, socket.gethostname(), self._status, 0.0])
        return sorted(known, key=lambda one: one[2].get("step", 0))[:most]

    def _connect(self) -> None:
        for host in self._hosts:
            with contextlib.suppress(OSError):
                connection = self._add(socket.create_connection((host, self.port), timeout=_CONNECT_SECONDS))
                self._open[connection], self._known[0] = 0, Peer(0, host, {}, time.monotonic())
                self._tell({"token": self._token, "process": self.process, "host": socket.gethostname()})
                self._give_up_at = 0.0
                return
        if time.monotonic() > self._give_up_at:
            self._give_up_at = 0.0
            print_remark(
                f"jaxtrain: process {self.process} cannot reach the heartbeats of process 0 at "
                f"{', '.join(self._hosts)} port {self.port}: open the port between the hosts"
            )

    def _accept(self) -> list[News]:
        with contextlib.suppress(OSError):
            self._add(self._listener.accept()[0])
        return []

    def _add(self, opened: socket.socket) -> _Connection:
        connection = _Connection(opened)
        self._selector.register(opened, selectors.EVENT_READ, lambda: self._read(connection))
        return connection

    def _read(self, connection: _Connection) -> list[News]:
        messages, is_open = connection.read()
        news: list[News] = []
        for message in messages:
            if connection in self._open:
                news += self._hear(self._open[connection], message)
            elif not self._welcome(connection, message):
                is_open = False
                break
        if not is_open:
            self._selector.unregister(connection.socket)
            connection.socket.close()
            process = self._open.pop(connection, None)
            if process is not None and process not in self._left and not news:
                news.append(News("lost", process, "its connection closed"))
        return news

    def _welcome(self, connection: _Connection, message: Mapping[str, Any]) -> bool:
        """Whether a first message shows that its sender is of this run."""
        process: Any = message.get("process")
        is_ours = hmac.compare_digest(str(message.get("token")).encode(), self._token.encode())
        if not is_ours or process in self._known or process not in range(1, self.num_processes):
            return False
        self._known[process] = Peer(process, str(message.get("host")), {}, time.monotonic())
        self._open[connection] = process
        return True

    def _hear(self, process: int, message: Mapping[str, Any]) -> list[News]:
        now, known = time.monotonic(), self._known[process]
        self._known[process] = Peer(process, known.host, message.get("status", known.status), now)
        for other, host, status, age in message.get("peers", ()):
            if other != self.process:
                self._known[other] = Peer(other, host, status, now - age)
        if "end" in message:
            self._has_heard_end = True
            return [News("end", process, str(message["end"]))]
        if "leave" in message:
            self._left.add(process)
            return [News("left", process, str(message["text"]), message["leave"])] if message["leave"] else []
        return []


def _listening(host: str | None) -> socket.socket:
    """A listening socket on a host's address, or on all addresses where that is none of this machine's."""
    if host is not None:
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def open_exchange(*, wanted: bool) -> Exchange:
    """The exchange of this process with the others of its cluster; every process calls it.

    A single process hears of nobody, and so do all where process 0 does not want heartbeats.
    """
    import jax

    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return Exchange()
    import numpy as np
    from jax.experimental import multihost_utils

    process, count, main, message = jax.process_index(), jax.process_count(), None, b""
    if process == 0 and wanted:
        cluster = detect_cluster()
        coordinator = None if cluster is None else cluster.coordinator
        listens_on = [] if coordinator is None else [coordinator.rpartition(":")[0].strip("[]")]
        token = secrets.token_hex(16)
        main = Exchange(0, count, token=token, hosts=listens_on)
        hosts = list(dict.fromkeys([*listens_on, socket.gethostname()]))
        message = json.dumps({"token": token, "hosts": hosts, "port": main.port}).encode()
    padded = np.frombuffer(message.ljust(_ADDRESS_BYTES), np.uint8)
    # Over jax's own collectives, so that no address has to be known before and no secret is on a command line.
    told = np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8).tobytes().strip()
    return main or (Exchange(process, count, **json.loads(told)) if told else Exchange(process))
