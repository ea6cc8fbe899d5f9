"""Signals and notices as one wish to stop: the run saves what it did and ends with exit code 75, in every phase.

Between two steps and between two batches of an evaluation the run asks whether it is to stop. Where nothing would be
lost (before the first step of this process, while it waits for data, after the last save) the signal raises at once.
Where the main thread is inside a compilation, or in a function of the user, and does not come back for some seconds,
another thread saves in its place and ends the process: it hears signals through the wake-up descriptor, whatever the
main thread does.

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
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from jaxtrain.config.schema import NoticesConfig
from jaxtrain.errors import DataError, PreemptedError
from jaxtrain.runtime.cluster import watch_metadata
from jaxtrain.runtime.host import drop_in_children, end_at_signal
from jaxtrain.runtime.terminal import in_notebook, print_remark

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# Slurm warns by USR1 or USR2 (--signal), and a terminal that is lost by HUP. A program may use them for something else,
# and nohup ignores HUP: only where they would kill the process are they heard.
_ONLY_WHERE_DEADLY = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_STOPPED_AT_ONCE = 130
# Where nothing would be lost, or the user insists, the main thread gets this long to leave in order.
_LEAVING_SECONDS = 2.0
_HEARING_SECONDS = 0.3
_TICK_SECONDS = 0.1
# In the pipe of signals, where no signal has the number 0.
_END = b"\0"


class StopNow(BaseException):
    """Raised in the main thread by a signal, where nothing is lost by leaving; no `except Exception` may keep it."""


class StoppedWaiting(DataError):
    """The run is to stop, and no further batch is taken."""


@dataclass(frozen=True)
class _Place:
    """Where the main thread is, as far as stopping goes."""

    raises: bool  # a signal raises `StopNow` there
    save: Callable[[], str] | None  # saves and closes the run, on any thread; None: only the main thread can
    patience: float  # seconds to come back in, before `save` is called
    says: str  # what is done at a signal
    since: float


class Interrupt:
    """Watches for signals and notices while it is entered; enter it in the main thread, after `jax.distributed`.

    Outside the main thread no handler can be set, and a single process is stopped by the metadata server alone.

    Args:
        settings: group `notices` of the config; None: signals alone.
    """

    def __init__(self, settings: NoticesConfig | None = None) -> None:
        self._settings = settings or NoticesConfig(metadata=False)
        self._several = self._wanted = False
        self._presses = self._points = 0
        self._previous: dict[int, Any] = {}
        self._place: _Place | None = None
        self._saving = threading.Lock()
        self._notice = self._reason = ""
        self._since: float | None = None
        self._insisted: float | None = None
        self._is_told = False
        self._ends = contextlib.ExitStack()
        self._threads = threading.enumerate()

    def __enter__(self) -> Self:
        import jax

        # Asking for the process count of an undistributed run would start the backend.
        self._several = jax.distributed.is_initialized() and jax.process_count() > 1
        if threading.current_thread() is threading.main_thread():
            self._listen()
        self._ends.callback(watch_metadata(self._settings.metadata, self._announce))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._ends.close()
        if self._wanted and not (in_notebook() or hasattr(sys, "ps1")):
            left = [thread for thread in threading.enumerate() if thread not in self._threads]
            ends = threading.Thread(target=self._end_if_stuck, args=(left,), name="jaxtrain-end", daemon=True)
            # As the interpreter begins to end, before it waits for threads; only there does it have a hook.
            threading._register_atexit(ends.start)  # pyright: ignore[reportAttributeAccessIssue]
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
        """A block in which nothing is lost by leaving: a signal raises at once, also out of a compilation.

        Args:
            close: closes the files of the run; called on another thread where the main thread does not come back.

        Raises:
            PreemptedError: the run is to stop.
        """

        def leave() -> str:
            close()
            return str(self._left())

        try:
            with self._at(raises=True, save=leave, patience=_LEAVING_SECONDS, says="nothing is unsaved"):
                self.check()
                yield
        except StopNow:
            raise self._left() from None

    def holding(self, save: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        """A block in which the state is whole and no step is under way: the block asks `requested` where it can stop.

        Args:
            save: saves the state, closes the run and returns the line that says so; called on another thread where the
                block goes on for `notices.patience_seconds` after a signal.
        """
        return self._at(raises=False, save=save, patience=self._settings.patience_seconds, says="saving")

    def until_asked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, until the run is to stop; a signal also ends the wait for one that does not come.

        Raises:
            StoppedWaiting: instead of a batch.
        """
        while True:
            try:
                self.check()
                with self._at(raises=True, save=None, patience=0.0, says="saving"):
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
        return PreemptedError(f"stopped{by} where nothing was unsaved{self.seconds_since()}: run again to go on")

    @contextlib.contextmanager
    def _at(self, *, raises: bool, save: Callable[[], str] | None, patience: float, says: str) -> Iterator[None]:
        before = self._place
        try:
            self._place = _Place(raises, save, patience, says, time.monotonic())
            yield
        finally:
            # While the watcher saves in place of this thread, this thread must not go on: it waits for the end.
            with self._saving:
                self._place = before

    def _listen(self) -> None:
        """Set the handlers, and start the thread that hears signals whatever the main thread does."""
        for number in _HEARD:
            handler = signal.getsignal(number)
            is_jax = self._several and number == signal.SIGTERM
            if not is_jax and (number not in _ONLY_WHERE_DEADLY or handler in (signal.SIG_DFL, end_at_signal)):
                self._previous[number] = signal.signal(number, self._handle)
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(read, before), name="jaxtrain-signals", daemon=True)
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
            os.close(write)
            watcher.join(_LEAVING_SECONDS)
            if not watcher.is_alive():
                os.close(read)
            put_back()

        def forget() -> None:
            """In a forked child, whose signals are not those of the run."""
            put_back()
            self._ends.pop_all()
            if self._several:  # jax's own handler would keep a worker from being ended by SIGTERM
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

        self._ends.callback(drop_in_children(forget))
        self._ends.callback(end)

    def _end_if_stuck(self, left: list[threading.Thread]) -> None:
        """End a program that was asked to stop, whose interpreter waits for threads whose data does not come."""
        time.sleep(_LEAVING_SECONDS)
        if any(thread.is_alive() for thread in left):
            _end(_STOPPED_AT_ONCE if self._presses > 1 else PreemptedError.exit_code)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, once it is in Python again."""
        if number == signal.SIGINT:
            self._presses += 1
            if self._presses > 1:
                raise KeyboardInterrupt
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        is_first, self._wanted = not self._wanted, True
        if self._since is None:  # this thread may be quicker than the one that watches
            self._reason, self._since = self._notice or _name(number), time.monotonic()
        if is_first and self._place is not None and self._place.raises:
            raise StopNow

    def _announce(self, text: str) -> None:
        """Take a notice for a signal; called on another thread."""
        self._notice = text
        if self._several or self._previous:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._wanted = True
        if signal.SIGTERM not in self._previous:
            self._note(text)

    def _watch(self, descriptor: int, previous: int) -> None:
        presses = 0
        while True:
            is_quiet = self._since is None and presses == 0
            ready, _, _ = select.select([descriptor], [], [], None if is_quiet else _TICK_SECONDS)
            heard = os.read(descriptor, 64) if ready else b""
            if heard and previous != -1:
                with contextlib.suppress(OSError):
                    os.write(previous, heard)
            for number in heard:
                presses += number == signal.SIGINT
                if number in self._previous:
                    if number == signal.SIGHUP:
                        _forget_lost_terminal()
                    if not self._is_told:
                        is_notice = number == signal.SIGTERM and self._notice
                        self._note(self._notice if is_notice else _name(number), more=number == signal.SIGINT)
            if _END in heard:
                return
            if presses > 1 and self._insisted is None:
                self._insisted = time.monotonic()
            if not (in_notebook() or hasattr(sys, "ps1")):  # where somebody goes on typing, the process is not ours
                self._lose_patience()

    def _note(self, reason: str, *, more: bool = False) -> None:
        self._is_told = True
        if self._since is None:
            self._reason, self._since = reason, time.monotonic()
        does = "finishing the step, saving" if self._place is None else self._place.says
        ending = "; press again to stop at once" if more else ""
        # Not print: the main thread may be in the middle of another write to the same buffer.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{reason}: {does}, then exit 75{ending}\n".encode())

    def _lose_patience(self) -> None:
        """Do what the main thread would have to do, where it does not come back."""
        clock = time.monotonic()
        if self._insisted is not None:
            # Where the main thread heard it, it is closing the run; elsewhere it is stuck and hears nothing.
            if clock - self._insisted > (_LEAVING_SECONDS if self._presses > 1 else _HEARING_SECONDS):
                _end(_STOPPED_AT_ONCE)
            return
        place = self._place
        if self._several or self._since is None or place is None or place.save is None:
            return
        if clock - max(self._since, place.since) < place.patience:
            return
        with self._saving:
            if self._place is not place:
                return
            try:
                line = place.save()
            except Exception as error:
                first = next(iter(str(error).splitlines()), type(error).__name__)
                print_remark(f"jaxtrain: could not save beside the main thread, which is waited for: {first}")
                self._since = None  # the main thread saves when it comes back, or fails itself
                return
            print_remark(f"jaxtrain: {line}")
            _end(PreemptedError.exit_code)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _end(code: int) -> None:
    """End this process at once: the main thread cannot be left in order."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _forget_lost_terminal() -> None:
    """Send what is printed nowhere, where the terminal is gone: writing to it would end the run with an error."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
        except OSError:
            continue
