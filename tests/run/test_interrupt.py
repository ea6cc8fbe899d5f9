"""Signals become a wish that the loop reads; the second Ctrl-C stops at once."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxtrain.run.interrupt import Interrupt

TWO_PROCESSES = """
import os, signal, sys, time
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank, port, number = int(sys.argv[1]), sys.argv[2], sys.argv[3]
address = f"127.0.0.1:{port}"
jax.distributed.initialize(address, 2, rank, coordinator_bind_address=address, initialization_timeout=60)
from jaxtrain.run.interrupt import Interrupt
with Interrupt() as interrupt:
    for step in range(200):
        if step == 5 and rank == 1:
            os.kill(os.getpid(), getattr(signal, number))
        time.sleep(0.02)
        if interrupt.requested():
            print("stopped", step, flush=True)
            break
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_wish(number, capfd):
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    with Interrupt() as interrupt:
        assert not interrupt.requested()
        os.kill(os.getpid(), number)
        assert interrupt.requested()
        assert interrupt.requested()
    assert {each: signal.getsignal(each) for each in before} == before
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert "exit 75" in line
    assert ("press again" in line) == (number == signal.SIGINT)


def test_the_second_ctrl_c_stops_at_once():
    with Interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_repeated_sigterm_is_one_wish():
    with Interrupt() as interrupt:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested()


def test_outside_the_main_thread_no_handler_is_set():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def enter():
        with Interrupt() as interrupt:
            found.append((interrupt.requested(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [(False, before)]


@pytest.mark.parametrize("number", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.long)])
def test_two_processes_stop_at_the_same_step(number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    commands = [[sys.executable, "-c", TWO_PROCESSES, str(rank), str(port), number] for rank in range(2)]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    first, second = (output.split() for output, _ in outputs)
    assert first == second
    assert first[0] == "stopped"
