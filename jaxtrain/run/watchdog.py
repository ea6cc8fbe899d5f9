"""Ends a run that stands still, or whose other processes are lost, with one line and every thread's stack.

A thread looks every second at what the main thread does (`Activity`) and at what the other processes say
(`jaxtrain.runtime.heartbeats`). It ends the process itself, because a main thread that waits in a collective or in a
file system hears nothing.
"""

import faulthandler
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from jaxtrain.config.schema import WatchdogConfig
from jaxtrain.errors import PreemptedError, UserError
from jaxtrain.runtime.heartbeats import LOST, Exchange, News, Peer, open_exchange
from jaxtrain.runtime.terminal import in_notebook, print_remark

# The steps whose median stands for a usual one; a step, or the wait for its batch, may take a multiple of that.
_KEPT_STEPS = 101
_TIMES_MEDIAN = 10
WAITING_FOR_DATA = "waiting for data"
IN_STEP = "step"
_INTERRUPTED = 130
_TICK_SECONDS = 1.0
# Whoever waits in the same collective as the process that failed gets an error of the network too, a moment before or
# after the reason is known; and a process that failed by itself says its own line first.
_REASON_SECONDS = 5.0
_OWN_ERROR_SECONDS = 2.0
# The end must not wait for a file system that hangs, nor for a terminal that nobody reads.
_END_SECONDS = 10.0
_WRITE_SECONDS = 2.0
# While a process starts, one call into C code can keep its other threads from running for a minute.
_STARTING = ("start", "reading data")
_PATIENCE_AT_START = 2
# Phase -> key of its limit; of all others: other_seconds.
_LIMITS = {
    "compiling": "compile_seconds",
    IN_STEP: "step_seconds",
    WAITING_FOR_DATA: "data_seconds",
    "saving": "save_seconds",
}


@dataclass(frozen=True)
class Doing:
    """What a process does: its phase, step (0 before the first), last step done, and `time.monotonic()` since when."""

    phase: str
    step: int
    done: int
    since: float


