"""What processes hear of each other over real sockets, and the relay before jax's coordinator."""

import contextlib
import ctypes
import json
import select
import socket
import struct

import pytest

from jaxtrain.runtime.heartbeats import Exchange, News
from jaxtrain.runtime.relay import relayed

TOKEN = "secret"
HOST = "127.0.0.1"


def never(status):
    return 1e9


def status(phase, step):
    return {"phase": phase, "step": step, "done": step - 1, "seconds": 0.5, "totals": [step, 1.0, 0.1]}


@contextlib.contextmanager
def star(count):
    """Process 0 and others that have heard of each other."""
    hub = Exchange(0, count, token=TOKEN, hosts=[HOST])
    spokes = [Exchange(index, count, token=TOKEN, hosts=[HOST], port=hub.port) for index in range(1, count)]
    try:
        for last in (False, False, True):
            for index, spoke in enumerate(spokes, 1):
                spoke.round(status("step", 10 + index), 0.02, never)
            if not last:
                hub.round(status("step", 10), 0.05, never)
        yield hub, spokes
    finally:
        for one in (*spokes, hub):
            one.close()


@pytest.mark.parametrize(
    ("leave", "news"),
    [
        pytest.param(None, [News("lost", 1, "its connection closed")], id="killed"),
        pytest.param((0, ""), [], id="done"),
        pytest.param((3, "row 7"), [News("left", 1, "row 7", 3)], id="failed"),
    ],
)
def test_how_a_process_ends(leave, news):
    with star(2) as (hub, [spoke]):
        if leave is not None:
            spoke.leave(*leave)
        spoke.close()
        heard = hub.round(status("step", 10), 0.1, never) + hub.round(status("step", 10), 0.1, never)
        assert heard == news
        assert hub.peers()[0].status["step"] == 11, "what it said last is kept for the report"


def test_silence_counts_by_what_the_process_does():
    with star(2) as (hub, _):
        assert hub.round(status("step", 10), 0.1, lambda said: 9 if said["phase"] == "step" else 0) == []
        [lost] = hub.round(status("step", 10), 0.1, lambda said: 0.05)
        assert (lost.kind, lost.process) == ("lost", 1)
        assert lost.text.startswith("silent for ")
        hub.forgive()
        assert hub.round(status("step", 10), 0.01, lambda said: 5) == []


@pytest.mark.parametrize(
    "said",
    [
        pytest.param({"token": "guess", "process": 1, "host": "h"}, id="another-token"),
        pytest.param({"token": TOKEN, "process": 9, "host": "h"}, id="no-such-process"),
        pytest.param([1], id="a-list"),
    ],
)
def test_strangers_are_sent_away(said):
    hub = Exchange(0, 2, token=TOKEN, hosts=[HOST])
    try:
        with socket.create_connection((HOST, hub.port)) as stranger:
            stranger.sendall(json.dumps(said).encode() + b"\n" + b'{"end": "now"}\n')
            assert hub.round(status("step", 1), 0.1, never) == []
            assert hub.peers() == []
            stranger.settimeout(2)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    finally:
        hub.close()


def test_the_relay_answers_while_pythons_lock_is_held():
    """jax holds it while it waits for the coordinator after SIGTERM."""
    with socket.create_server((HOST, 0)) as coordinator:
        address = relayed(f"{HOST}:{coordinator.getsockname()[1]}", timeout=5, lost=pytest.fail)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address.removeprefix("unix:"))
            server, _ = coordinator.accept()
            with server:
                wanted = ctypes.create_string_buffer(struct.pack("ihh", client.fileno(), select.POLLIN, 0))
                server.sendall(b"answer")
                # Unlike CDLL, PyDLL keeps the lock.
                assert ctypes.PyDLL(None).poll(wanted, ctypes.c_ulong(1), 5000) == 1
