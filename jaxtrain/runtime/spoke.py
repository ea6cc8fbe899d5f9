"""The side of the heartbeats of every process but process 0: one connection to it. No jax here."""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.runtime.heartbeats import Connection, News, Patience, Peer, Status, Waker

_CONNECT_SECONDS = 5.0
_GIVE_UP_SECONDS = 60.0
# How long process 0 may take to hand on the end that this process found.
_TELL_SECONDS = 3.0


class Spoke:
    """Tells process 0 what this process does, and hears of the others from it; see `Exchange`.

    Args:
        process: index of this process.
        token: that shows whose it is.
        hosts: names and addresses of process 0, of which the first that answers is used.
        port: that it listens on.
        report: called with one line where none of them answers; the run goes on without heartbeats.
    """

    def __init__(
        self, process: int, token: str, *, hosts: Sequence[str], port: int, report: Callable[[str], None]
    ) -> None:
        self._process, self._token, self._hosts, self._port = process, token, tuple(hosts), port
        self._report = report
        self._waker = Waker()
        self._connection: Connection | None = None
        self._began = time.monotonic()
        self._is_over = False
        self._heard = 0.0
        self._told: list[list[Any]] = []
        self._told_at = 0.0
        self._has_said_end = False

    def round(self, status: Status, seconds: float, patience: Patience) -> list[News]:
        """Tell process 0, then listen to it."""
        end = time.monotonic() + seconds
        if self._connection is None and not self._is_over:
            self._connect()
        if self._connection is not None:
            self._connection.write({"status": status})
        news: list[News] = []
        is_woken = False
        while not news and not is_woken and (left := end - time.monotonic()) > 0:
            with selectors.DefaultSelector() as selector:
                selector.register(self._waker.socket, selectors.EVENT_READ)
                if self._connection is not None:
                    selector.register(self._connection.socket, selectors.EVENT_READ)
                for key, _ in selector.select(left):
                    if key.fileobj is self._waker.socket:
                        self._waker.clear()
                        is_woken = True
                    else:
                        news += self._read()
        if self._connection is not None and not news:
            silent = time.monotonic() - self._heard
            if silent > patience(self._status_of_0()):
                news.append(News("lost", 0, f"silent for {silent:.0f} s"))
        return news

    def peers(self) -> list[Peer]:
        """What process 0 said of all."""
        passed = time.monotonic() - self._told_at
        found = []
        for process, host, status, age in self._told:
            if process != self._process and isinstance(status, dict):
                found.append(Peer(int(process), str(host), status, float(age) + passed))
        return sorted(found, key=lambda peer: peer.process)

    def end(self, text: str) -> None:
        """Have process 0 tell all, and wait for its answer."""
        if self._connection is None or self._has_said_end:
            return
        self._connection.write({"end": text})
        deadline = time.monotonic() + _TELL_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection.socket, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0 and selector.select(left):
                if self._read():
                    return

    def leave(self, code: int, text: str) -> None:
        """Tell process 0."""
        if self._connection is not None:
            self._connection.write({"leave": code, "text": text})

    def is_waiting(self) -> bool:
        """Whether process 0 is connected."""
        return self._connection is not None and not self._is_over

    def forgive(self) -> None:
        """Count the silence of process 0 from now on."""
        self._heard = time.monotonic()

    def wake(self) -> None:
        """End the round."""
        self._waker.wake()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._waker.close()

    def _connect(self) -> None:
        for host in self._hosts:
            with contextlib.suppress(OSError):
                opened = socket.create_connection((host, self._port), timeout=_CONNECT_SECONDS)
                self._connection = Connection(opened)
                self._heard = time.monotonic()
                self._connection.write({"token": self._token, "process": self._process, "host": socket.gethostname()})
                return
        if time.monotonic() - self._began > _GIVE_UP_SECONDS:
            self._is_over = True
            tried = ", ".join(self._hosts)
            self._report(
                f"jaxtrain: process {self._process} cannot reach the heartbeats of process 0 at {tried} port "
                f"{self._port}, so that lost processes are found by jax alone; open the port between the hosts"
            )

    def _status_of_0(self) -> Status:
        return next((status for process, _, status, _ in self._told if process == 0), {})

    def _read(self) -> list[News]:
        assert self._connection is not None
        messages, is_open = self._connection.read()
        news: list[News] = []
        for message in messages:
            self._heard = time.monotonic()
            if isinstance(message.get("peers"), list):
                self._told, self._told_at = message["peers"], self._heard
            code = message.get("leave")
            if "end" in message:
                self._has_said_end = True
                news.append(News("end", 0, str(message["end"])))
            elif isinstance(code, int):
                self._is_over = True
                if code:
                    news.append(News("left", 0, str(message.get("text")), code))
        if not is_open:
            self._connection.close()
            self._connection = None
            if not self._is_over and not news:
                news.append(News("lost", 0, "its connection closed"))
            self._is_over = True
        return news
