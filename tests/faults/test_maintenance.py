"""Maintenance notices of a metadata server, which is one of this machine."""

import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from noticed_runs import fit, outcome

import jaxtrain as jt
from jaxtrain.runtime import notices


class MetadataServer:
    """The part of Google's metadata server that says what becomes of the machine."""

    def __init__(self) -> None:
        self.values = {"maintenance-event": "NONE", "preempted": "FALSE"}
        self.asked: list[str] = []
        self.flavor = "Google"
        self._changed = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, _, query = request.path.partition("?")
        name = path.removeprefix("/computeMetadata/v1/instance/")
        assert request.headers["Metadata-Flavor"] == "Google"
        with self._changed:
            self.asked.append(name)
            if "wait_for_change=true" in query:
                known = query.partition("last_etag=")[2]
                self._changed.wait_for(lambda: self.values[name] != known, timeout=20)
            value = self.values[name]
        request.send_response(200)
        request.send_header("Metadata-Flavor", self.flavor)
        request.send_header("ETag", value)  # of values that differ, the value tells them apart
        request.end_headers()
        request.wfile.write(value.encode())

    def change(self, name: str, value: str) -> None:
        with self._changed:
            self.values[name] = value
            self._changed.notify_all()

    def close(self) -> None:
        self.change("maintenance-event", "CLOSED")
        self.change("preempted", "CLOSED")
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    found = MetadataServer()
    monkeypatch.setenv("GCE_METADATA_HOST", found.address)
    yield found
    found.close()


def wait_for(condition: Any, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


# Values before and after, and the word of the notice; None: there is none.
NOTICES: dict[str, tuple[dict[str, str], dict[str, str], str | None]] = {
    "a spot VM is taken back": ({}, {"preempted": "TRUE"}, "taken back"),
    "the host is maintained": ({}, {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}, "maintained"),
    "the VM migrates": ({}, {"maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}, None),
    "it was announced before": ({"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}, {}, None),
    "announced before, taken back": (
        {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"},
        {"preempted": "TRUE"},
        "taken back",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", NOTICES)
def test_what_is_a_notice(case: str, server: MetadataServer) -> None:
    before, after, word = NOTICES[case]
    server.values |= before
    heard: list[str] = []
    stop = notices.watch_metadata("auto", heard.append)
    try:
        # Both values are asked for, and then asked for again until they change.
        assert wait_for(lambda: min(map(server.asked.count, server.values)) >= 2)
        for name, value in after.items():
            server.change(name, value)
        assert wait_for(lambda: heard, seconds=20 if word else 1) == bool(word)
    finally:
        stop()
    assert [word in text for text in heard if word] == [True] * bool(word)


@pytest.mark.long
@pytest.mark.parametrize("case", ["switched off", "no such machine", "another server", "nobody answers"])
def test_no_notice_is_silent(
    case: str, server: MetadataServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if case == "no such machine":
        monkeypatch.delenv("GCE_METADATA_HOST")
        monkeypatch.setattr(notices, "_PRODUCT", Path("/nowhere"))
    if case == "another server":
        server.flavor = "Other"
    if case == "nobody answers":
        monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    heard: list[str] = []
    stop = notices.watch_metadata("auto" if case != "switched off" else False, heard.append)
    wait_for(lambda: server.asked, seconds=0.5)
    assert wait_for(lambda: not any(thread.name.startswith("jaxtrain-notice") for thread in threading.enumerate()), 20)
    stop()
    assert bool(server.asked) == (case == "another server")
    assert not heard
    assert capfd.readouterr() == ("", "")


def test_a_run_saves_at_a_notice_and_goes_on(tmp_path: Path, server: MetadataServer) -> None:
    def announce(moment: jt.Moment) -> None:
        if moment.step == 3:
            assert wait_for(lambda: server.asked.count("preempted") >= 2)
            server.change("preempted", "TRUE")
            time.sleep(0.5)  # the notice arrives during this step, or one of the next

    with pytest.raises(jt.PreemptedError, match=r"stopped after step [3-5] of 6.* after metadata server: preempted"):
        fit(tmp_path, lambda name: None, callbacks=[jt.Callback(on_step=announce)])
    # The notice stands, and the run that is started again goes on.
    fit(tmp_path, lambda name: None)
    found = outcome(tmp_path)
    assert found["status"] == "done"
    assert [step for step, *_ in found["losses"]] == [1, 2, 3, 4, 5, 6]
    assert os.environ["GCE_METADATA_HOST"] == server.address
