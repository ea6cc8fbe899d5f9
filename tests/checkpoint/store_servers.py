"""Object stores on this machine for tests: servers that speak the real protocols, each behind a proxy that can fail.

moto is the server for S3; it compares before it writes (If-None-Match). gcp-storage-emulator is the one for Google's
store; it ignores ifGenerationMatch, so what relies on that is tested on S3 alone. Both packages and the clients are in
the extra `dev`; what needs them says so where it is left out.
"""

import http.client
import importlib.util
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

BUCKET = "bucket"
PACKAGES = ("s3fs", "gcsfs", "moto", "gcp_storage_emulator")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
# A server that starts on a loaded machine.
_START_SECONDS = 60
# Hop by hop, or written anew by the proxy.
_DROPPED = {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server", "expect"}

# Of a read of what changed since; it comes where a read of an OCDBT manifest is some moments old.
_NOT_MATCH = re.compile(r"[?&]ifGenerationNotMatch=(\d+)")

# None: pass it on; a number: answer with that status; a string: answer that with status 500.
Fault = Callable[[str, str], int | None]


def needs_stores(test):
    """Marks what runs where clients and servers of object stores are installed; their warnings are not ours."""
    reason = f"not installed: {', '.join(MISSING)} (pip install '.[dev]')"
    for mark in (pytest.mark.long, pytest.mark.skipif(bool(MISSING), reason=reason)):
        test = mark(test)
    ignored = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
    return pytest.mark.filterwarnings(*ignored, "ignore::pytest.PytestUnraisableExceptionWarning")(test)


@dataclass
class Proxy:
    """A proxy before a server.

    Attributes:
        address: http://127.0.0.1:port.
        requests: method and path of every request, in order.
        fault: gives the status that a request is answered with, None to pass it on.
        delay_seconds: how long every request waits.
    """

    address: str
    requests: list[tuple[str, str]] = field(default_factory=list)
    fault: Fault | None = None
    delay_seconds: float = 0.0

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        """Answer by `fault` inside."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = None


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def s3_server() -> Iterator[Proxy]:
    """A server for S3 with one bucket, behind a proxy."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, port), _proxy(port) as proxy:
        urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT"), timeout=30
        ).close()
        yield proxy


@contextmanager
def gs_server() -> Iterator[Proxy]:
    """A server for Google's store with one bucket, behind a proxy."""
    port = free_port()
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host=127.0.0.1", f"--port={port}"]
    with _running([*command, "--in-memory", f"--default-bucket={BUCKET}"], port), _proxy(port) as proxy:
        yield proxy


def environment(s3: str, gs: str) -> dict[str, str]:
    """The variables by which clients and tensorstore find the two servers, and look for nothing in any cloud."""
    return {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3,
        "AWS_EC2_METADATA_DISABLED": "true",
        "STORAGE_EMULATOR_HOST": gs,
        "TENSORSTORE_GCS_HTTP_URL": gs,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
        "NO_GCE_CHECK": "true",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONWARNINGS": "ignore"}
    )
    try:
        end = time.monotonic() + _START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
                break
            except urllib.error.HTTPError:
                break  # it answers
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def _ended_as_meant(content: bytes) -> bytes:
    r"""Return an upload of gcsfs so that the emulator loses nothing of it.

    gcsfs ends the content with \n, and the emulator takes \r\n for one end of a line, so that a content that ends
    in \r, as one of 256 does, would lose it.
    """
    end = b"\n--==0==--"
    return content.removesuffix(end) + b"\r" + end if content.endswith(end) else content


@contextmanager
def _proxy(upstream: int) -> Iterator[Proxy]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            content = _ended_as_meant(self._content())
            proxy.requests.append((self.command, self.path))
            time.sleep(proxy.delay_seconds)
            status = None if proxy.fault is None else proxy.fault(self.command, self.path)
            if status is not None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
            known = _NOT_MATCH.search(self.path)
            if known is not None:
                # The emulator does not know the condition, and its answer names no generation, which tensorstore wants.
                connection.request("GET", self.path.partition("?")[0])
                found = connection.getresponse()
                if f'"generation": "{known[1]}"' in found.read().decode():
                    self.send_response(304)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    connection.close()
                    return
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _DROPPED}
            connection.request(self.command, self.path, body=content, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _DROPPED:
                    # Uploads go on where the server says: through the proxy again.
                    self.send_header(name, value.replace(f"127.0.0.1:{upstream}", f"127.0.0.1:{port}"))
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            connection.close()

        def _content(self) -> bytes:
            if self.headers.get("Expect", "").lower() == "100-continue":
                self.send_response_only(100)
                self.end_headers()
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _answer

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that went away

    server = Server(("127.0.0.1", 0), Handler)
    port = server.server_address[1]
    proxy = Proxy(f"http://127.0.0.1:{port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
