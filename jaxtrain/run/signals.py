"""Signals as one wish to stop: the run saves what it did and ends with exit code 75, in every phase.

Between two steps and between two batches of an evaluation the run asks whether it is to stop. Where nothing would be
lost (before the first step of this process, while it waits for data, after the last save) the signal raises at once;
where the main thread is inside a compilation then, another thread ends the process: it hears signals through the
wake-up descriptor, whatever the main thread does.

With several processes all must stop at the same point. JAX's preemption service agrees on one, and it needs the SIGTERM
handler for itself: a Python handler set after `jax.distributed.initialize` silently disables it. So there SIGTERM is
left alone, every other signal is passed on as SIGTERM, and no process leaves alone.
"""

import contextlib
import errno
import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

from jaxtrain.errors import DataError, PreemptedError
from jaxtrain.runtime.host import drop_in_children, end_at_signal, exit_at_once
from jaxtrain.runtime.terminal import drop_unwritten, in_notebook, print_remark

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# Slurm warns by USR1 or USR2 (--signal), and a terminal that is lost by HUP. A program may use them for something else,
# and nohup ignores HUP: only where they would kill the process are they heard.
_ONLY_WHERE_DEADLY = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_STOPPED_AT_ONCE = 130
# Where nothing would be lost, or the user insists, the main thread gets this long to leave in order.
_LEAVING_SECONDS = 2.0
_TICK_SECONDS = 0.1
# In the pipe of signals, where no signal has the number 0.
_END = b"\0"


class StopNow(BaseException):
    """Raised in the main thread by a signal, where nothing is lost by leaving; no `except Exception` may keep it."""


class StoppedWaiting(DataError):
    """The run is to stop, and no further batch is taken."""


