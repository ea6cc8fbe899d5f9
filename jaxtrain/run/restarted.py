"""What a process knows of the starts of its run before it: where their time went. No jax here."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.metrics.time_spent import earlier_seconds, read_restarts
from jaxtrain.runtime.host import attempt


def seconds_before(run_dir: Path, before: Mapping[str, Any], *, start: int, began_at: float) -> dict[str, float]:
    """Part -> seconds of the processes before this one.

    Args:
        run_dir: directory of the run.
        before: the content of its run.json; empty where this process begins anew.
        start: step that this process goes on from; 0: the beginning.
        began_at: when this process began, in seconds since 1970.
    """
    rows, number = read_restarts(run_dir), attempt()
    if not start:
        # The file may hold rows of an earlier run too; those of this supervisor are the last.
        rows = rows[-number:] if number else []
    last_sign = None
    with contextlib.suppress(OSError):
        last_sign = (run_dir / "metrics.jsonl").stat().st_mtime
    ends = [row["ended"] for row in rows if isinstance(row.get("ended"), int | float)]
    if not number and ends:
        # The supervisor had given up: that nobody started the run until then is no time of the run.
        began_at = min(began_at, max(*ends, last_sign or 0.0))
    return earlier_seconds(before, rows, step=start, began_at=began_at, last_sign=last_sign)