class Activity:
    """Follows what the main thread does; the watchdog's thread reads `doing`, without a lock, as whole records."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.doing = Doing("start", 0, 0, clock())
        self._seconds: deque[float] = deque(maxlen=_KEPT_STEPS)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Mark a block as a phase; afterwards the phase before it begins anew."""
        before = self.doing.phase
        self._now(phase=phase)
        try:
            yield
        finally:
            self._now(phase=before)

    def fed(self, batches: Iterator[Any], *, first: int) -> Iterator[Any]:
        """The batches of the steps from `first` on; taking one marks the wait for data and then the step."""
        self._now(phase=WAITING_FOR_DATA, step=first)
        for number, batch in enumerate(batches, first):
            self._now(phase=IN_STEP, step=number)
            yield batch
            self._now(phase=WAITING_FOR_DATA, step=number + 1)

    def ticking(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of an evaluation; taking one counts as progress."""
        for batch in batches:
            self._now()
            yield batch

    def finished(self, step: int, seconds: float) -> None:
        """Take note that a step is done, and of its wall time."""
        self._seconds.append(seconds)
        self._now(step=max(step, self.doing.step), done=step)

    def begins_at(self, step: int) -> None:
        """Take note of the steps that were done before this process."""
        self._now(step=step, done=step)

    def median_seconds(self) -> float | None:
        """The median of the latest steps of this process; None before one is done."""
        seconds = list(self._seconds)  # a copy: the other thread may add to it
        return statistics.median(seconds) if seconds else None

    def status(self) -> dict[str, Any]:
        """What the other processes are told, as JSON values."""
        doing = self.doing
        seconds = round(self._clock() - doing.since, 3)
        return {"phase": doing.phase, "step": doing.step, "done": doing.done, "seconds": seconds}

    def _now(self, **changes: Any) -> None:
        self.doing = replace(self.doing, since=self._clock(), **changes)


def budget(config: WatchdogConfig, doing: Doing, *, median: float | None) -> tuple[float, str]:
    """Seconds that a phase may take without progress, and the key that sets them; `median`: of a usual step."""
    key = _LIMITS.get(doing.phase, "other_seconds")
    limit: float = getattr(config, key)
    if doing.phase in (IN_STEP, WAITING_FOR_DATA) and median is not None:
        limit = max(limit, _TIMES_MEDIAN * median)
    elif doing.phase == IN_STEP:
        # The first step may load libraries, or choose among kernels.
        limit = max(limit, config.compile_seconds)
        key = "compile_seconds"
    return limit, f"watchdog.{key}"


def patience(config: WatchdogConfig, status: Mapping[str, Any]) -> float:
    """Seconds of silence after which the process with this status counts as lost."""
    return config.lost_seconds * (_PATIENCE_AT_START if status.get("phase", "start") in _STARTING else 1)


def is_behind(own: Mapping[str, Any], peers: Sequence[Peer]) -> bool:
    """Whether this process waits in its step for another one, which is not there yet."""
    known = [(peer.status["step"], peer.status["phase"]) for peer in peers if "step" in peer.status]
    behind = (step < own["step"] or (step == own["step"] and phase != IN_STEP) for step, phase in known)
    return own["phase"] == IN_STEP and any(behind)


class Watchdog:
    """Watches one process of a run, from a thread of its own; stacks are written below the directory of the run."""

    def __init__(self, config: WatchdogConfig, activity: Activity, exchange: Exchange, run_dir: Path) -> None:
        self._config = config
        self._activity = activity
        self._exchange = exchange
        self._run_dir = run_dir.absolute()
        self._shown_dir = run_dir  # a script may change the working directory
        limits = [value for key, value in config.model_dump().items() if key.endswith("_seconds")]
        self._tick = min(_TICK_SECONDS, min(limits) / 4)
        self._woke = 0.0
        self._left: tuple[float, News] | None = None
        self._farewell: tuple[int, str] | None = None
        self._thread = threading.Thread(target=self._watch, name="jaxtrain-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self, code: int, text: str) -> None:
        """Stop watching, and tell the others that this process ends, with its exit code and the line of its error."""
        self._farewell = (code, text)
        self._exchange.wake()
        self._thread.join(_END_SECONDS)

    def await_reason(self) -> None:
        """Wait for what made a collective fail; where another process was lost, this one ends here."""
        self._thread.join(_REASON_SECONDS)

    def _watch(self) -> None:
        try:
            while self._farewell is None:
                self._round()
            self._exchange.leave(*self._farewell)
        except Exception as error:
            print_remark(f"jaxtrain: the watchdog failed ({type(error).__name__}: {error}); the run continues")
        finally:
            self._exchange.close()

    def _round(self) -> None:
        began = time.monotonic()
        news = self._exchange.round(self._activity.status(), self._tick, lambda said: patience(self._config, said))
        now = time.monotonic()
        if now - began - self._tick > max(2.0, 2 * self._tick):
            # The machine slept, or this process was stopped: nobody stood still for that long.
            self._woke = now
            self._exchange.forgive()
            news = [one for one in news if not (one.kind == "lost" and one.text.startswith("silent"))]
        if self._farewell is not None:
            return
        for one in news:
            self._hear(one)
        if self._left is not None and now - self._left[0] > _OWN_ERROR_SECONDS:
            left = self._left[1]
            self._end(f"{self._named(left.process)} ended with exit code {left.code}: {left.text}", left.code)
        # Another process that is to blame has a limit of its own.
        doing = self._activity.doing
        status = self._activity.status()
        seconds = now - max(doing.since, self._woke)
        limit, key = budget(self._config, doing, median=self._activity.median_seconds())
        if seconds > limit and not is_behind(status, self._exchange.peers()):
            who = f"{self._named(self._exchange.process)}: " if self._exchange.num_processes > 1 else ""
            self._end(f"{who}no progress for {seconds:.0f} s {_place(status)} (limit: {key}={limit:g})", LOST)

    def _hear(self, one: News) -> None:
        if one.kind == "end":
            self._end(one.text, LOST)
        if one.kind == "left":
            self._left = self._left or (time.monotonic(), one)
            return
        status = next((peer.status for peer in self._exchange.peers() if peer.process == one.process), {})
        self._end(f"{self._named(one.process)} was lost, last heard of {_place(status)}: {one.text}", LOST)

    def _end(self, text: str, code: int) -> NoReturn:
        """Say why, write the stacks, tell the others, and end this process."""
        guard = threading.Timer(_END_SECONDS, os._exit, (code,))
        guard.daemon = True
        guard.start()
        # Beside this thread: the others must be told although the file system hangs.
        path = self._run_dir / "stalls" / f"{time.strftime('%Y%m%d-%H%M%S')}-{self._exchange.process}.txt"
        writer = threading.Thread(target=self._write_stacks, args=(path, text), daemon=True)
        shown = self._shown_dir / path.relative_to(self._run_dir)
        # The cursor, which a live bar hides; and no buffer of Python's, whose lock the main thread may hold.
        start = "\n\x1b[?25h" if os.isatty(2) else ""
        os.write(2, f"{start}jaxtrain: {text}; stacks: {shown}\n".encode(errors="backslashreplace"))
        writer.start()
        writer.join(_WRITE_SECONDS)
        self._exchange.end(text)
        writer.join(_WRITE_SECONDS)
        guard.cancel()
        os._exit(code)

    def _write_stacks(self, path: Path, text: str) -> None:
        """Write the reason, what each process was doing, and the stack of every thread of this one."""
        own = Peer(self._exchange.process, socket.gethostname(), self._activity.status(), time.monotonic())
        lines = [text, "", "processes:"]
        for peer in sorted([own, *self._exchange.peers()], key=lambda peer: peer.process):
            done = peer.status.get("done")
            seconds = peer.status.get("seconds", 0)
            what = f"{_place(peer.status)} for {seconds} s; last step done: {done}"
            heard = f"heard {time.monotonic() - peer.heard:.0f} s ago"
            lines.append(f"  process {peer.process} (host {peer.host}): {what}; {heard}")
        lines += ["", "threads of this process:"]
        lines += [f"  0x{thread.ident:016x} {thread.name}" for thread in threading.enumerate() if thread.ident]
        with suppress(OSError):  # the process ends anyway, and its line is out
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                file.write("\n".join([*lines, "", "their stacks:", ""]))
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)

    def _named(self, process: int) -> str:
        hosts = {peer.process: peer.host for peer in self._exchange.peers()}
        host = socket.gethostname() if process == self._exchange.process else hosts.get(process, "unknown")
        return f"process {process} of {self._exchange.num_processes} (host {host})"


def _place(status: Mapping[str, Any]) -> str:
    return f"at step {status.get('step', 0)} in phase {status['phase']}" if "phase" in status else "at its start"


@contextmanager
def watched(config: WatchdogConfig | None, run_dir: Path) -> Iterator[Activity]:
    """Watch a run, which tells its phases and steps; every process enters this, after `jax.distributed`.

    Nothing is watched where `config` is None, nor in a notebook: to end the kernel would take other work along.
    """
    activity = Activity()
    exchange = open_exchange(wanted=config is not None)
    if config is None or in_notebook():
        exchange.close()
        yield activity
        return
    watchdog = Watchdog(config, activity, exchange, run_dir)
    watchdog.start()
    try:
        yield activity
    except BaseException as error:
        if exchange.num_processes > 1 and _is_collective(error):
            watchdog.await_reason()
        watchdog.stop(*_farewell(error))
        raise
    watchdog.stop(0, "")


def _is_collective(error: BaseException) -> bool:
    """Whether an error may be the consequence of another process being lost."""
    import jax

    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)


def _farewell(error: BaseException) -> tuple[int, str]:
    """Exit code and line with which a process that failed takes leave of the others."""
    line = " ".join(str(error).split())[:500]
    if isinstance(error, UserError):
        return (0, "") if isinstance(error, PreemptedError) else (error.exit_code, line)
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED, "Ctrl-C"
    return 1, f"{type(error).__name__}: {line}"
