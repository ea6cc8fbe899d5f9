"""Starts a run again after a failure: after which exit codes, after which wait, and when it gives up. No jax here.

The supervisor knows a run by its files only. The process that it starts verifies the newest checkpoint, and resumes
from an older one if that is damaged.
"""

import contextlib
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from jaxtrain.checkpoint.directory import list_steps
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.errors import CheckpointError, ConfigError, DataError, DivergedError, PreemptedError
from jaxtrain.metrics.history import read_rows
from jaxtrain.runtime.terminal import print_remark

_LONGEST_WAIT_SECONDS = 60
# A failure that would come again (a mistake in the config, wrong data, the same numbers from the same batches), or an
# end that somebody asked for: saved on a signal, Ctrl-C, a reader of its output that left.
FINAL_CODES = {
    0,
    ConfigError.exit_code,
    DataError.exit_code,
    CheckpointError.exit_code,
    DivergedError.exit_code,
    PreemptedError.exit_code,
    128 + signal.SIGINT,
    128 + signal.SIGTERM,
    128 + signal.SIGPIPE,
}


def last_step(run_dir: Path) -> int:
    """Return the last step of a run that left a row or a checkpoint; damaged or missing files count as none."""
    steps = [row["step"] for row in read_rows(run_dir / "metrics.jsonl")]
    with contextlib.suppress(CheckpointError):
        steps += list_steps(checkpoint_folder(run_dir))
    return max(steps, default=0)


def supervise(
    start: Callable[[bool], int],
    run_dir: Path | None,
    *,
    restarts: int,
    asked: threading.Event,
    how_ended: Callable[[int], str],
) -> int:
    """Start a run, and again after each failure that another start may overcome, after 1, 2, 4 ... 60 s.

    Args:
        start: runs the processes to their end and returns the exit code; receives whether an earlier start left a
            trace in the run directory, which is then resumed.
        run_dir: directory of the run; None: not known, since the processes are of a program.
        restarts: the largest number of restarts.
        asked: set once a signal asked for the end; if no process runs then, the result is 75.
        how_ended: exit code -> words.
    """
    first_step = 0 if run_dir is None else last_step(run_dir)
    step = first_step
    last_failure = None
    number = 0
    while True:
        code = start(step != first_step)
        if asked.is_set() or code in FINAL_CODES:
            return code
        end = f"jaxtrain: the run {how_ended(code)}"
        if run_dir is not None:
            step = last_step(run_dir)
            end += f" at step {step}"
            if (code, step) == last_failure:
                print_remark(f"{end}, twice in a row: it would fail there again, so it is not restarted")
                return code
            last_failure = (code, step)
        if number == restarts:
            print_remark(f"{end}; --restarts {restarts} allows no further restart")
            return code
        wait = min(2**number, _LONGEST_WAIT_SECONDS)
        number += 1
        print_remark(f"{end}; restart {number} of {restarts} in {wait} s")
        if asked.wait(wait):
            return PreemptedError.exit_code
