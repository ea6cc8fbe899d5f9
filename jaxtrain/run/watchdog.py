"""Ends a run that stands still, with one line and every thread's stack.

A thread looks every second at what the main thread does (`Activity`). It ends the process itself, because a main thread
that waits in a collective or in a file system hears nothing. Processes that are gone are found by jax's coordination
service (`jaxtrain.runtime.distributed`), or by a collective that fails.
"""

import contextlib
import faulthandler
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config.schema import WatchdogConfig
from jaxtrain.errors import LostProcessError, first_line
from jaxtrain.runtime.distributed import let_others_end_first
from jaxtrain.runtime.terminal import in_notebook

WAITING_FOR_DATA = "waiting for data"
IN_STEP = "step"
# Phase -> key of its limit; of all others: other_seconds.
_LIMITS = {
    "compiling": "compile_seconds",
    IN_STEP: "step_seconds",
    WAITING_FOR_DATA: "data_seconds",
    "saving": "save_seconds",
}
# A step, or the wait for its batch, may take this many times the step before it.
_TIMES_LAST_STEP = 10
_TICK_SECONDS = 1.0
_END_SECONDS = 15.0
# Words of the libraries that carry collectives, and of jax's coordination service, where another process is gone.
_PEER_IS_GONE = ("Gloo", "NCCL", "CoordinationService")


@dataclass(frozen=True)
class Doing:
    """What the main thread does: its phase and its step (0 before the first); each progress makes another one."""

    phase: str
    step: int = 0

    def __str__(self) -> str:
        return f"at step {self.step} in phase {self.phase}"


class Activity:
    """Follows what the main thread does.

    Attributes:
        doing: what it does; the watchdog's thread reads it, without a lock, as one record.
        step_seconds: wall time of the last step; 0: none is done.
    """

    def __init__(self) -> None:
        self.doing = Doing("start")
        self.step_seconds = 0.0

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Mark a block as a phase; afterwards the phase before it begins anew."""
        before = self.doing
        self.doing = Doing(phase, before.step)
        try:
            yield
        finally:
            self.doing = replace(before)

    def fed(self, batches: Iterator[Any], *, first: int) -> Iterator[Any]:
        """Yield the batches of the steps from `first` on; taking one marks the wait for data and then the step."""
        self.doing = Doing(WAITING_FOR_DATA, first)
        for step, batch in enumerate(batches, first):
            self.doing = Doing(IN_STEP, step)
            yield batch
            self.doing = Doing(WAITING_FOR_DATA, step + 1)

    def ticking(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an evaluation; taking one counts as progress."""
        for batch in batches:
            self.doing = replace(self.doing)
            yield batch


def limit_of(config: WatchdogConfig, phase: str, *, step_seconds: float) -> tuple[float, str]:
    """Return the seconds that a phase may take without progress, and the key that sets them.

    Args:
        config: the limits.
        phase: what the main thread does.
        step_seconds: wall time of the last step; 0: none is done.
    """
    key = _LIMITS.get(phase, "other_seconds")
    if phase == IN_STEP and not step_seconds:
        key = "compile_seconds"  # the first step may load libraries, or choose among kernels
    limit: float = getattr(config, key)
    if phase in (IN_STEP, WAITING_FOR_DATA):
        limit = max(limit, _TIMES_LAST_STEP * step_seconds)
    return limit, f"watchdog.{key}"


@contextlib.contextmanager
def watched(config: WatchdogConfig | None, run_dir: Path) -> Iterator[Activity]:
    """Watch a run, which tells its phases and steps; every process enters this, after `jax.distributed`.

    Nothing is watched if `config` is None, nor in a notebook: to end the kernel would end other work with it.

    Raises:
        LostProcessError: a collective failed because another process is gone.
    """
    activity = Activity()
    closed = threading.Event()
    if config is not None and not in_notebook():
        if not faulthandler.is_enabled():
            # jax aborts a process whose peers are gone, which may be the one that they waited for.
            faulthandler.enable(file=2)
        arguments = (config, activity, run_dir.absolute(), closed)
        threading.Thread(target=_watch, args=arguments, name="jaxtrain-watchdog", daemon=True).start()
    try:
        yield activity
    except Exception as error:
        if jax.process_count() == 1 or not any(word in str(error) for word in _PEER_IS_GONE):
            raise
        reason = f"{_process()}lost another process {activity.doing}: {first_line(error)}"
        raise LostProcessError(f"{reason}; the output of that process says why") from error
    finally:
        closed.set()


def _watch(config: WatchdogConfig, activity: Activity, run_dir: Path, closed: threading.Event) -> None:
    """End this process once its main thread makes no progress for longer than its phase may take.

    Seconds are counted while this thread runs: those in which the process was stopped or the machine slept pass as one.
    """
    doing = activity.doing
    seconds = 0.0
    while not closed.wait(_TICK_SECONDS):
        seconds += _TICK_SECONDS
        if activity.doing is not doing:
            doing = activity.doing
            seconds = 0.0
        limit, key = limit_of(config, doing.phase, step_seconds=activity.step_seconds)
        if seconds > limit:
            _end(f"{_process()}no progress for {seconds:.0f} s {doing} (limit: {key}={limit:g})", run_dir)


def _end(reason: str, run_dir: Path) -> None:
    """Print the reason, write the stack of every thread to a file of the run, and end this process."""
    # The end must not wait for a file system that hangs, nor for a terminal that nobody reads.
    threading.Timer(_END_SECONDS, os._exit, (LostProcessError.exit_code,)).start()
    path = run_dir / "stalls" / f"{time.strftime('%Y%m%d-%H%M%S')}-{jax.process_index()}.txt"
    line = f"jaxtrain: {reason}; stacks: {path}\n"
    if os.isatty(2):
        line = f"\n\x1b[?25h{line}"  # shows the cursor, which a live bar hides
    # Without Python's buffer, whose lock the main thread may hold.
    os.write(2, line.encode(errors="backslashreplace"))
    with contextlib.suppress(OSError):  # the process ends anyway, and its line is out
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            print(reason, file=file, flush=True)
            faulthandler.dump_traceback(file)
    let_others_end_first()
    os._exit(LostProcessError.exit_code)


def _process() -> str:
    """Return the start of a line that names this process, if it is one of several."""
    count = jax.process_count()
    if count == 1:
        return ""
    return f"process {jax.process_index()} of {count} (host {socket.gethostname()}): "
