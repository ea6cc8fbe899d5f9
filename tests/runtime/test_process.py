"""What a process that trains sets, keeps from its children, and leaves: signals, umask, memory, exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.runtime.host import SETTINGS

# As data code does that keeps workers: they live until the process ends them as it exits.
WITH_WORKERS = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
import jaxtrain.run.signals, jaxtrain.run.directory
from jaxtrain.runtime.host import end_at_signals
folder = Path(sys.argv[1])
end_at_signals()
fork = multiprocessing.get_context("fork")
with jaxtrain.run.directory.lock_run(folder), jaxtrain.run.signals.handle_signals() as interrupt:
    workers = [fork.Process(target=time.sleep, args=(60,), daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    time.sleep(0.1)
    os.kill(workers[0].pid, signal.SIGTERM)
    time.sleep(0.2)
    print(interrupt.requested(), flush=True)
    os.killpg(0, signal.SIGINT)
    time.sleep(0.2)
    print(interrupt.requested(), flush=True)
with jaxtrain.run.directory.lock_run(folder):  # the workers, which live, do not hold it
    print("left", flush=True)
"""


@pytest.mark.long
def test_forked_workers_neither_keep_nor_stop_the_run(tmp_path):
    """One of them is ended, then Ctrl-C reaches the whole group, as from a terminal: so a session of its own."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITH_WORKERS, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert (found.returncode, found.stdout.split()) == (0, ["False", "True", "left"]), found.stderr
    assert ("exit 75" in found.stderr, "SIGTERM" in found.stderr) == (True, False)


BUSY = """
import atexit, threading
from jaxtrain import cli


def run(words):
    import jax
    import numpy as np

    def work():
        while True:
            jax.block_until_ready(jax.device_put(np.ones((1000, 1000))))

    atexit.register(print, "late")
    jax.device_put(1)
    threading.Thread(target=work, daemon=True).start()
    return 75


cli._run = run
cli.run_program()
"""


def test_the_code_of_the_command_is_that_of_the_process():
    """Though a thread is inside of jax as the interpreter ends."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (75, "late\n", "")


def test_a_restarted_process_is_the_same_and_its_words_too():
    """A program that prints its process number before and after, restarting in between."""
    program = (
        "import json, os, sys; from jaxtrain.runtime.host import restart, SETTINGS; "
        "print(json.dumps([os.getpid(), sys.argv[1:], all(name in os.environ for name in SETTINGS)]), flush=True); "
        "restart(accelerator=False)"
    )
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS and "MALLOC" not in name}
    command = [sys.executable, "-W", "error", "-c", program, "two words", "key=value"]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60, check=True)
    before, after = (json.loads(line) for line in done.stdout.splitlines())
    assert before[:2] == after[:2]
    assert before[1] == ["two words", "key=value"]
    assert (before[2], after[2]) == (False, True)
