"""The trackers that a config asks for, opened for a run."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import LoggingConfig
from jaxtrain.config.secrets import redacted
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.trackers.background import BackgroundTracker
from jaxtrain.metrics.trackers.packages import importable_again
from jaxtrain.metrics.trackers.table import STOPPED, TRACKERS, lacks_package
from jaxtrain.metrics.trackers.tracker import TrackedRun, Tracker
from jaxtrain.metrics.writers import Scalars

# Folder of the run directory with what each tracker calls the run.
FOLDER = "trackers"
# Seconds that all trackers together have at the end of a run; a run that is asked to stop has few until it is killed.
_END_SECONDS, _HURRY_SECONDS = 30.0, 5.0
# Of these: when what failed is not tried again, so that the thread of the tracker says itself what it could not do.
_LAST_SECONDS = 0.5
# What is left once somebody asks to stop while they are waited for.
_ASKED_SECONDS = 1.0
# What a tracker keeps with the run.
_FILES = ("run.json", "report.html")


class Trackers:
    """The trackers of a run; nothing that they do or leave undone reaches the training.

    Args:
        run_dir: directory of the run.
        trackers: each in a thread of its own.
    """

    def __init__(self, run_dir: Path, trackers: Sequence[BackgroundTracker] = ()) -> None:
        self._run_dir, self._trackers = run_dir, trackers

    def scalars(self, step: int, values: Scalars) -> None:
        for tracker in self._trackers:
            tracker.scalars(step, values)

    def text(self, step: int, name: str, text: str | Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.text(step, name, text)

    def end(self, status: str, *, is_asked: Callable[[], bool] = lambda: False) -> None:
        """End the run on every tracker, within seconds; a second call does nothing.

        Args:
            status: how the run ended.
            is_asked: whether somebody asks the process to stop, who waits for no tracker.
        """
        files = [path for name in _FILES if (path := self._run_dir / name).is_file()]
        until = time.monotonic() + (_HURRY_SECONDS if status in STOPPED else _END_SECONDS)
        for tracker in self._trackers:
            tracker.begin_end(status, files, until=until - _LAST_SECONDS)
        # A run that was stopped has few seconds as it is.
        was_asked = status in STOPPED

        def is_over() -> bool:
            nonlocal until, was_asked
            if not was_asked and is_asked():
                until, was_asked = min(until, time.monotonic() + _ASKED_SECONDS), True
            return time.monotonic() >= until

        for tracker in self._trackers:
            tracker.wait_for_end(is_over)


def check_trackers(config: LoggingConfig) -> None:
    """Check that the packages of the trackers are installed.

    Raises:
        ConfigError: a package is missing; names the extra.
    """
    for name in _wanted(config):
        if lacks_package(name):
            raise ConfigError(
                f"logging.{name}=true needs the package {name}, and what it keeps runs in: pip install "
                f"'jaxtrain[{name}]'"
            )


def open_trackers(
    run_dir: Path,
    config: LoggingConfig,
    *,
    info: Mapping[str, Any],
    is_resumed: bool,
    report: Callable[[str], None],
) -> Trackers:
    """Open the trackers that a config asks for. It returns at once: they are opened in their threads.

    Args:
        run_dir: an existing directory, whose lock this process holds.
        config: says which trackers there are.
        info: content of run.json.
        is_resumed: whether the run goes on; then each tracker goes on with the run that it
            has of it, and gets the rows of metrics.jsonl that it lacks.
        report: called with one line for people.

    Raises:
        ConfigError: a package is missing.
    """
    check_trackers(config)
    run_dir = Path(run_dir).absolute()

    def open_one(name: str, known_id: str | None) -> Tracker:
        run = TrackedRun(
            run_dir=run_dir,
            project=config.project,
            name=str(info.get("name") or run_dir.name),
            known_id=known_id,
            settings=_flat(info.get("config") or {}),
            tags={**_facts(run_dir, info), **redacted(config.tags)},
        )
        with importable_again():  # packages import more of themselves when a run begins
            return TRACKERS[name].open(run)

    return Trackers(
        run_dir,
        [
            BackgroundTracker(
                name,
                functools.partial(open_one, name),
                run_dir,
                Path(FOLDER) / f"{name}.json",
                earlier=run_dir / "metrics.jsonl" if is_resumed else None,
                report=report,
            )
            for name in _wanted(config)
        ],
    )


def _wanted(config: LoggingConfig) -> list[str]:
    return [name for name in TRACKERS if config.model_dump(include={name})[name]]


def _facts(run_dir: Path, info: Mapping[str, Any]) -> dict[str, str]:
    """What a run is found by on a tracker."""
    versions, devices = info.get("versions") or {}, info.get("devices") or {}
    found = {
        "run_dir": str(run_dir),
        "jaxtrain": versions.get("jaxtrain"),
        "jax": versions.get("jax"),
        "devices": f"{devices['count']} x {devices['kind']}" if devices.get("kind") else None,
        "git_commit": info.get("git_commit"),
    }
    return {name: str(value) for name, value in found.items() if value}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in tree.items():
        is_group = isinstance(value, Mapping) and value
        found |= _flat(value, f"{prefix}{key}.") if is_group else {f"{prefix}{key}": value}
    return found
