"""`jaxtrain launch`: several processes of one command on this machine, which connect over the loopback interface.

Also what every command needs that starts processes: their start, their end, and the signals passed on to them. No jax
here: only the processes need it.
"""

import argparse
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
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError, PreemptedError
from jaxtrain.run.directory import folder_of
from jaxtrain.run.supervise import resumed_words, supervise
from jaxtrain.runtime.devices import gpu_shares, visible_gpus
from jaxtrain.runtime.terminal import print_remark

JAXTRAIN = (sys.executable, "-m", "jaxtrain")
# Ctrl-C, a request to end, a closed terminal (which means "save and exit" as well), and the warnings that Slurm sends
# before the time of a job is over: every signal at which a run saves.
_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Time for the others to write their own files after one failed: they can no longer agree on anything.
_GRACE_SECONDS = 10.0
# Exit codes of a process that ended in order; the others end soon after it.
_ORDERLY = (0, PreemptedError.exit_code)


class Signals:
    """Passes signals on to its `children` while it is entered; enter it in the main thread.

    `asked` is set once a signal was passed on: the end that follows is no failure.
    """

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[str]] = []
        self.asked = threading.Event()
        self._heard: list[int] = []
        self._passed: dict[subprocess.Popen[str], int] = {}
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # A signal that is ignored (SIGHUP under nohup) stays ignored.
        heard = [number for number in _HEARD if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._pass_on) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def add(self, child: "subprocess.Popen[str]") -> None:
        """Add a process; a signal that came while it was being started is passed on to it here."""
        self.children.append(child)
        self._tell(child)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked.set()
        self._heard.append(number)
        for child in self.children:
            self._tell(child)

    def _tell(self, child: "subprocess.Popen[str]") -> None:
        while (count := self._passed.get(child, 0)) < len(self._heard):
            self._passed[child] = count + 1
            number = self._heard[count]
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)


def start_child(command: Sequence[str], *, environment: Mapping[str, str], shown: bool = True) -> subprocess.Popen[str]:
    """Start a process that ends when this one is killed.

    Args:
        command: program and words.
        environment: variables besides those of this process.
        shown: whether it writes to the terminal; else its standard error is a pipe, and its output is not kept.
    """
    try:
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=None if shown else subprocess.DEVNULL,
            stderr=None if shown else subprocess.PIPE,
            text=True,
            errors="replace",
            # Its own process group, because a terminal sends Ctrl-C to the group of this process, which passes it on.
            process_group=0,
            preexec_fn=_die_with_parent(),
        )
    except OSError as error:
        raise ConfigError(f"cannot start {command[0]}: {error.strerror}") from None


def _die_with_parent() -> Callable[[], None] | None:
    """What a new process calls first, so that it ends when this one is killed; None outside Linux."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        library.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def kill_child(process: subprocess.Popen[str]) -> None:
    """Kill a process and its children; nothing happens where it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def exit_code(status: int) -> int:
    """The exit code as a shell gives it: 128 + n for a process that signal n ended."""
    return status if status >= 0 else 128 - status


def how_ended(code: int) -> str:
    """What an exit code says, as in `was ended by SIGKILL`."""
    with contextlib.suppress(ValueError):
        if code > 128:
            return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


def launch(arguments: argparse.Namespace) -> int:
    """Run a verb or a program in several processes on this machine; its exit code."""
    words = arguments.command
    inner = arguments.inner
    restarts = arguments.restarts
    if restarts and inner is not None and (words[0] != "train" or inner.restarts):
        raise ConfigError("--restarts before '--' is for your own programs, and for train without --restarts")
    started: dict[str, Any] = {"program": (), "emulate": arguments.emulate}
    if inner is not None:
        run_dir = folder_of(load_config(inner.config, overrides=inner.overrides), inner.run_dir) if restarts else None
        started = {"run_dir": run_dir}
    return run_launch(words, num_processes=arguments.processes, restarts=restarts, **started)


