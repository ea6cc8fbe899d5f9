"""Turns signals into a request to stop: the run saves its state and ends with exit code 75, in every phase.

The run asks between two steps and between two batches of an evaluation. While it waits for data, and where nothing is
unsaved, a signal raises at once. Where the main thread does not return from C code there, as in a compilation, another
thread ends the process: it reads the signals from the wake-up descriptor.

Several processes must stop at the same point. JAX's preemption service agrees on it, and needs the handler of SIGTERM:
a Python handler that is set after `jax.distributed.initialize` silently disables the service. So SIGTERM is left alone
in such a run, and every other signal is passed on as SIGTERM.
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
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

from jaxtrain.errors import DataError, PreemptedError
from jaxtrain.runtime.host import drop_in_children, end_at_signal, exit_at_once
from jaxtrain.runtime.terminal import drop_unwritten, in_notebook, print_remark

# Slurm warns by USR1 or USR2 (--signal), and a lost terminal sends HUP. A program may use them for something else, and
# nohup ignores HUP, so they are handled only where they would end the process.
_HANDLED_IF_DEADLY = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_INTERRUPTED = 130
# The main thread has this long after a signal to end the run itself.
_MAIN_THREAD_SECONDS = 2.0
_TICK_SECONDS = 0.5
_NOTHING_UNSAVED = "stopped with nothing unsaved: run again to resume"
# Written to the pipe of signals to end its reader; no signal has the number 0.
_END = b"\0"


class StopNow(BaseException):
    """Raised in the main thread by a signal; not an Exception, so that code which catches those does not keep it."""


class StoppedWaiting(DataError):
    """The run is to stop, so that no further batch is read."""


@contextlib.contextmanager
def handle_signals() -> Iterator["Interrupt"]:
    """Handle signals in a block; enter it after `jax.distributed`.

    Outside the main thread no handler can be set, and no signal is handled.
    """
    import jax

    # Asking for the process count of an undistributed run would start the backend.
    interrupt = Interrupt(has_peers=jax.distributed.is_initialized() and jax.process_count() > 1)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    try:
        with interrupt.listen():
            yield interrupt
    except StopNow:  # raised between the call of `free_to_leave` and its block
        raise PreemptedError(_NOTHING_UNSAVED) from None


class Interrupt:
    """The request to stop, which signals make."""

    def __init__(self, *, has_peers: bool) -> None:
        self._has_peers = has_peers  # other processes of the same run
        self._is_requested = False
        self._raises = False
        self._may_end_process = False
        self._num_points = 0
        self._reason = ""
        self._since: float | None = None

    def requested(self) -> bool:
        """Return whether to stop at this point; every process of the run asks at the same points."""
        if self._has_peers:
            from jax.experimental import multihost_utils

            self._num_points += 1
            if multihost_utils.reached_preemption_sync_point(self._num_points):
                self._is_requested = True
        return self._is_requested

    @contextlib.contextmanager
    def free_to_leave(self) -> Iterator[None]:
        """A block in which nothing is unsaved: a signal raises a PreemptedError, or ends the process in C code.

        With several processes only a signal before the block does so, because they leave together.
        """
        try:
            with self._raising(may_end_process=True):
                yield
        except StopNow:
            raise PreemptedError(_NOTHING_UNSAVED) from None

    def until_asked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; raise StoppedWaiting once the run is to stop, also while a batch is waited for."""
        while True:
            try:
                with self._raising():
                    batch = next(batches)
            except StopIteration:
                return
            except StopNow:
                raise StoppedWaiting("the run is to stop") from None
            yield batch

    def seconds_since(self) -> str:
        """Return `, 0.9 s after SIGTERM` for the last line, or "" where this process did not receive the signal."""
        if self._since is None:
            return ""
        return f", {time.monotonic() - self._since:.1f} s after {self._reason}"

    @contextlib.contextmanager
    def _raising(self, *, may_end_process: bool = False) -> Iterator[None]:
        """A block that the first signal leaves by StopNow, as does a request to stop before it."""
        try:
            self._raises = True
            self._may_end_process = may_end_process and not self._has_peers
            if self.requested():
                raise StopNow
            yield
        finally:
            self._raises = False
            self._may_end_process = False

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Set the handlers, and start the thread that reads the signals whatever the main thread does."""
        numbers = [signal.SIGINT]
        if not self._has_peers:
            numbers.append(signal.SIGTERM)
        numbers += [each for each in _HANDLED_IF_DEADLY if signal.getsignal(each) in (signal.SIG_DFL, end_at_signal)]
        handlers = {number: signal.signal(number, self._handle) for number in numbers}
        read, write = os.pipe()
        os.set_blocking(write, False)
        wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(read, numbers), name="jaxtrain-signals", daemon=True)
        watcher.start()

        def restore() -> None:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)

        def restore_in_child() -> None:
            restore()
            # jax's handler, too, would keep a worker from being ended by it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

        keep_in_children = drop_in_children(restore_in_child)
        try:
            yield
        finally:
            keep_in_children()
            restore()
            # Closing the pipe would not do: forked children hold copies of it.
            os.write(write, _END)
            watcher.join(_MAIN_THREAD_SECONDS)
            os.close(write)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread, once that runs Python code again."""
        if number == signal.SIGINT:  # the second one raises KeyboardInterrupt
            signal.signal(number, signal.default_int_handler)
        if self._has_peers:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._is_requested = True
        if self._raises:
            self._raises = False  # a further signal must not interrupt the cleanup
            raise StopNow

    def _watch(self, pipe: int, handled: Collection[int]) -> None:
        """Report the first signal, and end the process where the main thread does not do so in time."""
        is_interactive = in_notebook() or hasattr(sys, "ps1")
        num_interrupts = 0
        latest: float | None = None
        while True:
            ready, _, _ = select.select([pipe], [], [], _TICK_SECONDS)
            received = os.read(pipe, 64) if ready else b""
            for number in received:
                if number not in handled:
                    continue
                if number == signal.SIGHUP:
                    _drop_lost_terminal()
                if latest is None:
                    self._report(number)
                num_interrupts += number == signal.SIGINT
                latest = time.monotonic()
            if _END in received:
                os.close(pipe)
                return
            if is_interactive or latest is None or time.monotonic() - latest < _MAIN_THREAD_SECONDS:
                continue
            if num_interrupts > 1:
                exit_at_once(_INTERRUPTED)
            if self._may_end_process:
                print_remark(f"jaxtrain: {_NOTHING_UNSAVED}")
                exit_at_once(PreemptedError.exit_code)

    def _report(self, number: int) -> None:
        self._since = time.monotonic()
        self._reason = signal.Signals(number).name
        text = f"\n{self._reason}: saving what is unsaved, then exit 75; a second Ctrl-C stops at once\n"
        # Not print, because the main thread may be writing to the same buffer.
        with contextlib.suppress(OSError):
            os.write(2, text.encode())


def _drop_lost_terminal() -> None:
    """Send what is printed nowhere if the terminal is gone: writing to it would end the run with an error."""
    for stream in filter(None, (sys.__stdout__, sys.__stderr__)):
        try:
            termios.tcgetattr(stream.fileno())
        except termios.error as error:
            if error.args[0] == errno.EIO:
                drop_unwritten(stream)
