"""`jaxtrain launch`: several processes of one command on this machine, which connect over the loopback interface.

No jax here: only the processes need it.
"""

import contextlib
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO

from jaxtrain.errors import ConfigError, PreemptedError
from jaxtrain.runtime.remarks import print_remark

# Time for the processes to end after one of them failed: each can write its own files, but they can no longer agree on
# anything with each other.
_GRACE_SECONDS = 10.0
# Exit codes of a process that ended in order; the others end soon after it.
_ORDERLY = (0, PreemptedError.exit_code)
# Ctrl-C, a request to end, and a closed terminal. The last two both mean "save and exit".
_PASSED_ON = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
_PR_SET_PDEATHSIG = 1
_JAXTRAIN = (sys.executable, "-m", "jaxtrain")


def run_launch(
    words: Sequence[str],
    *,
    num_processes: int,
    program: Sequence[str] = _JAXTRAIN,
    emulate: int | None = None,
) -> int:
    """Start processes of `jaxtrain`, or of a program, and wait for all of them.

    The first process writes to the terminal. The standard error of the others is printed with the number of the
    process before each line (`[1] `); their standard output is not shown. Each process finds the others by
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Args:
        words: the command and its arguments, the same for every process.
        num_processes: number of processes.
        program: the program that takes the words; empty: the words begin with a program.
        emulate: number of CPU devices that each process emulates, set through its environment; None: the words decide.

    Returns:
        The exit code of the process that failed first (128 + n where signal n ended it); without a failure 75 where
        the processes saved and stopped, else 0.

    Raises:
        ConfigError: a process cannot be started.
    """
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    signalled = threading.Event()

    def pass_on(number: int, frame: FrameType | None) -> None:
        signalled.set()
        for process in processes:
            process.send_signal(_PASSED_ON[signal.Signals(number)])

    shared = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{_free_port()}", "JAX_NUM_PROCESSES": str(num_processes)}
    if emulate is not None:
        shared |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(emulate)}
    # A signal that is ignored (SIGHUP under nohup) stays ignored.
    heard = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, pass_on) for number in heard}
    try:
        # All processes start before the first thread, because code between fork and exec could wait forever for a lock
        # that another thread held.
        for index in range(num_processes):
            processes.append(_start([*program, *words], index, num_processes, shared))
        for index, process in enumerate(processes):
            threading.Thread(target=lambda i=index, p=process: ended.put((i, p.wait())), daemon=True).start()
            if process.stderr is not None:
                readers.append(threading.Thread(target=_show, args=(index, process.stderr), daemon=True))
                readers[-1].start()
        return _wait(processes, ended, signalled)
    finally:
        for process in processes:
            _kill(process)
        for process in processes:
            process.wait()
        for reader in readers:
            # A limit, because a grandchild may keep the pipe open.
            reader.join(timeout=2)
        for number, handler in previous.items():
            signal.signal(number, handler)


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
                _kill(processes[index])
            deadline = None
            continue
        running.remove(index)
        code = status if status >= 0 else 128 - status
        if code in _ORDERLY:
            orderly = orderly or code
        elif not failure:
            failure = code
            if running and not signalled.is_set():
                how = f"ended with exit code {code}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
                print_remark(f"jaxtrain: process {index} of {len(processes)} {how}; stopping the others")
            for other in running:
                processes[other].send_signal(signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_SECONDS
    return failure or orderly


def _start(command: Sequence[str], index: int, num_processes: int, shared: Mapping[str, str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            env={**os.environ, **shared, "JAX_PROCESS_ID": str(index)},
            stdin=subprocess.DEVNULL,
            stdout=None if index == 0 else subprocess.DEVNULL,
            stderr=None if index == 0 else subprocess.PIPE,
            text=True,
            errors="replace",
            # Its own process group, because a terminal sends Ctrl-C to the group of the launcher, which passes it on.
            process_group=0,
            preexec_fn=_die_with_parent(),
        )
    except OSError as error:
        raise ConfigError(f"cannot start process {index} of {num_processes}: {error.strerror}") from None


def _die_with_parent() -> Callable[[], None] | None:
    """Make what a new process calls first, so that it ends when the launcher is killed; None outside Linux."""
    if sys.platform != "linux":
        return None
    library, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and its children; nothing happens where it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _show(index: int, lines: IO[str]) -> None:
    for line in lines:
        if line.strip():
            print_remark(f"[{index}] {line.rstrip()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
