"""Where the wall time of a run goes: seconds per part, over all processes that worked on it. No jax here."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, get_args

Part = Literal[
    "reading data", "compiling", "creating state", "steps", "waiting for data", "evaluation", "saving", "sampling"
]
PARTS: tuple[str, ...] = get_args(Part)
OTHER = "other"


class TimeSpent:
    """Adds up the seconds of each part of a run; `during` marks a block as a part for others, such as the watchdog."""

    def __init__(self, *, during: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        self._during, self._began = during, time.monotonic()
        self._earlier: Mapping[str, float] = {}
        self._own = dict.fromkeys(PARTS, 0.0)

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