class Interrupt:
    """Watches for signals while it is entered; enter it in the main thread, after `jax.distributed`.

    Outside the main thread no handler can be set, and nothing is heard.
    """

    def __init__(self) -> None:
        self._several = self._wanted = self._raises = False
        self._presses = self._points = 0
        self._previous: dict[int, Any] = {}
        # Closes the run on another thread, in a block that may be left, and the lock of whoever does so.
        self._close: Callable[[], object] | None = None
        self._closing = threading.Lock()
        self._reason = ""
        self._since: float | None = None
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Self:
        import jax

        # Asking for the process count of an undistributed run would start the backend.
        self._several = jax.distributed.is_initialized() and jax.process_count() > 1
        if threading.current_thread() is threading.main_thread():
            self._listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._ends.close()
        if kind is StopNow:  # raised as a block that it may leave was just over
            raise self._left() from None

    def requested(self) -> bool:
        """Whether to stop at this point. With several processes every one must ask, at the same points of the run."""
        if self._several:
            from jax.experimental import multihost_utils

            self._points += 1
            self._wanted = multihost_utils.reached_preemption_sync_point(self._points) or self._wanted
        return self._wanted

    def check(self) -> None:
        """Leave a block of `free_to_leave` if the run is to stop; with several processes every one must call it."""
        if self.requested():
            raise StopNow

    @contextlib.contextmanager
    def free_to_leave(self, close: Callable[[], object] = lambda: None) -> Iterator[None]:
        """A block in which nothing is lost by leaving: a signal raises a PreemptedError at once, also in a compilation.

        `close` closes the files of the run; it is called on another thread where the main thread does not come back.
        """
        try:
            with self._raising(close):
                self.check()
                yield
        except StopNow:
            raise self._left() from None

    def until_asked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, until the run is to stop: StoppedWaiting comes then, also in place of a batch that does not."""
        while True:
            try:
                self.check()
                with self._raising(self._close):
                    if self._wanted:
                        raise StopNow
                    batch = next(batches)
            except StopIteration:
                return
            except StopNow:
                raise StoppedWaiting("the run is to stop") from None
            yield batch

    def seconds_since(self) -> str:
        """`, 0.9 s after SIGTERM`, for the last line; empty where this process did not hear the signal itself."""
        return "" if self._since is None else f", {time.monotonic() - self._since:.1f} s after {self._reason}"

    def _left(self) -> PreemptedError:
        by = f" by {self._reason}" if self._reason else ""
        return PreemptedError(f"stopped{by} with nothing unsaved{self.seconds_since()}: run again to resume")

    @contextlib.contextmanager
    def _raising(self, close: Callable[[], object] | None) -> Iterator[None]:
        before = self._raises, self._close
        try:
            self._raises = True
            self._close = close
            yield
        finally:
            # While the watcher closes the run in place of this thread, this thread waits for the end.
            with self._closing:
                self._raises, self._close = before

    def _listen(self) -> None:
        """Set the handlers, and start the thread that hears signals whatever the main thread does."""
        for number in _HEARD:
            is_jax = self._several and number == signal.SIGTERM
            is_free = number not in _ONLY_WHERE_DEADLY or signal.getsignal(number) in (signal.SIG_DFL, end_at_signal)
            if is_free and not is_jax:
                self._previous[number] = signal.signal(number, self._handle)
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(read,), name="jaxtrain-signals", daemon=True)
        watcher.start()

        def put_back() -> None:
            signal.set_wakeup_fd(before)
            for number, handler in self._previous.items():
                # None stands for a handler that was not set from Python and cannot be set back from it.
                if handler is not None:
                    signal.signal(number, handler)
            self._previous.clear()

        def end() -> None:
            signal.set_wakeup_fd(before)
            # A byte, since a child that C code forked may hold the pipe.
            with contextlib.suppress(OSError):
                os.write(write, _END)
            watcher.join(_LEAVING_SECONDS)
            put_back()
            os.close(write)
            if not watcher.is_alive():
                os.close(read)

        def forget() -> None:
            """In a forked child, whose signals are not those of the run."""
            put_back()
            self._ends.pop_all()
            if self._several:  # jax's own handler would keep a worker from being ended by SIGTERM
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

        self._ends.callback(drop_in_children(forget))
        self._ends.callback(end)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, once it is in Python again."""
        if number == signal.SIGINT:
            self._presses += 1
            if self._presses > 1:
                raise KeyboardInterrupt
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        is_first = not self._wanted
        self._wanted = True
        self._note_reason(number)
        if is_first and self._raises:
            raise StopNow

    def _watch(self, descriptor: int) -> None:
        presses = 0
        is_told = False
        insisted = None
        while True:
            ready, _, _ = select.select([descriptor], [], [], None if self._since is None else _TICK_SECONDS)
            heard = os.read(descriptor, 64) if ready else b""
            for number in heard:
                presses += number == signal.SIGINT
                if number == signal.SIGHUP:
                    _forget_lost_terminal()
                if number in self._previous and not is_told:
                    is_told = True
                    self._say(number)
            if _END in heard:
                return
            insisted = insisted or (time.monotonic() if presses > 1 else None)
            if not (in_notebook() or hasattr(sys, "ps1")):  # where somebody goes on typing, the process is not ours
                self._lose_patience(insisted)

    def _note_reason(self, number: int) -> None:
        if self._since is None:  # the main thread may be quicker than the one that watches
            self._reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self._since = time.monotonic()

    def _say(self, number: int) -> None:
        self._note_reason(number)
        does = "saving" if self._close is None else "nothing is unsaved"
        more = "; press again to stop at once" if number == signal.SIGINT else ""
        # Not print: the main thread may be in the middle of another write to the same buffer.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{self._reason}: {does}, then exit 75{more}\n".encode())

    def _lose_patience(self, insisted: float | None) -> None:
        """End the process where the main thread does not come back to do so."""
        now = time.monotonic()
        if insisted is not None and now - insisted > _LEAVING_SECONDS:
            exit_at_once(_STOPPED_AT_ONCE)
        if insisted is not None or self._several or self._since is None or now - self._since < _LEAVING_SECONDS:
            return
        with self._closing:
            if self._close is not None:
                with contextlib.suppress(Exception):  # nothing is unsaved, and the process ends
                    self._close()
                print_remark(f"jaxtrain: {self._left()}")
                exit_at_once(PreemptedError.exit_code)


def _forget_lost_terminal() -> None:
    """Send what is printed nowhere, where the terminal is gone: writing to it would end the run with an error."""
    for stream in filter(None, (sys.__stdout__, sys.__stderr__)):
        try:
            termios.tcgetattr(stream.fileno())
        except termios.error as error:
            if error.args[0] == errno.EIO:
                drop_unwritten(stream)
