"""What a process that trains sets on its host: malloc, the garbage collector, signals, forked children, its end.

No jax here.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from jaxtrain.errors import PreemptedError

# XLA on CPU allocates a step's temporaries by malloc, which maps and unmaps large blocks: 150,000 page faults and a
# tenth of the time of a step (6 layers, width 384, 4,096 tokens, 2 cores; docs/benchmarks.md). Malloc reads its
# settings when a process starts, so the command replaces its own process once.
SETTINGS = {
    # Huge pages where malloc grows its heap: 512 times fewer faults.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # Large blocks come from the heap and stay in it, where they would otherwise be mapped again for every step.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
# Ctrl-C is Python's own, and ends the process at once as well.
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_is_paused = False
_dropped: list[Callable[[], object]] = []


def open_closed_streams() -> None:
    """Give standard streams that whoever started this process has closed (`2>&-`) a place where nothing is kept.

    The files of the process would get their numbers otherwise, and what is printed would be written into them.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)  # which children inherit
            if null != number:
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def restart(*, accelerator: bool) -> None:
    """Start this command again with `SETTINGS`, in this process, unless steps run on an accelerator or they are set."""
    own = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    if own or accelerator or platform.libc_ver()[0] != "glibc" or not (sys.executable and sys.orig_argv):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **SETTINGS})


def give_back_free_memory() -> None:
    """Give free pages of the heap back to the system, where the C library is glibc.

    Reading weights and compiling free hundreds of megabytes before the first step, which malloc keeps in pieces that
    the temporaries of a step do not fit into: 424 MiB of a peak of 4,083 (SmolLM2-135M fine-tuned on CPU in float32).
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def pause_collector() -> None:
    """Stop the garbage collector until `resume_collector`, where nobody else did.

    Imports and tracing create a million objects that are never freed; scanning them repeatedly takes 0.5 of the 2.9 s
    of a warm start of `quickstart` (2 cores; docs/benchmarks.md).
    """
    global _is_paused
    if gc.isenabled():
        gc.disable()
        _is_paused = True


def resume_collector() -> None:
    """Collect once, exempt all remaining objects and restart the collector; does nothing unless it was paused."""
    global _is_paused
    if _is_paused:
        gc.collect()
        gc.freeze()
        gc.enable()
        _is_paused = False


def drop_in_children(drop: Callable[[], object]) -> Callable[[], None]:
    """Have something dropped in every child that is forked from here on, as by `multiprocessing.Pool` of data code.

    A child has copies of every descriptor and handler: a lock that outlives its holder, a signal that ends the worker
    alone and is taken for one to the run. `drop` is called in the child, on its only thread, before any other code.

    Returns:
        A function that takes it back.
    """
    if not _dropped:
        _dropped.append(lambda: None)  # registered once, because Python has no way to take it back
        os.register_at_fork(after_in_child=lambda: [each() for each in reversed(_dropped)])
    _dropped.append(drop)
    return lambda: _dropped.remove(drop) if drop in _dropped else None


def end_at_signals() -> None:
    """End this process with exit code 75 at a signal that would kill it, until a run sets handlers of its own."""
    for number in _HEARD:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end_at_signal)
    drop_in_children(_deadly_again)


def _deadly_again() -> None:
    for number in _HEARD:
        if signal.getsignal(number) is end_at_signal:
            signal.signal(number, signal.SIG_DFL)


def end_at_signal(number: int, frame: FrameType | None) -> NoReturn:
    """The handler of `end_at_signals`: nothing has begun, and nothing is lost."""
    with contextlib.suppress(OSError):
        name = signal.Signals(number).name
        os.write(2, f"\njaxtrain: stopped by {name} before the run began: run again to start\n".encode())
    os._exit(PreemptedError.exit_code)


def end_process(code: int) -> NoReturn:
    """End this process with an exit code whatever its threads do, after what is registered for its exit.

    An interpreter that ends waits for threads whose data does not come, and aborts (exit code 134) where one of them is
    inside C++ code, as in `jax.device_put` (Python 3.11 to 3.13).
    """
    if threading.active_count() > 1:
        atexit._run_exitfuncs()
        exit_at_once(code)
    sys.exit(code)


def exit_at_once(code: int) -> NoReturn:
    """End this process with what it printed, and nothing else: its main thread, or another one, is stuck."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
