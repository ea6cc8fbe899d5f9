"""Where the wall time of a run goes: seconds per part, over all processes that worked on it one after another.

No jax here.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
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
]
PARTS: tuple[str, ...] = get_args(Part)
OTHER = "other"
# One line per restart of the run, written by its supervisor.
RESTARTS_FILE = "restarts.jsonl"
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

    def __init__(self, *, during: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        self._during, self._earlier = during, dict[str, float]()
        self._own = dict.fromkeys(PARTS, 0.0)
        called = time.monotonic()
        self._began = _BEGAN.get() or called
        self._own["starting"] = called - self._began

    def after(self, earlier: Mapping[str, float]) -> None:
        """Take note of the seconds of the processes before this one."""
        self._earlier = dict(earlier)

    def add(self, part: Part, seconds: float) -> None:
        """Add seconds of this process to a part."""
        self._own[part] += seconds

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
