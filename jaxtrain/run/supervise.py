"""Starts a run again after a failure: after which failures, after which wait, and when it gives up. No jax here.

The supervisor knows a run by its files only: the newest checkpoint, the last row of metrics. The process that it starts
verifies the checkpoint, and goes on from an older one where the newest is damaged.
"""

import contextlib
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxtrain.checkpoint.directory import list_steps
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.errors import CheckpointError, ConfigError, DataError, DivergedError, PreemptedError
from jaxtrain.metrics.history import read_rows
from jaxtrain.runtime.terminal import print_remark

_LONGEST_WAIT_SECONDS = 60
# An end that would come again (a mistake in the config, data that is wrong, the same numbers from the same batches), or
# that somebody asked for: saved on a signal, Ctrl-C, a reader that left.
_NEVER = {
    0,
    ConfigError.exit_code,
    DataError.exit_code,
    DivergedError.exit_code,
    PreemptedError.exit_code,
    128 + signal.SIGINT,
    128 + signal.SIGTERM,
    128 + signal.SIGHUP,
    128 + signal.SIGPIPE,
    128 + signal.SIGUSR1,
    128 + signal.SIGUSR2,
}


class Position(NamedTuple):
    """How far a run is: the last step that left a row or a checkpoint, and the newest checkpoint; 0: none."""

    step: int = 0
    saved: int = 0


def read_position(run_dir: Path | None) -> Position:
    """Return how far the run of a directory is; damaged or missing files count as nothing done."""
    if run_dir is None:
        return Position()
    saved = 0
    with contextlib.suppress(CheckpointError):
        saved = max(list_steps(checkpoint_folder(run_dir)), default=0)
    logged = [row["step"] for row in read_rows(run_dir / "metrics.jsonl")]
    return Position(max([saved, *logged]), saved)


def is_restarted(code: int, *, has_trained: bool) -> bool:
    """Whether another start may get over an end: of checkpoints (4) where the run trained, and storage failed."""
    if code == CheckpointError.exit_code:
        return has_trained
    return code not in _NEVER


def supervise(
    start: Callable[[bool], int],
    run_dir: Path | None,
    *,
    restarts: int,
    asked: threading.Event,
    how_ended: Callable[[int], str],
) -> int:
    """Start a run, and again after each failure that another start may get over, after 1, 2, 4 ... 60 s.

    Args:
        start: runs the processes to their end, and gives the exit code; receives whether a start before it left a
            trace, so that what the directory held before all of them is not resumed.
        run_dir: directory of the run; None: not known, since the processes are of a program.
        restarts: the largest number of restarts.
        asked: set once the end was asked for by a signal; where nothing runs then, the result is 75.
        how_ended: exit code -> words.
    """
    number = 0
    in_a_row = 0  # restarts without a new checkpoint
    last_failure = None
    first = read_position(run_dir)
    reached = first
    while True:
        before = reached
        code = start(reached != first)
        reached = read_position(run_dir)
        has_saved = reached.saved > before.saved
        if asked.is_set() or not is_restarted(code, has_trained=has_saved or reached.step > before.step):
            return code
        in_a_row = 1 if has_saved else in_a_row + 1
        end = f"jaxtrain: the run {how_ended(code)}"
        where = ""
        if run_dir is not None:
            end += f" at step {reached.step}"
            where = f" from step {reached.saved} (of {reached.step})"
            if (code, reached.step) == last_failure:
                print_remark(f"{end}, twice in a row: it would fail there again, so it is not restarted")
                return code
        last_failure = (code, reached.step)
        if number == restarts:
            print_remark(f"{end} after {number} restart{'s' * (number != 1)}, as many as --restarts allows")
            return code
        number += 1
        wait = min(2 ** min(in_a_row - 1, 10), _LONGEST_WAIT_SECONDS)
        print_remark(f"{end}; restart {number} of {restarts} in {wait} s{where}")
        if asked.wait(wait):
            return PreemptedError.exit_code
