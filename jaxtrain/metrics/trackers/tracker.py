"""What a tracker is: a record of functions, and what they are given. No jax here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.metrics.recorded import Row, Text


class RefusedError(Exception):
    """A tracker refuses what it is given, and would refuse it again: it is not sent a second time."""


class BegunError(Exception):
    """A run has begun on a tracker, and what followed failed (the cause): another try goes on with that run.

    Attributes:
        run_id: what the tracker calls the run.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run that begins or goes on.

    Attributes:
        run_dir: directory of the run.
        project: the project, or experiment, that the run belongs to.
        name: of the run.
        known_id: what the tracker called the run when it began; None: it begins now.
        settings: dotted key of the config -> value, without secrets.
        tags: name -> text, by which people find the run.
    """

    run_dir: Path
    project: str
    name: str
    known_id: str | None
    settings: Mapping[str, object]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Tracker:
    """A run that is open on a tracker; every function may take long and may raise.

    Attributes:
        run_id: what the tracker calls the run.
        place: where people find it, for one line.
        rows: records rows, in their order; giving the same rows twice after an error must not double them where the
            tracker can tell.
        text: records a text.
        end: ends the run. It takes the status of the run (None: not known) and files to keep with it.
        last_step: the last step of a metric that the tracker has, None where it has none; asked where a process was
            killed while it sent. None: the tracker cannot tell, and has what was being sent.
    """

    run_id: str
    place: str
    rows: Callable[[Sequence[Row]], None]
    text: Callable[[Text], None]
    end: Callable[[str | None, Sequence[Path]], None]
    last_step: Callable[[str], int | None] | None = None
