"""What is said of a run that stands still: which process is behind, and the file of stacks. No jax here."""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import WatchdogConfig
from jaxtrain.run.activity import IN_STEP, WAITING_FOR_DATA, Moment
from jaxtrain.runtime.heartbeats import Peer

STALLS = "stalls"
# A step, or the wait for its batch, may take this many times the median.
_TIMES_MEDIAN = 10
# While a process starts, one call into C code can keep its other threads from running for a minute.
_PATIENCE_AT_START = 2
_AT_START = ("start", "reading data")
_KEYS = {
    "start": "start_seconds",
    "reading data": "start_seconds",
    "compiling": "compile_seconds",
    "creating state": "restore_seconds",
    IN_STEP: "step_seconds",
    WAITING_FOR_DATA: "data_seconds",
    "saving": "save_seconds",
}


def budget(config: WatchdogConfig, moment: Moment, *, median: float | None) -> tuple[float, str]:
    """How long a phase may take without progress.

    Args:
        config: the limits.
        moment: what the process is doing.
        median: seconds of a usual step; None before the first step of this process is done.

    Returns:
        Seconds, and the key that sets them.
    """
    key = _KEYS.get(moment.phase, "evaluation_seconds")
    limit = {
        "start_seconds": config.start_seconds,
        "compile_seconds": config.compile_seconds,
        "restore_seconds": config.restore_seconds,
        "step_seconds": config.step_seconds,
        "data_seconds": config.data_seconds,
        "save_seconds": config.save_seconds,
        "evaluation_seconds": config.evaluation_seconds,
    }[key]
    if moment.phase in (IN_STEP, WAITING_FOR_DATA):
        if median is not None:
            limit = max(limit, _TIMES_MEDIAN * median)
        elif moment.phase == IN_STEP:
            # The first step may load libraries, or choose among kernels.
            limit, key = max(limit, config.compile_seconds), "compile_seconds"
    return limit, f"watchdog.{key}"


def patience(config: WatchdogConfig, status: Mapping[str, Any]) -> float:
    """Seconds of silence after which the process with this status counts as lost."""
    is_starting = status.get("phase", "start") in _AT_START
    return config.lost_seconds * (_PATIENCE_AT_START if is_starting else 1)


def behind(own: Mapping[str, Any], peers: Sequence[Peer]) -> Peer | None:
    """The process for which this one waits in its step; None: no other one is behind it.

    Args:
        own: status of this process.
        peers: the others.
    """
    if own["phase"] != IN_STEP:
        return None
    found = [
        peer
        for peer in peers
        if _step(peer.status) < own["step"] or (_step(peer.status) == own["step"] and peer.status["phase"] != IN_STEP)
    ]
    return min(found, key=lambda peer: (_step(peer.status), -float(peer.status.get("seconds", 0))), default=None)


def _step(status: Mapping[str, Any]) -> int:
    # A process that has not said anything yet is not known to be behind.
    return int(status["step"]) if "step" in status else 1 << 62


def place(status: Mapping[str, Any]) -> str:
    """Where a process is: `at step 12 in phase step`."""
    if "phase" not in status:
        return "at its start"
    return f"at step {status.get('step', 0)} in phase {status['phase']}"


def stall_path(run_dir: Path, process: int) -> Path:
    """The file that a process writes when it ends; nothing is written here."""
    return run_dir / STALLS / f"{time.strftime('%Y%m%d-%H%M%S')}-{process}.txt"


def write_stacks(path: Path, line: str, table: Sequence[str]) -> None:
    """Write the reason, what each process was doing, and the stack of every thread of this one.

    Nothing is raised where the file cannot be written: the process ends anyway, and its line is out.

    Args:
        path: of the file.
        line: the reason.
        table: one line for each process.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), "w", encoding="utf-8") as file:
            names = [f"  0x{thread.ident:016x} {thread.name}" for thread in threading.enumerate() if thread.ident]
            parts = [line, "", "processes:", *table, "", "threads of this process:", *names, ""]
            file.write("\n".join([*parts, "their stacks:", ""]))
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)


def describe_processes(process: int, host: str, own: Mapping[str, Any], peers: Sequence[Peer]) -> list[str]:
    """One line for each process: its host, its phase and for how long, its step, and the last step that is done.

    Args:
        process: index of this one.
        host: of this one.
        own: its status.
        peers: the others, as far as they are known.
    """
    known = sorted([*peers, Peer(process, host, own, 0.0)], key=lambda peer: peer.process)
    return [_line(peer) for peer in known]


def _line(peer: Peer) -> str:
    status = peer.status
    if "phase" not in status:
        return f"  process {peer.process} (host {peer.host}): nothing heard yet"
    heard = "" if peer.age < 2 else f", heard {peer.age:.0f} s ago"
    return (
        f"  process {peer.process} (host {peer.host}): {status['phase']} for {float(status.get('seconds', 0)):.1f} s "
        f"at step {status.get('step')}; last step done: {status.get('done')}{heard}"
    )
