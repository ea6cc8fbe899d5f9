"""One process per run directory, and nothing to clean up after a killed one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.run.directory import LOCK_NAME, RunLock, wait_for_holder

HOLD = """
import sys, time
from pathlib import Path
from jaxtrain.run.directory import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused(tmp_path, holder):
    phrase = rf"run is in use by process {holder.pid} on \S+ since \S+ \S+; use another --run-dir or stop it$"
    with pytest.raises(ConfigError, match=phrase), RunLock(tmp_path / "run"):
        pass
    with pytest.raises(ConfigError, match=phrase), RunLock(tmp_path / "run"):
        pass  # the refused attempt did not disturb the holder's note


def test_a_killed_holder_leaves_the_directory_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert str(holder.pid) in (tmp_path / "run" / LOCK_NAME).read_text()
    with RunLock(tmp_path / "run"):
        assert f'"pid": {os.getpid()}' in (tmp_path / "run" / LOCK_NAME).read_text()


def test_it_can_be_taken_again(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path / "runs" / "a"), pytest.raises(ConfigError, match=f"process {os.getpid()}"):
            RunLock(tmp_path / "runs" / "a").__enter__()
    assert (tmp_path / "runs" / "a").stat().st_mode & 0o777 == 0o750


def test_a_holder_without_a_note_and_a_file_in_the_way(tmp_path):
    with RunLock(tmp_path):
        (tmp_path / LOCK_NAME).write_text("")
        with pytest.raises(ConfigError, match="in use by another process"):
            RunLock(tmp_path).__enter__()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"is a file; use another --run-dir$"):
        RunLock(tmp_path / "file" / "run").__enter__()


@pytest.mark.long
def test_a_scheduled_process_waits_for_the_one_before(tmp_path, holder, monkeypatch, capsys):
    """Every pod has a process 1, and the pod that takes the place of another one has its host name."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    note = {"pid": os.getpid(), "host": socket.gethostname(), "since": "2026-01-01 00:00:00"}
    (tmp_path / "run" / LOCK_NAME).write_text(json.dumps(note))
    threading.Timer(0.1, holder.kill).start()
    wait_for_holder(tmp_path / "run")
    assert holder.wait() == -signal.SIGKILL
    (line,) = capsys.readouterr().err.splitlines()
    assert f"run is in use by process {os.getpid()} on " in line
    assert re.search(r": waiting up to (300|299) s for its end$", line)


@pytest.mark.long
def test_the_wait_ends(tmp_path, holder, monkeypatch, capsys):
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "JAXTRAIN_JOIN_TIMEOUT_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    wait_for_holder(tmp_path / "run")  # not where it was started by hand, nor at a terminal
    monkeypatch.setenv("JAXTRAIN_JOIN_TIMEOUT_SECONDS", "1")
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr.isatty", lambda: True)
        wait_for_holder(tmp_path / "run")
    assert "waiting" not in capsys.readouterr().err
    wait_for_holder(tmp_path / "run")
    assert capsys.readouterr().err.count("waiting up to 1 s for its end") == 1
    with pytest.raises(ConfigError, match="in use by process"):
        RunLock(tmp_path / "run").__enter__()
