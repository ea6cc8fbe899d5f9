"""Processes that commands start: their start, their end, and the signals passed on to them. No jax here."""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO, Any, Self

JAXTRAIN = (sys.executable, "-m", "jaxtrain")
# Ctrl-C, a request to end, a closed terminal (which means "save and exit" as well), and the warnings that Slurm sends
# before the time of a job is over: every signal at which a run saves.
_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Child = subprocess.Popen[str]


class Signals:
    """Passes signals on to its `children` while it is entered; enter it in the main thread.

    `asked` is set once a signal was passed on: the end that follows is no failure.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.asked = threading.Event()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _HEARD:
            # A signal that is ignored (SIGHUP under nohup) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def add(self, child: Child) -> None:
        """Add a process; one that was being started while a signal came is ended as the others are."""
        if self.asked.is_set():
            child.terminate()
        self.children.append(child)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked.set()
        if number == signal.SIGHUP:
            number = signal.SIGTERM
        for child in self.children:
            child.send_signal(number)


def start_child(
    command: Sequence[str], *, environment: Mapping[str, str], stderr: int | IO[str] | None = None
) -> Child:
    """Start a process that ends when this one is killed.

    Args:
        command: program and words.
        environment: variables besides those of this process.
        stderr: file or pipe of its standard error, and then its output is not kept; None: both are of this process.
    """
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=stderr and subprocess.DEVNULL,
        stderr=stderr,
        text=True,
        errors="replace",
        # Its own process group, because a terminal sends Ctrl-C to the group of this process, which passes it on.
        process_group=0,
        preexec_fn=_die_with_parent(),
    )


def _die_with_parent() -> Callable[[], object] | None:
    """Return what a new process calls first, so that it ends when this one is killed; None outside Linux."""
    if sys.platform != "linux":
        return None
    return functools.partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def kill_child(process: Child) -> None:
    """Kill a process and its children; nothing happens if it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def exit_code(status: int) -> int:
    """Return the exit code as a shell gives it: 128 + n for a process that signal n ended."""
    return status if status >= 0 else 128 - status


def how_ended(code: int) -> str:
    """Return an exit code in words, as in `was ended by SIGKILL`."""
    with contextlib.suppress(ValueError):
        if code > 128:
            return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"
