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

from jaxtrain.checkpoint.places import Place, is_written
from jaxtrain.config.schema import WatchdogConfig
from jaxtrain.errors import PreemptedError, UserError
from jaxtrain.runtime.heartbeats import LOST, Exchange, News, Peer, open_exchange
from jaxtrain.runtime.terminal import in_notebook, print_remark

# The steps whose median stands for a usual one.
_KEPT_STEPS = 101
WAITING_FOR_DATA, IN_STEP = "waiting for data", "step"
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
# A step, or the wait for its batch, may take this many times the median.
_TIMES_MEDIAN = 10
# While a process starts, one call into C code can keep its other threads from running for a minute.
_PATIENCE_AT_START = 2
_LIMITS = {
    "start": "start_seconds",
    "reading data": "start_seconds",
    "compiling": "compile_seconds",
    "creating state": "restore_seconds",
    IN_STEP: "step_seconds",
    WAITING_FOR_DATA: "data_seconds",
    "saving": "save_seconds",
}


@dataclass(frozen=True)
class Moment:
    """What a process is doing.

    Attributes:
        phase: such as `compiling`, `step` or `saving`.
        step: the step that it works on, counted from 1; 0 before the first one.
        done: the last step that is known to be done.
        since: `time.monotonic()` when the phase began, or last made progress.
    """

    phase: str
    step: int
    done: int
    since: float


