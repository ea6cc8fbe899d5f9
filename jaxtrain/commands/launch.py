"""`jaxtrain launch`: several processes of one command on this machine, which connect over the loopback interface.

No jax here: only the processes need it.
"""

import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from jaxtrain.commands.children import JAXTRAIN, Signals, exit_code, how_ended, kill_child, start_child
from jaxtrain.errors import ConfigError, PreemptedError
from jaxtrain.run.supervise import Policy, keeps_old_run, resumed_words, supervise
from jaxtrain.runtime.devices import gpu_shares, visible_gpus
from jaxtrain.runtime.host import ATTEMPT
from jaxtrain.runtime.terminal import print_remark

# Time for the processes to end after one of them failed: each can write its own files, but they can no longer agree on
# anything with each other.
_GRACE_SECONDS = 10.0
# Exit codes of a process that ended in order; the others end soon after it.
_ORDERLY = (0, PreemptedError.exit_code)


def run_launch(
    words: Sequence[str],
    *,
    num_processes: int,
    program: Sequence[str] = JAXTRAIN,
    emulate: int | None = None,
) -> int:
    """Start processes of `jaxtrain`, or of a program, and wait for all of them.

    The first process writes to the terminal. The standard error of the others is printed with the number of the
    process before each line (`[1] `); their standard output is not shown. Each process finds the others by
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and sees its share of the GPUs of this machine.

    Args:
        words: the command and its arguments, the same for every process.
        num_processes: number of processes.
        program: the program that takes the words; empty: the words begin with a program.
        emulate: number of CPU devices that each process emulates, set through its environment; None: the words decide.

    Returns:
        The exit code of the process that failed first (128 + n where signal n ended it); without a failure 75 where
        the processes saved and stopped, else 0.

    Raises:
        ConfigError: a process cannot be started, or the GPUs of this machine do not divide among them.
    """
    shares = gpu_shares(_gpus(words, emulate), num_processes)
    with Signals() as signals:
        return _launch_once([*program, *words], signals, shares=shares, shared=_emulated(emulate))


def run_restarted_launch(
    words: Sequence[str],
    *,
    num_processes: int,
    restarts: int,
    min_processes: int,
    run_dir: Path | None,
    program: Sequence[str] = JAXTRAIN,
    emulate: int | None = None,
) -> int:
    """Start processes as `run_launch` does; where one is lost, stop all and start all again.

    Args:
        words, num_processes, program, emulate: see `run_launch`.
        restarts: the largest number of restarts.
        min_processes: where the run fails twice in a row at one step, go on with a process less, but not fewer than
            this.
        run_dir: directory of the run; None: a program's, which is not known.

    Returns:
        The exit code of the last start.

    Raises:
        ConfigError: a process cannot be started, or the GPUs of this machine do not divide among them.
    """
    count, gpus = num_processes, _gpus(words, emulate)
    gpu_shares(gpus, num_processes)

    def with_less() -> str | None:
        nonlocal count
        if count == min_processes:
            return None
        count -= 1
        return f"with {count} {'process' if count == 1 else 'processes'} instead of {count + 1}"

    with Signals() as signals:
        holds_old_run = keeps_old_run(run_dir)

        def start(number: int) -> int:
            chosen = resumed_words(words) if number and run_dir is not None and not holds_old_run() else words
            shared = {**_emulated(emulate), ATTEMPT: str(number)}
            # With a process less, some GPUs may be left over.
            shares = gpu_shares(gpus, count, must_divide=False)
            return _launch_once([*program, *chosen], signals, shares=shares, shared=shared)

        policy = Policy(restarts, run_dir, signals.asked, how_ended, with_less)
        return supervise(start, policy)


def _emulated(emulate: int | None) -> dict[str, str]:
    return {} if emulate is None else {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(emulate)}


def _gpus(words: Sequence[str], emulate: int | None) -> list[str]:
    """The GPUs that the processes share; none where they emulate devices."""
    if emulate is not None or any(word.partition("=")[0] == "--emulate" for word in words):
        return []
    return visible_gpus() or []


def _launch_once(
    command: Sequence[str], signals: Signals, *, shares: Sequence[Mapping[str, str]], shared: Mapping[str, str]
) -> int:
    """Start the processes once, and wait for all of them.

    Args:
        command: program and words.
        signals: passes signals on to them.
        shares: environment of each process, one entry per process.
        shared: environment of all.

    Returns:
        The exit code of `run_launch`.
    """
    num_processes = len(shares)
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    readers: list[threading.Thread] = []
    meeting = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{_free_port()}", "JAX_NUM_PROCESSES": str(num_processes)}
    processes = signals.children
    processes.clear()
    try:
        # All processes start before the first thread, because code between fork and exec could wait forever for a lock
        # that another thread held.
        for index in range(num_processes):
            environment = {**shared, **meeting, **shares[index], "JAX_PROCESS_ID": str(index)}
            try:
                signals.add(start_child(command, environment=environment, shown=index == 0))
            except OSError as error:
                raise ConfigError(f"cannot start process {index} of {num_processes}: {error.strerror}") from None
        for index, process in enumerate(processes):
            threading.Thread(target=lambda i=index, p=process: ended.put((i, p.wait())), daemon=True).start()
            if process.stderr is not None:
                readers.append(threading.Thread(target=_show, args=(index, process.stderr), daemon=True))
                readers[-1].start()
        return _wait(processes, ended, signals.asked)
    finally:
        for process in processes:
            kill_child(process)
        for process in processes:
            process.wait()
        for reader in readers:
            # A limit, because a grandchild may keep the pipe open.
            reader.join(timeout=2)


def _wait(
    processes: Sequence[subprocess.Popen[str]],
    ended: "queue.SimpleQueue[tuple[int, int]]",
    signalled: threading.Event,
) -> int:
    """Wait until all processes have ended; after a failure, stop the others.

    Args:
        processes: the processes, all running.
        ended: gets (index, return code) of each process as it ends.
        signalled: set where a signal was passed on, after which no failure is reported.

    Returns:
        The exit code of `run_launch`.
    """
    running = set(range(len(processes)))
    failure, orderly, deadline = 0, 0, None
    while running:
        try:
            index, status = ended.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0))
        except queue.Empty:
            print_remark(f"jaxtrain: killing processes that did not end within {_GRACE_SECONDS:g} s: {sorted(running)}")
            for index in running:
                kill_child(processes[index])
            deadline = None
            continue
        running.remove(index)
        code = exit_code(status)
        if code in _ORDERLY:
            orderly = orderly or code
        elif not failure:
            failure = code
            if running and not signalled.is_set():
                print_remark(f"jaxtrain: process {index} of {len(processes)} {how_ended(code)}; stopping the others")
            for other in running:
                processes[other].send_signal(signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_SECONDS
    return failure or orderly


def _show(index: int, lines: IO[str]) -> None:
    for line in lines:
        if line.strip():
            print_remark(f"[{index}] {line.rstrip()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
