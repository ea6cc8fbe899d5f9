"""Child processes of the launcher and of the supervisor: their start, their end, and the signals passed on to them.

No jax here.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

JAXTRAIN = (sys.executable, "-m", "jaxtrain")
# Ctrl-C, a request to end, a closed terminal (which means "save and exit" as well), and the warnings that Slurm sends
# before the time of a job is over: every signal at which a run saves.
_PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
}
_PR_SET_PDEATHSIG = 1


class Signals:
    """Passes signals on to child processes while it is entered; enter it in the main thread.

    Attributes:
        children: the processes that get them.
        asked: set once a signal was passed on: the end that follows is no failure.
        last: the last signal; None: there was none.
    """

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[str]] = []
        self.asked = threading.Event()
        self.last: signal.Signals | None = None
        self._heard: list[signal.Signals] = []
        self._passed: dict[subprocess.Popen[str], int] = {}
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # A signal that is ignored (SIGHUP under nohup) stays ignored.
        heard = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._pass_on) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def add(self, child: "subprocess.Popen[str]") -> None:
        """Add a process; a signal that came while it was being started is passed on to it here."""
        self.children.append(child)
        self._tell(child)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.last = signal.Signals(number)
        self.asked.set()
        self._heard.append(self.last)
        for child in self.children:
            self._tell(child)

    def _tell(self, child: "subprocess.Popen[str]") -> None:
        while (count := self._passed.get(child, 0)) < len(self._heard):
            self._passed[child] = count + 1
            child.send_signal(_PASSED_ON[self._heard[count]])


def start_child(
    command: Sequence[str], *, environment: Mapping[str, str], what: str = "the process", shown: bool = True
) -> subprocess.Popen[str]:
    """Start a process that ends when this one is killed.

    Args:
        command: program and words.
        environment: variables besides those of this process.
        what: the process, for the message.
        shown: whether it writes to the terminal; else its standard error is a pipe, and its output is not kept.

    Raises:
        OSError: the process cannot be started.
    """
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


def _die_with_parent() -> Callable[[], None] | None:
    """Make what a new process calls first, so that it ends when this one is killed; None outside Linux."""
    if sys.platform != "linux":
        return None
    library, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
