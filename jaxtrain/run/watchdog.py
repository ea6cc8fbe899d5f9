"""Ends a run that stands still, or whose other processes are lost, with one line and every thread's stack.

A thread looks every second at what the main thread does (`activity`) and at what the other processes say
(`jaxtrain.runtime.heartbeats`). It ends the process itself, because a main thread that waits in a collective or in a
file system hears nothing.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from jaxtrain.checkpoint.places import Place, is_written
from jaxtrain.config.schema import WatchdogConfig
from jaxtrain.errors import PreemptedError, UserError
from jaxtrain.run.activity import Activity
from jaxtrain.run.stalls import behind, budget, describe_processes, patience, place, stall_path, write_stacks
from jaxtrain.run.stragglers import Stragglers
from jaxtrain.runtime.exchange import open_exchange
from jaxtrain.runtime.heartbeats import LOST, Exchange, News
from jaxtrain.runtime.notebook import in_notebook
from jaxtrain.runtime.remarks import print_remark

_INTERRUPTED = 130
_TICK_SECONDS = 1.0
# Process 0 hears at most this many processes per second, so that it stays below half a percent of a core.
_PROCESSES_PER_SECOND = 64
_LONGEST_TICK_SECONDS = 4.0
# Whoever waits in the same collective as the process that failed gets an error of the network too, a moment before or
# after the reason is known.
_REASON_SECONDS = 5.0
# A process that failed by itself says its own line first.
_OWN_ERROR_SECONDS = 2.0
# A process that failed has this long to close its files; another one may be missing in what that waits for.
_CLOSE_SECONDS = 60.0
# The end must not wait for a file system that hangs, nor for a terminal that nobody reads.
_END_SECONDS = 10.0
_WRITE_SECONDS = 2.0
_STAT_SECONDS = 5.0


class Watchdog:
    """Watches one process of a run, from a thread of its own.

    Args:
        config: the limits.
        activity: of the main thread.
        exchange: with the other processes.
        run_dir: stacks are written below it.
        process: index of this process.
        num_processes: of the run.
        report: called with one line that names a slow process, on process 0.
        clock: gives seconds.
        exits: ends this process with an exit code.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        activity: Activity,
        exchange: Exchange,
        run_dir: Path,
        *,
        process: int,
        num_processes: int,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        exits: Callable[[int], NoReturn] = os._exit,
    ) -> None:
        self._config, self._activity, self._exchange = config, activity, exchange
        self._run_dir = run_dir.absolute()  # a script may change the working directory
        self._shown_dir = run_dir
        self._process, self._num_processes, self._report = process, num_processes, report
        self._clock, self._exits = clock, exits
        self._host = socket.gethostname()
        self._stragglers = Stragglers(config.slow_fraction)
        tick = min(_LONGEST_TICK_SECONDS, max(_TICK_SECONDS, num_processes / _PROCESSES_PER_SECOND))
        self._tick = min(tick, *(seconds / 4 for seconds in _limits(config)))
        self._not_running: list[tuple[float, float]] = []
        self._left: tuple[float, News] | None = None
        self._farewell: tuple[int, str] | None = None
        self._has_left = threading.Event()
        self._has_told = False
        self._has_said_farewell = False
        self._failed_at: float | None = None
        self._thread = threading.Thread(target=self._watch, name="jaxtrain-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self, code: int, text: str) -> None:
        """Stop watching, and tell the other processes that this one ends by itself.

        Args:
            code: its exit code.
            text: the line of its error; empty for none.
        """
        self._farewell = (code, text)
        self._exchange.wake()
        self._has_left.wait(_END_SECONDS)

    def await_reason(self) -> None:
        """Wait for what made a collective fail; where another process was lost, this one ends here."""
        self._thread.join(_REASON_SECONDS)

    def _watch(self) -> None:
        try:
            while self._farewell is None:
                self._round()
            code, text = self._farewell
            self._say_farewell(code, text)
            self._has_left.set()
            # At its exit jax waits for process 0, which may be lost meanwhile.
            while not code and self._exchange.is_waiting():
                for one in self._listen():
                    if one.kind == "lost":
                        self._hear(one, 0.0)
        except Exception as error:
            print_remark(f"jaxtrain: the watchdog failed ({type(error).__name__}: {error}); the run goes on unwatched")
        finally:
            self._has_left.set()
            self._exchange.close()

    def _round(self) -> None:
        began = self._clock()
        news = self._listen()
        now = self._clock()
        late = now - began - self._tick
        if late > max(2.0, 2 * self._tick):
            # The machine slept, or this process was stopped: nobody stood still for that long.
            self._not_running.append((now, late))
            self._exchange.forgive()
            news = [one for one in news if not (one.kind == "lost" and one.text.startswith("silent"))]
        if self._farewell is not None:
            return
        if self._activity.failure is not None and self._has_failed(self._activity.failure, now):
            return
        for one in news:
            self._hear(one, late)
        if self._left is not None and now - self._left[0] > _OWN_ERROR_SECONDS:
            left = self._left[1]
            self._end(f"{self._named(left.process)} ended with exit code {left.code}: {left.text}", left.code)
        self._check(now)
        self._look_for_stragglers()

    def _has_failed(self, error: BaseException, now: float) -> bool:
        """Tell the others that this process ends by itself, before it closes its files; that has a limit too.

        Returns:
            False while another process may be the reason.
        """
        self._failed_at = self._failed_at or now
        if _may_follow(error) and now - self._failed_at < _REASON_SECONDS:
            return False
        code, text = _farewell(error)
        self._say_farewell(code, text)
        if self._num_processes > 1 and now - self._failed_at > _CLOSE_SECONDS:
            self._end(f"{text} (closing the files of the run took more than {_CLOSE_SECONDS:g} s)", code)
        return True

    def _say_farewell(self, code: int, text: str) -> None:
        if not self._has_said_farewell:
            self._has_said_farewell = True
            self._exchange.leave(code, text)

    def _listen(self) -> list[News]:
        status = self._activity.status()
        return self._exchange.round(status, self._tick, lambda said: patience(self._config, said))

    def _hear(self, one: News, late: float) -> None:
        if one.kind == "end":
            self._end(one.text, LOST)
        if one.kind == "left":
            self._left = self._left or (self._clock(), one)
            return
        if late > self._config.lost_seconds / 2:
            self._end(f"this process was not running for {late:.0f} s, and the others have ended", LOST)
        self._end(
            f"{self._named(one.process)} was lost, last heard of {place(self._status_of(one.process))}: {one.text}",
            LOST,
        )

    def _check(self, now: float) -> None:
        """End where the phase has lasted longer than it may."""
        moment = self._activity.moment
        seconds = now - moment.since - self._not_running_since(moment.since)
        limit, key = budget(self._config, moment, median=self._activity.median_seconds())
        if seconds > limit:
            # Who waits for another one is not to blame; that one has a limit of its own.
            if behind(self._activity.status(), self._exchange.peers()) is None:
                what = f"no progress for {seconds:.0f} s {place(self._activity.status())}"
                self._end_stalled(f"{what} (limit: {key}={limit:g})")
            return
        if self._activity.writing is not None:
            path, began = self._activity.writing
            seconds = now - began - self._not_running_since(began)
            if seconds > self._config.save_seconds:
                if _is_written(path):
                    self._activity.writes(None)
                    return
                self._end_stalled(
                    f"checkpoint {path} is still being written after {seconds:.0f} s, in phase saving "
                    f"(limit: watchdog.save_seconds={self._config.save_seconds:g})"
                )

    def _end_stalled(self, text: str) -> None:
        text = text if self._num_processes == 1 else f"{self._named(self._process)}: {text}"
        if in_notebook():
            # Ending the process would take the user's other work along.
            if not self._has_told:
                self._has_told = True
                path = stall_path(self._run_dir, self._process)
                write_stacks(path, text, [])
                print_remark(f"jaxtrain: {text}; interrupt the cell to stop; stacks: {path}")
            return
        self._end(text, LOST)

    def _end(self, text: str, code: int) -> NoReturn:
        """Say why, write the stacks, tell the others, and end this process."""
        guard = threading.Timer(_END_SECONDS, self._exits, (code,))
        guard.daemon = True
        guard.start()
        own, peers = self._activity.status(), self._exchange.peers()
        path = stall_path(self._run_dir, self._process)
        line = f"jaxtrain: {text}; stacks: {self._shown_dir / path.relative_to(self._run_dir)}\n"
        # The cursor, which a live bar hides; and no buffer of Python's, whose lock the main thread may hold.
        start = "\n\x1b[?25h" if os.isatty(2) else ""
        os.write(2, f"{start}{line}".encode(errors="backslashreplace"))
        table = describe_processes(self._process, self._host, own, peers)
        # Beside this thread: the others must be told although the file system hangs.
        writer = threading.Thread(target=write_stacks, args=(path, text, table), daemon=True)
        writer.start()
        writer.join(_WRITE_SECONDS)
        self._exchange.end(text)
        writer.join(_WRITE_SECONDS)
        guard.cancel()
        self._exits(code)

    def _named(self, process: int) -> str:
        return f"process {process} of {self._num_processes} (host {self._host_of(process)})"

    def _host_of(self, process: int) -> str:
        if process == self._process:
            return self._host
        return next((peer.host for peer in self._exchange.peers() if peer.process == process), "unknown")

    def _status_of(self, process: int) -> dict[str, object]:
        return next((dict(peer.status) for peer in self._exchange.peers() if peer.process == process), {})

    def _not_running_since(self, moment: float) -> float:
        return sum(min(late, end - moment) for end, late in self._not_running if end > moment)

    def _look_for_stragglers(self) -> None:
        if self._process != 0 or self._num_processes == 1:
            return
        statuses = {peer.process: peer.status for peer in self._exchange.peers()}
        if len(statuses) < self._num_processes - 1 or any("totals" not in status for status in statuses.values()):
            return
        statuses[0] = self._activity.status()
        sums = {process: tuple(status["totals"]) for process, status in statuses.items()}
        for process, delay in self._stragglers.note(sums).items():
            self._report(
                f"{self._named(process)} is slow: the others wait {delay.extra_seconds:.2g} s of each step of "
                f"{delay.step_seconds:.2g} s for its data or its host"
            )


def _limits(config: WatchdogConfig) -> Iterator[float]:
    yield from (config.start_seconds, config.compile_seconds, config.restore_seconds, config.step_seconds)
    yield from (config.data_seconds, config.evaluation_seconds, config.save_seconds, config.lost_seconds)


def _is_written(step: Place) -> bool:
    """Whether the write of a step is done; False where its file system or store does not answer."""
    found: list[bool] = []

    def ask() -> None:
        with suppress(OSError):
            found.append(is_written(step))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_STAT_SECONDS)
    return found == [True]


