"""What the tests of this folder import, and processes of one run."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture
def start_ranks():
    """Starts a Python program as each process of one run: words for each; into pipes of text, or a log for each."""
    processes: list[subprocess.Popen[str]] = []

    def start(commands: Sequence[Sequence[object]], *, logs: Sequence[Path] = (), cwd: Path | None = None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        for rank, words in enumerate(commands):
            environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}", "JAX_PLATFORMS": "cpu"}
            if len(commands) > 1:
                count = str(len(commands))
                environment |= dict(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES=count, JAX_PROCESS_ID=str(rank))
            command = [sys.executable, *map(str, words)]
            with contextlib.ExitStack() as opened:
                out = opened.enter_context(logs[rank].open("wb")) if logs else subprocess.PIPE
                err = subprocess.STDOUT if logs else subprocess.PIPE
                processes.append(subprocess.Popen(command, env=environment, cwd=cwd, stdout=out, stderr=err, text=True))
        return processes

    yield start
    for process in processes:
        process.kill()
        process.wait()
