"""What a forked worker must not have of the run: its signals, its lock, its connections."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrain.run.interrupt import Interrupt
from jaxtrain.run.lock import RunLock
from jaxtrain.runtime.early_signals import end_at_signals
from jaxtrain.runtime.forks import drop_in_children
from jaxtrain.runtime.heartbeats import Connection

# jax and Python 3.12 warn of forks of a process with threads, which is what users do all the same.
pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

# As data code does that keeps workers: they live until the process ends them as it exits.
WITH_WORKERS = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
import jaxtrain.run.interrupt, jaxtrain.run.lock
from jaxtrain.runtime.early_signals import end_at_signals
what = sys.argv[2]
end_at_signals()
with jaxtrain.run.lock.RunLock(Path(sys.argv[1])), jaxtrain.run.interrupt.Interrupt() as interrupt:
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=time.sleep, args=(60,), daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    time.sleep(0.2)
    if what == "group":
        os.killpg(0, signal.SIGINT)
    if what == "worker":
        os.kill(workers[0].pid, signal.SIGTERM)
    time.sleep(0.3)
    print(interrupt.requested(), flush=True)
print("left", flush=True)
"""


@pytest.fixture
def forked():
    """Forks a child that waits, and gives what starts it."""
    children = []

    def start() -> int:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        children.append(child)
        time.sleep(0.1)
        return child

    yield start
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(("what", "is_asked"), [("nothing", False), ("worker", False), ("group", True)])
def test_forked_workers_neither_keeps_nor_stops_the_run(tmp_path, what, is_asked):
    # A session of its own, because one row signals the whole group, as a terminal does at Ctrl-C.
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITH_WORKERS, str(tmp_path), what],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert (found.returncode, found.stdout.split()) == (0, [str(is_asked), "left"]), found.stderr
    assert ("exit 75" in found.stderr, "SIGTERM" in found.stderr) == (is_asked, False)


def test_a_child_has_the_handlers_from_before_the_run(tmp_path):
    read, write = os.pipe()
    before = signal.getsignal(signal.SIGINT)
    usual = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        end_at_signals()
        with Interrupt():
            child = os.fork()
            if child == 0:
                found = [signal.getsignal(number) for number in (signal.SIGINT, *usual)]
                is_usual = found == [before, signal.SIG_DFL, signal.SIG_DFL] and signal.set_wakeup_fd(-1) == -1
                os.write(write, b"yes" if is_usual else repr(found).encode())
                os._exit(0)
            os.waitpid(child, 0)
            assert os.read(read, 1000) == b"yes"
            os.kill(os.getpid(), signal.SIGUSR1)  # the run hears as before
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def test_a_child_does_not_hold_the_run_directory(tmp_path, forked):
    with RunLock(tmp_path):
        forked()
    with RunLock(tmp_path):
        pass


def test_a_child_does_not_keep_a_connection_open(forked):
    here, there = socket.socketpair()
    connection = Connection(here)
    forked()
    connection.close()
    there.settimeout(5)
    assert there.recv(1) == b""
    there.close()


def test_what_is_taken_back_is_not_dropped_and_the_last_comes_first(tmp_path):
    said: list[str] = []
    path = tmp_path / "said"
    first = drop_in_children(lambda: said.append("first"))
    taken = drop_in_children(lambda: said.append("taken back"))
    second = drop_in_children(lambda: said.append("second"))
    taken()
    taken()
    child = os.fork()
    if child == 0:
        path.write_text(" ".join(said))
        os._exit(0)
    os.waitpid(child, 0)
    first()
    second()
    assert path.read_text() == "second first"
    assert not said
