"""Where the wall time of a run goes: seconds per part, over all processes that worked on it one after another.

No jax here.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, get_args

Part = Literal[
    "reading data",
    "compiling",
    "creating state",
    "steps",
    "waiting for data",
    "evaluation",
    "saving",
    "sampling",
    "starting",
    "lost steps",
    "restarting",
]
PARTS: tuple[str, ...] = get_args(Part)
OTHER = "other"
# One line per restart of the run, written by its supervisor.
RESTARTS_FILE = "restarts.jsonl"
# What of a run is done again after a failure: steps, and the batches that they waited for.
_DONE_AGAIN = ("steps", "waiting for data")
# A save that did not become complete is gone past, so that the one before it is wanted as well.
_MOST_SAVES = 3
_BEGAN: ContextVar[float | None] = ContextVar("began", default=None)


@contextmanager
def counted_from(began: float) -> Iterator[None]:
    """Count the time of a run from a moment of `time.monotonic()` before it, as `starting`."""
    token = _BEGAN.set(began)
    try:
        yield
    finally:
        _BEGAN.reset(token)


class TimeSpent:
    """Adds up the seconds of each part of a run, those of `earlier` processes too; see `after`.

    `during` marks a block as a part for others, such as the watchdog.
    """

    def __init__(
        self,
        earlier: Mapping[str, float] | None = None,
        *,
        during: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._during, self._earlier = during, dict(earlier or {})
        self._own = dict.fromkeys(PARTS, 0.0)
        called = time.monotonic()
        self._began = _BEGAN.get() or called
        self._own["starting"] = called - self._began

    @property
    def began_at(self) -> float:
        """When this process began to work on the run, in seconds since 1970."""
        return time.time() - (time.monotonic() - self._began)

    def after(self, earlier: Mapping[str, float]) -> None:
        """Take note of the seconds of the processes before this one."""
        self._earlier = dict(earlier)

    def add(self, part: Part, seconds: float) -> None:
        """Add seconds of this process to a part."""
        self._own[part] += seconds

    def lose_steps(self, since: Mapping[str, float]) -> None:
        """Count the steps since a moment, at which `seconds` gave `since`, as lost: they are done again."""
        now = self.seconds()
        for part in _DONE_AGAIN:
            again = max(0.0, now[part] - since.get(part, 0.0))
            self._own[part] -= again
            self._own["lost steps"] += again

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Add the time of a block to a part, also where the block raises."""
        begin = time.monotonic()
        try:
            with self._during(part):
                yield
        finally:
            self._own[part] += time.monotonic() - begin

    def seconds(self) -> dict[str, float]:
        """Return part -> seconds so far, of all processes; `other` is what no part explains, so that all add up."""
        wall = time.monotonic() - self._began
        own = {**self._own, OTHER: max(0.0, wall - sum(self._own.values()))}
        return {part: round(seconds + self._earlier.get(part, 0.0), 3) for part, seconds in own.items()}


def save_entry(step: int, seconds: Mapping[str, float], *, at: float) -> dict[str, Any]:
    """What `run.json` keeps of a save: its step, part -> seconds until then, and when (seconds since 1970)."""
    return {"step": step, "seconds": dict(seconds), "at": round(at, 3)}


def with_save(saves: Sequence[Mapping[str, Any]] | None, entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The newest saves of a `run.json`, with one more."""
    return [*(saves or ()), entry][-_MOST_SAVES:]


def earlier_seconds(
    info: Mapping[str, Any],
    restarts: Sequence[Mapping[str, Any]],
    *,
    step: int,
    began_at: float,
    last_sign: float | None = None,
) -> dict[str, float]:
    """Part -> seconds of the processes before this one; what they did after the save that is gone on from is lost.

    Args:
        info: content of the `run.json` that they left; empty for a run that begins anew.
        restarts: rows of the run's `restarts.jsonl`.
        step: that this process goes on from; 0: the beginning.
        began_at: when this process began, in seconds since 1970.
        last_sign: when a process that nobody watched last wrote something; None: not known.

    `lost steps` are what is done again, `restarting` the time between a failure and the next start.
    """
    seconds = dict(info.get("seconds") or {})
    save = next((one for one in reversed(info.get("saves") or ()) if one["step"] == step), None)
    # A run that begins anew has lost all that was done; one whose save is not known any more counts all as it was.
    since = save["at"] if save is not None else restarts[0]["began"] if restarts and not info else None
    rows = [row for row in restarts if since is not None and since < row["ended"] <= began_at]
    lost, gap = 0.0, 0.0
    if rows:
        nexts = [*(row["began"] for row in rows[1:]), began_at]
        lost = sum(row["ended"] - max(row["began"], since) for row in rows)
        gap = sum(max(0.0, following - row["ended"]) for row, following in zip(rows, nexts, strict=True))
        seconds = dict(save["seconds"]) if save is not None else seconds
    elif save is not None and info.get("status") == "running" and last_sign is not None:
        # Killed, and nobody saw when: at its last sign of life or later.
        lost, seconds = max(0.0, last_sign - save["at"]), dict(save["seconds"])
    elif save is not None:
        for part in _DONE_AGAIN:
            again = max(0.0, seconds.get(part, 0.0) - save["seconds"].get(part, 0.0))
            seconds[part] = seconds.get(part, 0.0) - again
            lost += again
    more = {"lost steps": lost, "restarting": gap}
    return {**seconds, **{part: round(seconds.get(part, 0.0) + added, 3) for part, added in more.items() if added}}


def read_restarts(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's `restarts.jsonl`; where each process has a supervisor, the first row of an end counts."""
    rows: list[dict[str, Any]] = []
    with suppress(OSError):
        for line in (run_dir / RESTARTS_FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if not (rows and row.get("began", 0) < rows[-1].get("ended", 0)):
                    rows.append(row)
    return rows