class Activity:
    """Follows what the main thread does; the watchdog's thread reads it, without a lock, as whole frozen records.

    Args:
        clock: gives seconds that never go back.

    Attributes:
        moment: what the process is doing.
        writing: the checkpoint that is written in the background and when that began; None: there is none.
        failure: the error that this process ends with, while it closes its files; None: there is none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.moment = Moment("start", 0, 0, clock())
        self.writing: tuple[Place, float] | None = None
        self.failure: BaseException | None = None
        self._seconds: deque[float] = deque(maxlen=_KEPT_STEPS)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Mark a block as a phase; afterwards the phase before it begins anew."""
        before = self.moment.phase
        self._now(phase=phase)
        try:
            yield
        finally:
            self._now(phase=before)

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Note the error of a block before anything is closed: closing may wait for the other processes."""
        try:
            yield
        except PreemptedError:
            raise
        except BaseException as error:
            self.failure = error
            raise

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
        self._now(step=max(step, self.moment.step), done=step)

    def begins_at(self, step: int) -> None:
        """Take note of the steps that were done before this process."""
        self._now(step=step, done=step)

    def writes(self, path: Place | None) -> None:
        """Take note of a checkpoint that is being written in the background; None: nothing is."""
        self.writing = None if path is None else (path, self._clock())

    def median_seconds(self) -> float | None:
        """The median of the latest steps of this process; None before one is done."""
        seconds = list(self._seconds)  # a copy: the other thread may add to it
        return statistics.median(seconds) if seconds else None

    def status(self) -> dict[str, Any]:
        """What the other processes are told, as JSON values."""
        moment = self.moment
        seconds = round(self._clock() - moment.since, 3)
        return {"phase": moment.phase, "step": moment.step, "done": moment.done, "seconds": seconds}

    def _now(self, **changes: Any) -> None:
        self.moment = replace(self.moment, since=self._clock(), **changes)


def budget(config: WatchdogConfig, moment: Moment, *, median: float | None) -> tuple[float, str]:
    """Seconds that a phase may take without progress, and the key that sets them.

    Args:
        config: the limits.
        moment: what the process is doing.
        median: seconds of a usual step; None before the first step of this process is done.
    """
    key = _LIMITS.get(moment.phase, "evaluation_seconds")
    limit: float = getattr(config, key)
    if moment.phase in (IN_STEP, WAITING_FOR_DATA) and median is not None:
        limit = max(limit, _TIMES_MEDIAN * median)
    elif moment.phase == IN_STEP:
        # The first step may load libraries, or choose among kernels.
        limit, key = max(limit, config.compile_seconds), "compile_seconds"
    return limit, f"watchdog.{key}"


def patience(config: WatchdogConfig, status: Mapping[str, Any]) -> float:
    """Seconds of silence after which the process with this status counts as lost."""
    is_starting = _LIMITS.get(status.get("phase", "start")) == "start_seconds"
    return config.lost_seconds * (_PATIENCE_AT_START if is_starting else 1)


def is_behind(own: Mapping[str, Any], peers: Sequence[Peer]) -> bool:
    """Whether this process waits in its step for another one, which is not there yet."""
    if own["phase"] != IN_STEP:
        return False
    known = [(peer.status["step"], peer.status["phase"]) for peer in peers if "step" in peer.status]
    return any(step < own["step"] or (step == own["step"] and phase != IN_STEP) for step, phase in known)


class Watchdog:
    """Watches one process of a run, from a thread of its own.

    Args:
        config: the limits.
        activity: of the main thread.
        exchange: with the other processes.
        run_dir: stacks are written below it.
        process: index of this process.
        num_processes: of the run.
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
    ) -> None:
        self._config, self._activity, self._exchange = config, activity, exchange
        self._run_dir, self._shown_dir = run_dir.absolute(), run_dir  # a script may change the working directory
        self._process, self._num_processes = process, num_processes
        limits = [value for key, value in config.model_dump().items() if key.endswith("_seconds")]
        tick = min(_LONGEST_TICK_SECONDS, max(_TICK_SECONDS, num_processes / _PROCESSES_PER_SECOND))
        self._tick = min(tick, min(limits) / 4)
        self._woke = 0.0
        self._left: tuple[float, News] | None = None
        self._farewell: tuple[int, str] | None = None
        self._has_told = self._has_said_farewell = False
        self._failed_at: float | None = None
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
            self._say_farewell(*self._farewell)
        except Exception as error:
            print_remark(f"jaxtrain: the watchdog failed ({type(error).__name__}: {error}); the run goes on unwatched")
        finally:
            self._exchange.close()

    def _round(self) -> None:
        began = time.monotonic()
        news = self._listen()
        now = time.monotonic()
        late = now - began - self._tick
        if late > max(2.0, 2 * self._tick):
            # The machine slept, or this process was stopped: nobody stood still for that long.
            self._woke = now
            self._exchange.forgive()
            news = [one for one in news if not (one.kind == "lost" and one.text.startswith("silent"))]
        if self._farewell is not None:
            return
        if self._activity.failure is not None and self._has_failed(self._activity.failure, now):
            return
        for one in news:
            self._hear(one)
        if self._left is not None and now - self._left[0] > _OWN_ERROR_SECONDS:
            left = self._left[1]
            self._end(f"{self._named(left.process)} ended with exit code {left.code}: {left.text}", left.code)
        self._check(now)

    def _has_failed(self, error: BaseException, now: float) -> bool:
        """Tell the others that this process ends by itself, unless another one may be the reason."""
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
        return self._exchange.round(self._activity.status(), self._tick, lambda said: patience(self._config, said))

    def _hear(self, one: News) -> None:
        if one.kind == "end":
            self._end(one.text, LOST)
        if one.kind == "left":
            self._left = self._left or (time.monotonic(), one)
            return
        status = next((peer.status for peer in self._exchange.peers() if peer.process == one.process), {})
        self._end(f"{self._named(one.process)} was lost, last heard of {_place(status)}: {one.text}", LOST)

    def _check(self, now: float) -> None:
        """End where the phase, or a save in the background, has lasted longer than it may."""
        moment, status = self._activity.moment, self._activity.status()
        seconds = self._running_since(moment.since, now)
        limit, key = budget(self._config, moment, median=self._activity.median_seconds())
        if seconds > limit:
            # Who waits for another one is not to blame; that one has a limit of its own.
            if not is_behind(status, self._exchange.peers()):
                self._end_stalled(f"no progress for {seconds:.0f} s {_place(status)} (limit: {key}={limit:g})")
        elif self._activity.writing is not None:
            path, began = self._activity.writing
            seconds, limit = self._running_since(began, now), self._config.save_seconds
            if seconds > limit and _is_written(path):
                self._activity.writes(None)
            elif seconds > limit:
                self._end_stalled(
                    f"checkpoint {path} is still being written after {seconds:.0f} s, in phase saving "
                    f"(limit: watchdog.save_seconds={limit:g})"
                )

    def _running_since(self, moment: float, now: float) -> float:
        """Seconds since a moment, or since this process was stopped after it."""
        return now - max(moment, self._woke)

    def _end_stalled(self, text: str) -> None:
        text = text if self._num_processes == 1 else f"{self._named(self._process)}: {text}"
        if not in_notebook():
            self._end(text, LOST)
        if not self._has_told:  # ending the kernel would take the user's other work along
            self._has_told = True
            path = self._stacks_path()
            self._write_stacks(path, text)
            print_remark(f"jaxtrain: {text}; interrupt the cell to stop; stacks: {path}")

    def _end(self, text: str, code: int) -> NoReturn:
        """Say why, write the stacks, tell the others, and end this process."""
        guard = threading.Timer(_END_SECONDS, os._exit, (code,))
        guard.daemon = True
        guard.start()
        # Beside this thread: the others must be told although the file system hangs.
        path = self._stacks_path()
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

    def _stacks_path(self) -> Path:
        return self._run_dir / "stalls" / f"{time.strftime('%Y%m%d-%H%M%S')}-{self._process}.txt"

    def _write_stacks(self, path: Path, text: str) -> None:
        """Write the reason, what each process was doing, and the stack of every thread of this one."""
        own = Peer(self._process, socket.gethostname(), self._activity.status(), time.monotonic())
        known = sorted([own, *self._exchange.peers()], key=lambda peer: peer.process)
        table = [
            f"  process {peer.process} (host {peer.host}): {_place(peer.status)} for {peer.status.get('seconds', 0)} "
            f"s; last step done: {peer.status.get('done')}; heard {time.monotonic() - peer.heard:.0f} s ago"
            for peer in known
        ]
        with suppress(OSError):  # the process ends anyway, and its line is out
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), "w", encoding="utf-8") as file:
                names = [f"  0x{thread.ident:016x} {thread.name}" for thread in threading.enumerate() if thread.ident]
                parts = [text, "", "processes:", *table, "", "threads of this process:", *names, ""]
                file.write("\n".join([*parts, "their stacks:", ""]))
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)

    def _named(self, process: int) -> str:
        hosts = {peer.process: peer.host for peer in self._exchange.peers()} | {self._process: socket.gethostname()}
        return f"process {process} of {self._num_processes} (host {hosts.get(process, 'unknown')})"


def _place(status: Mapping[str, Any]) -> str:
    if "phase" not in status:
        return "at its start"
    return f"at step {status.get('step', 0)} in phase {status['phase']}"


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
def watched(config: WatchdogConfig | None, run_dir: Path) -> Iterator[Activity]:
    """Watch a run until the block is left, unless `config` is None; every process enters it, after `jax.distributed`.

    Yields:
        What the run is to tell of its phases and steps.
    """
    import jax

    activity = Activity()
    exchange = open_exchange(wanted=config is not None)
    if config is None:
        exchange.close()
        yield activity
        return
    is_alone = not jax.distributed.is_initialized()
    process, num_processes = (0, 1) if is_alone else (jax.process_index(), jax.process_count())
    watchdog = Watchdog(config, activity, exchange, run_dir, process=process, num_processes=num_processes)
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