@contextmanager
def watched(config: WatchdogConfig | None, run_dir: Path, report: Callable[[str], None]) -> Iterator[Activity]:
    """Watch a run until the block is left; every process of the run enters it, after `jax.distributed`.

    Args:
        config: the limits; None: nothing is watched.
        run_dir: directory of the run.
        report: called with one line that names a slow process.

    Yields:
        What the run is to tell of its phases and steps.
    """
    import jax

    activity = Activity()
    exchange = open_exchange(wanted=config is not None, report=print_remark)
    if config is None:
        exchange.close()
        yield activity
        return
    is_alone = not jax.distributed.is_initialized()
    watchdog = Watchdog(
        config,
        activity,
        exchange,
        run_dir,
        process=0 if is_alone else jax.process_index(),
        num_processes=1 if is_alone else jax.process_count(),
        report=report,
    )
    watchdog.start()
    try:
        yield activity
    except BaseException as error:
        if _may_follow(error) and not is_alone:
            watchdog.await_reason()
        watchdog.stop(*_farewell(error))
        raise
    watchdog.stop(0, "")


def _may_follow(error: BaseException) -> bool:
    """Whether an error may be the consequence of another process being lost: a collective failed."""
    import jax

    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)


def _farewell(error: BaseException) -> tuple[int, str]:
    """Exit code and line with which a process that failed takes leave of the others."""
    line = " ".join(str(error).split())[:500]
    if isinstance(error, PreemptedError):
        return 0, ""
    if isinstance(error, UserError):
        return error.exit_code, line
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED, "Ctrl-C"
    return 1, f"{type(error).__name__}: {line}"