def run_launch(
    words: Sequence[str],
    *,
    num_processes: int,
    program: Sequence[str] = JAXTRAIN,
    emulate: int | None = None,
    restarts: int = 0,
    run_dir: Path | None = None,
) -> int:
    """Start processes of `jaxtrain`, or of a program, and wait for all of them.

    The first process writes to the terminal. The standard error of the others is printed with the number of the
    process before each line (`[1] `); their standard output is not shown. Each process finds the others by
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and sees its share of the GPUs of this machine.

    Args:
        words: the command and its arguments, the same for every process.
        num_processes: number of processes.
        program: the program that takes the words; empty: the words begin with a program.
        emulate: number of CPU devices of each process, set through its environment; None: the words decide.
        restarts: how often all are started again where one is lost.
        run_dir: directory of the run, for the restarts; None: a program's, which is not known.

    Returns:
        The exit code of the process that failed first in the last start (128 + n: signal n ended it); without a failure
        75 where the processes saved and stopped, else 0.

    Raises:
        ConfigError: a process cannot be started, or the GPUs of this machine do not divide among them.
    """
    shared = {} if emulate is None else {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(emulate)}
    emulated = emulate is not None or any(word.partition("=")[0] == "--emulate" for word in words)
    gpus = [] if emulated else visible_gpus() or []
    shares = gpu_shares(gpus, num_processes)

    with Signals() as signals:
        if not restarts:
            return _launch_once([*program, *words], signals, shares=shares, shared=shared)

        def start(number: int, has_begun: bool) -> int:
            chosen = resumed_words(words) if has_begun else words
            return _launch_once([*program, *chosen], signals, shares=shares, shared=shared)

        return supervise(start, run_dir, restarts=restarts, asked=signals.asked, how_ended=how_ended)


def _launch_once(
    command: Sequence[str], signals: Signals, *, shares: Sequence[Mapping[str, str]], shared: Mapping[str, str]
) -> int:
    """Start the processes once, one for each entry of `shares`, and wait for all of them."""
    readers: list[threading.Thread] = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    meeting = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(len(shares))}
    processes = signals.children
    processes.clear()
    try:
        # All processes start before the first thread, because code between fork and exec could wait forever for a lock
        # that another thread held.
        for index, share in enumerate(shares):
            environment = {**shared, **meeting, **share, "JAX_PROCESS_ID": str(index)}
            signals.add(start_child(command, environment=environment, shown=index == 0))
        for index, process in enumerate(processes):
            if process.stderr is not None:
                readers.append(threading.Thread(target=_show, args=(index, process.stderr), daemon=True))
                readers[-1].start()
        return _wait(processes, signals.asked)
    finally:
        for process in processes:
            kill_child(process)
            process.wait()
        for reader in readers:
            # A limit, because a grandchild may keep the pipe open.
            reader.join(timeout=2)


def _wait(processes: Sequence[subprocess.Popen[str]], signalled: threading.Event) -> int:
    """Wait until all processes have ended; after a failure, stop the others. Returns the exit code of `run_launch`."""
    running = dict(enumerate(processes))
    ended = queue.SimpleQueue[tuple[int, int]]()
    for number, process in running.items():  # each in a thread: which one ended first decides
        threading.Thread(target=lambda n=number, p=process: ended.put((n, p.wait())), daemon=True).start()
    failure = 0
    orderly = 0
    deadline = None
    while running:
        with contextlib.suppress(queue.Empty):
            index, status = ended.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0))
            del running[index]
            code = exit_code(status)
            if code in _ORDERLY:
                orderly = orderly or code
            elif not failure:
                failure = code
                deadline = time.monotonic() + _GRACE_SECONDS
                if running and not signalled.is_set():
                    which = f"process {index} of {len(processes)}"
                    print_remark(f"jaxtrain: {which} {how_ended(code)}; stopping the others")
                for other in running.values():
                    other.send_signal(signal.SIGTERM)
        if running and deadline is not None and time.monotonic() > deadline:
            print_remark(f"jaxtrain: killing processes that did not end within {_GRACE_SECONDS:g} s: {[*running]}")
            for process in running.values():
                kill_child(process)
            deadline = None
    return failure or orderly


def _show(index: int, lines: IO[str]) -> None:
    for line in lines:
        if line.strip():
            print_remark(f"[{index}] {line.rstrip()}")
