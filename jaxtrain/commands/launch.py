"""`jaxtrain launch`: several processes of one command on this machine, which connect over the loopback interface.

No jax here: only the processes need it.
"""

import argparse
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from jaxtrain.commands.parsing import find_command, parse
from jaxtrain.commands.processes import JAXTRAIN, Child, Signals, exit_code, how_ended, kill_child, start_child
from jaxtrain.commands.table import COMMANDS
from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError, PreemptedError
from jaxtrain.run.directory import folder_of
from jaxtrain.run.supervise import resumed_words, supervise
from jaxtrain.runtime.devices import gpu_shares, visible_gpus
from jaxtrain.runtime.terminal import print_remark

# Several processes of these would do the work several times, or stop each other.
_ALONE = ("sweep", "serve", "report", "plan", "launch", "data", "ckpt", "submit")
# Time for the others to write their own files after one failed: they can no longer agree on anything.
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
# Exit codes of a process that ended in order; the others end soon after it.
_ORDERLY = (0, PreemptedError.exit_code)


def run(arguments: argparse.Namespace) -> int:
    """Run a command or a program in several processes on this machine; return its exit code."""
    words = arguments.command
    restarts = arguments.restarts
    command, inner = read_command(words)
    run_dir = None
    if restarts and inner is not None:
        if words[0] != "train" or inner.restarts:
            raise ConfigError("--restarts before '--' is for your own programs, and for train without --restarts")
        run_dir = folder_of(load_config(inner.config, overrides=inner.overrides), inner.run_dir)
    emulate = arguments.emulate or getattr(inner, "emulate", None)
    if emulate is None:
        environments = gpu_shares(visible_gpus() or [], arguments.processes)
    else:
        environments = [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(emulate)}] * arguments.processes
    return run_restarted(command, environments, run_dir=run_dir, restarts=restarts)


def run_restarted(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], *, run_dir: Path | None, restarts: int
) -> int:
    """Run processes as `run_processes` does, and start all of them again if one is lost.

    Args:
        command: program and words, the same for every process.
        environments: variables of each process, besides those of this one.
        run_dir: directory of the run; None: not known, since the processes are of a program.
        restarts: the largest number of restarts.

    Returns:
        The exit code of the last start.
    """
    with Signals() as signals:
        if not restarts:
            return run_processes(command, environments, signals)

        def start(has_begun: bool) -> int:
            words = resumed_words(command) if has_begun else command
            return run_processes(words, environments, signals)

        return supervise(start, run_dir, restarts=restarts, asked=signals.asked, how_ended=how_ended)


def read_command(words: list[str]) -> tuple[list[str], argparse.Namespace | None]:
    """Read the command that the processes run.

    A mistake in a command of jaxtrain is reported here, once, before anything starts.

    Args:
        words: a command of jaxtrain, or a program, and its arguments.

    Returns:
        The program and its words, and the arguments of a command of jaxtrain.

    Raises:
        ConfigError: there is no such command or program, the command runs in one process, or its config is wrong.
    """
    if not words:
        example = COMMANDS["launch"].example
        raise ConfigError(f"jaxtrain launch: the command to run is missing after '--', as in 'jaxtrain {example}'")
    first = words[0]
    if first not in {name.partition(" ")[0] for name in COMMANDS}:
        # The python of an environment that is not activated is not on the path.
        program = sys.executable if first in ("python", "python3") else shutil.which(first)
        if program is not None:
            return [program, *words[1:]], None
        if os.path.isfile(first):
            raise ConfigError(f"jaxtrain launch: {first!r} is not a program; write: python {first}")
    name, rest = find_command(words)
    if first in _ALONE:
        example = COMMANDS[name].example
        raise ConfigError(
            f"jaxtrain launch: {name!r} works in one process; run it without launch, as in: jaxtrain {example}"
        )
    inner = parse(name, [word for word in rest if word != "--debug"])
    if getattr(inner, "config", None) is not None:
        load_config(inner.config, overrides=inner.overrides)
    return [*JAXTRAIN, *words], inner


def run_processes(command: Sequence[str], environments: Sequence[Mapping[str, str]], signals: Signals) -> int:
    """Start a process of a command for each environment, and wait for all of them.

    The first process writes to the terminal. The standard error of the others is printed with the number of the
    process before each line (`[1] `); their standard output is not shown. Each process finds the others by
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; a single process needs no cluster.

    Args:
        command: program and words, the same for every process.
        environments: variables of each process, besides those of this one.
        signals: what passes signals on to the processes.

    Returns:
        The exit code of the process that failed first (128 + n: signal n ended it); without a failure 75 where the
        processes saved and stopped, else 0.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    readers: list[threading.Thread] = []
    processes = signals.children
    processes.clear()
    try:
        # All processes start before the first thread, because code between fork and exec could wait forever for a lock
        # that another thread held.
        for index, environment in enumerate(environments):
            if len(environments) > 1:
                environment = {
                    **environment,
                    "JAX_COORDINATOR_ADDRESS": address,
                    "JAX_NUM_PROCESSES": str(len(environments)),
                    "JAX_PROCESS_ID": str(index),
                }
            signals.add(start_child(command, environment=environment, quiet=index > 0))
        for index, process in enumerate(processes):
            if process.stderr is not None:
                reader = threading.Thread(target=_print_lines, args=(index, process.stderr), daemon=True)
                reader.start()
                readers.append(reader)
        return _wait(processes, signals.asked)
    finally:
        for process in processes:
            kill_child(process)
            process.wait()
        for reader in readers:
            # A limit, because a grandchild may keep the pipe open.
            reader.join(timeout=2)


def _wait(processes: Sequence[Child], signalled: threading.Event) -> int:
    """Wait until all processes have ended; after a failure, stop the others. Return the code of `run_processes`."""
    running = dict(enumerate(processes))
    failure = 0
    orderly = 0
    deadline = None
    while running:
        time.sleep(_POLL_SECONDS)
        for index, process in list(running.items()):
            status = process.poll()
            if status is None:
                continue
            del running[index]
            code = exit_code(status)
            if code in _ORDERLY:
                orderly = orderly or code
            elif not failure:
                failure = code
                deadline = time.monotonic() + _GRACE_SECONDS
                if running and not signalled.is_set():
                    print_remark(
                        f"jaxtrain: process {index} of {len(processes)} {how_ended(code)}; stopping the others"
                    )
                for other in running.values():
                    other.send_signal(signal.SIGTERM)
        if running and deadline is not None and time.monotonic() > deadline:
            print_remark(f"jaxtrain: killing processes that did not end within {_GRACE_SECONDS:g} s: {[*running]}")
            for process in running.values():
                kill_child(process)
            deadline = None
    return failure or orderly


def _print_lines(index: int, lines: IO[str]) -> None:
    for line in lines:
        if line.strip():
            print_remark(f"[{index}] {line.rstrip()}")
