"""Data in an object store: a real S3 protocol server on loopback (moto), through s3fs.

Both are of the extra `dev`; what needs them says so where it is left out.
"""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from format_files import write_rows

from jaxtrain.data import open_data

ROWS = [{"text": f"text {i} of a store"} for i in range(60)]
NEEDED = ("s3fs", "moto", "flask")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="s3fs and moto are not installed: pip install s3fs 'moto[server]'",
    ),
    # Of the clients: unclosed connections, and what is deprecated in what they use.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Start the server, and put two Parquet files into a bucket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path_factory.mktemp("moto") / "log").open("wb")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=log, stderr=log)
    settings = {
        "AWS_ACCESS_KEY_ID": "mine",
        "AWS_SECRET_ACCESS_KEY": "mine",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        _wait(port)
        import s3fs

        # A client of another file of tests, with the address of its server, would be taken for this one.
        s3fs.S3FileSystem.clear_instance_cache()
        system = s3fs.S3FileSystem()
        system.mkdir("bucket")
        folder = tmp_path_factory.mktemp("files")
        local = write_rows(folder, "parquet", ROWS)
        for name in ("a", "b"):
            system.put_file(str(local), f"bucket/rows/{name}.parquet")
        yield system, local
        s3fs.S3FileSystem.clear_instance_cache()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)
        log.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _wait(port):
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("the server did not start")


def opened(path, cache):
    return open_data({"kind": "documents", "path": path, "cache": str(cache)}, sequence_length=8)


@pytest.mark.parametrize(
    ("path", "files"),
    [("s3://bucket/rows/a.parquet", 1), ("s3://bucket/rows/*.parquet", 2)],
    ids=["a file", "a pattern"],
)
def test_files_are_copied_once(store, tmp_path, capsys, path, files):
    data = opened(path, tmp_path)
    assert f"copying {files} of {files} files" in capsys.readouterr().err
    assert opened(path, tmp_path).fingerprint == data.fingerprint
    assert "copying" not in capsys.readouterr().err
    if files == 1:
        assert data.fingerprint == opened(str(store[1]), tmp_path).fingerprint


def test_a_changed_file_is_copied_again(store, tmp_path, capsys):
    system, local = store
    system.put_file(str(local), "bucket/changing/a.parquet")
    first = opened("s3://bucket/changing", tmp_path)
    other = write_rows(tmp_path, "parquet", [*ROWS, {"text": "one more"}])
    system.put_file(str(other), "bucket/changing/a.parquet")
    system.put_file(str(local), "bucket/changing/b.parquet")
    capsys.readouterr()
    second = opened("s3://bucket/changing", tmp_path / "cache" / "..")
    assert "copying 2 of 2 files" in capsys.readouterr().err
    assert first.fingerprint != second.fingerprint
    system.rm_file("bucket/changing/b.parquet")
    assert len(opened("s3://bucket/changing", tmp_path).train) < len(second.train)
