"""One process per run directory, and nothing to clean up after a killed one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.run.directory import LOCK_NAME, lock_run

HOLD = """
import sys, time
from pathlib import Path
from jaxtrain.run.directory import lock_run
with lock_run(Path(sys.argv[1])):
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
    with pytest.raises(ConfigError, match=phrase), lock_run(tmp_path / "run"):
        pass
    with pytest.raises(ConfigError, match=phrase), lock_run(tmp_path / "run"):
        pass  # the refused attempt did not disturb the holder's note


def test_a_killed_holder_leaves_the_directory_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert str(holder.pid) in (tmp_path / "run" / LOCK_NAME).read_text()
    with lock_run(tmp_path / "run"):
        assert f"process {os.getpid()} on" in (tmp_path / "run" / LOCK_NAME).read_text()


def test_a_holder_without_a_note_and_a_file_in_the_way(tmp_path):
    with lock_run(tmp_path):
        (tmp_path / LOCK_NAME).write_text("")
        with pytest.raises(ConfigError, match="in use by another process"):
            lock_run(tmp_path).__enter__()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be used: File exists; use another --run-dir$"):
        lock_run(tmp_path / "file").__enter__()
