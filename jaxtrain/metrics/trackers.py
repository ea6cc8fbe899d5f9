"""MLflow and Weights & Biases: each is a function that opens a run there, behind a thread. No jax here.

The clients' own threads do not suffice: opening a run takes them 2 to 8 s, and with a server that is down MLflow's ends
rows, W&B's waits at the end of the process, and neither goes on with a run without a step twice.
"""

import base64
import contextlib
import functools
import importlib.util
import io
import itertools
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.config.schema import LoggingConfig
from jaxtrain.config.secrets import redacted
from jaxtrain.errors import ConfigError, first_line
from jaxtrain.metrics.history import flat
from jaxtrain.metrics.writers import Background, MultiWriter, Row
from jaxtrain.runtime.files import plain_number, write_json_atomic

# Folder of the run directory with what each tracker calls the run.
FOLDER = "trackers"
# How a run may end that did what it was asked to do, and how one that can go on.
_DONE, _STOPPED = ("done", "early stopped", "stopped by a callback"), ("preempted", "stopped")
_PREEMPTED_CODE = 75
# Seconds of all trackers at the end of a run, of one that was asked to stop, once somebody asks while they are waited
# for, and of a tracker that never answered; a wait is said after the last.
_END_SECONDS, _HURRY_SECONDS, _ASKED_SECONDS, _NEVER_ANSWERED_SECONDS, _SAID_AFTER_SECONDS = 30.0, 5.0, 1.0, 4.0, 3.0
# Seconds between tries: 1, 2, 4, and so on up to this, and at the end of a run.
_LONGEST_PAUSE, _LONGEST_LAST_PAUSE = 60.0, 4.0
# An artifact store may be out of reach while numbers are taken: a text must not keep them waiting.
_TRIES_OF_A_TEXT = 3
# What MLflow takes in one request, and as one parameter.
_MOST_METRICS, _MOST_PARAMETERS, _MOST_CHARACTERS = 1000, 100, 6000
# What a tracker keeps with the run.
_FILES = ("run.json", "report.html")
# Python's parser fails now and then where two threads parse at once, as imports of such packages do (CPython 3.11).
_importing = threading.Lock()


class TrackedRun(NamedTuple):
    """What a tracker is told of a run that begins, or goes on with `known_id`; `begun` is called with a new id."""

    run_dir: Path
    project: str
    name: str
    known_id: str | None
    settings: Mapping[str, object]
    tags: Mapping[str, str]
    begun: Callable[[str], None]


class Tracker(NamedTuple):
    """A run that is open on a tracker: what records numbers, a text or picture (step, name, value), and the end.

    Every function may take long and may raise. `last_step` is the last step of a metric that the tracker has, or -1;
    None: it has what was being sent.
    """

    run_id: str
    place: str
    rows: Callable[[Sequence[Row]], None]
    text: Callable[[int, str, Any], None]
    end: Callable[[str, Sequence[Path]], None]
    last_step: Callable[[str], int] | None = None


class BackgroundTracker(Background):
    """Hands rows to a tracker in a thread; nothing that the tracker does or leaves undone reaches the training.

    The last step of each metric that was sent is noted in the run directory: a run that goes on sends no step twice,
    and what a kill kept from the tracker. `open` begins the run there, or goes on with that of an id, and calls its
    second argument with the id. `report` is called with one line for people, in any thread.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[str | None, Callable[[str], None]], Tracker],
        run_dir: Path,
        *,
        is_resumed: bool,
        report: Callable[[str], None],
    ) -> None:
        super().__init__(f"tracker {name}", run_dir / "metrics.jsonl" if is_resumed else None)
        self._name, self._open, self._report, self._run_dir = name, open, report, run_dir
        self._record = run_dir / FOLDER / f"{name}.json"
        known = _recorded(self._record, run_dir) if is_resumed else {}
        self._run_id: str | None = known.get("id")
        self._sent: dict[str, int] = known.get("last_steps", {})
        self._end: tuple[str, Sequence[Path]] = ("", ())
        self._until, self._ended_at = math.inf, math.inf
        self._untaken, self._reason, self._has_answered, self._is_complete = 0, "", False, False
        self._thread.start()

    def begin_end(self, status: str, files: Sequence[Path], *, until: float) -> None:
        """Have what waits sent, and the run ended; what fails is tried again until a time of `time.monotonic`."""
        self._end, self._until, self._ended_at = (status, files), until, time.monotonic()
        self._ending.set()

    def wait_for_end(self, is_over: Callable[[], bool]) -> None:
        """Wait until that is done or `is_over`, which leaves the thread to itself, and report what is not done."""
        is_said = False
        while self._thread.is_alive() and not is_over():
            if not is_said and time.monotonic() - self._ended_at > _SAID_AFTER_SECONDS:
                is_said = True
                self._report(f"waiting for {self._name} to receive the remaining rows; Ctrl-C stops waiting")
            self._thread.join(0.1)
        reason = self._reason or "it did not answer"
        if missing := self._untaken + self._dropped + len(self._waiting):
            self._report(f"{self._name} did not receive {missing} rows: {reason}; metrics.jsonl has them all")
        elif not self._is_complete:
            self._report(f"{self._name} has all rows, but not the end of the run: {reason}")

    def _work(self) -> None:
        tracker = self._insist(lambda: self._open(self._run_id, self._note))
        if tracker is None:
            return
        self._note(tracker.run_id)
        self._report(f"{self._name}: {tracker.place}")
        if tracker.last_step is not None:
            # Asked, because what was being sent when a process was killed may have arrived or not.
            for name in self._sent:
                found = self._insist(functools.partial(tracker.last_step, name))
                self._sent[name] = self._sent[name] if found is None else found
        earlier = self._earlier_rows()
        for rows in itertools.chain(iter(lambda: list(itertools.islice(earlier, 200)), []), self._batches()):
            self._send(tracker, rows)
        self._is_complete = bool(self._insist(lambda: tracker.end(*self._end) or True, tries=2))

    def _send(self, tracker: Tracker, rows: Sequence[Row]) -> None:
        """Send what was not sent before; it is noted before, so that a kill loses the rows of a second at most."""
        numbers: list[Row] = []
        texts: list[tuple[int, str, Any]] = []
        for row in rows:
            found = {name: value for name, value in row.values.items() if value is not None and name != "step"}
            found = {name: value for name, value in found.items() if row.step > self._sent.get(name, -1)}
            self._sent |= dict.fromkeys(found, row.step)
            texts += [(row.step, name, value) for name, value in found.items() if isinstance(value, str | Mapping)]
            found = {name: value for name, value in found.items() if not isinstance(value, str | Mapping)}
            numbers += [row._replace(values=found)] if found else []
        self._untaken += len(numbers) + len(texts)
        if numbers or texts:
            self._note(self._run_id)
        if numbers and self._insist(lambda: tracker.rows(numbers) or True):
            self._untaken -= len(numbers)
        for text in texts:
            if self._insist(lambda text=text: tracker.text(*text) or True, tries=_TRIES_OF_A_TEXT):
                self._untaken -= 1

    def _note(self, run_id: str | None) -> None:
        self._run_id = run_id
        # A disk that is full is the matter of whoever writes metrics.jsonl.
        with contextlib.suppress(OSError):
            self._record.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(self._record, {"id": run_id, "run_dir": str(self._run_dir), "last_steps": self._sent})

    def _insist(self, call: Callable[[], Any], *, tries: float = math.inf) -> Any:
        """Call until it works, with longer and longer pauses; once the run ends, until its last moment, then None."""
        pause, count = 1.0, 0
        while True:
            until = self._until
            if not self._has_answered:
                until = min(until, self._ended_at + _NEVER_ANSWERED_SECONDS)
            is_last = time.monotonic() >= until
            try:
                found = call()
                self._has_answered = True
                return found
            except BaseException as error:  # a tracker may also raise what ends a thread, such as SystemExit
                count += 1
                self._reason = f"{type(error).__name__}: {first_line(error)}"
            if count >= tries or is_last:
                return None
            if count == 2 and not self._ending.is_set():
                self._report(f"{self._name} receives no rows: {self._reason}; training continues without it")
            left = max(0.0, min(pause, _LONGEST_LAST_PAUSE, until - time.monotonic()))
            if self._ending.is_set():
                time.sleep(left)
            else:
                self._ending.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _recorded(path: Path, run_dir: Path) -> dict[str, Any]:
    """What the record of a run holds; empty where there is none, a damaged one, or that of a run this is a copy of."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        first = Path(found["run_dir"])
        # A directory that was moved is no longer at its first place.
        return {} if first != run_dir and (first / FOLDER / path.name).exists() else found
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class Trackers(MultiWriter):
    """The trackers of a run, each in a thread of its own: nothing that they do or leave undone reaches the training."""

    def __init__(self, run_dir: Path, trackers: Sequence[BackgroundTracker] = ()) -> None:
        super().__init__(trackers)
        self._run_dir, self._open = run_dir, trackers

    def end(self, status: str, *, is_asked: Callable[[], bool] = lambda: False) -> None:
        """End the run on every tracker, within seconds, sooner where somebody asks; a second call does nothing."""
        files = [path for name in _FILES if (path := self._run_dir / name).is_file()]
        was_asked = status in _STOPPED  # a run that was stopped has few seconds as it is
        until = time.monotonic() + (_HURRY_SECONDS if was_asked else _END_SECONDS)
        trackers, self._open = self._open, ()
        for tracker in trackers:
            tracker.begin_end(status, files, until=until - 0.5)

        def is_over() -> bool:
            nonlocal until, was_asked
            if not was_asked and is_asked():
                until, was_asked = min(until, time.monotonic() + _ASKED_SECONDS), True
            return time.monotonic() >= until

        for tracker in trackers:
            tracker.wait_for_end(is_over)


def check_trackers(config: LoggingConfig) -> None:
    """Check that the packages of the trackers are installed; the ConfigError names the extra."""
    for name in _wanted(config):
        packages = [name]
        if name == "mlflow" and _mlflow_address().startswith("sqlite"):
            packages += ["sqlalchemy", "alembic"]  # which mlflow-skinny does not bring
        if any(importlib.util.find_spec(package) is None for package in packages):
            raise ConfigError(f"logging.{name}=true needs the package {name}: pip install '.[{name}]'")


def open_trackers(
    run_dir: Path,
    config: LoggingConfig,
    *,
    info: Mapping[str, Any],
    is_resumed: bool,
    report: Callable[[str], None],
) -> Trackers:
    """Open the trackers that a config asks for, each in its thread: this returns at once.

    `info` is the content of run.json; where `is_resumed`, each goes on with the run that it has of this one. `report`
    is called with one line for people, in any thread.
    """
    check_trackers(config)
    run_dir = Path(run_dir).absolute()
    versions, devices = info.get("versions") or {}, info.get("devices") or {}
    # People find a run on a tracker by these.
    tags = {
        "run_dir": str(run_dir),
        **{name: versions[name] for name in ("jaxtrain", "jax") if versions.get(name)},
        **({"devices": f"{devices['count']} x {devices['kind']}"} if devices else {}),
        **({"git_commit": info["git_commit"]} if info.get("git_commit") else {}),
        **redacted(config.tags),
    }
    name, settings = str(info.get("name") or run_dir.name), flat(info.get("config") or {})

    def tracker(which: str) -> BackgroundTracker:
        def open(known_id: str | None, begun: Callable[[str], None]) -> Tracker:
            return TRACKERS[which](TrackedRun(run_dir, config.project, name, known_id, settings, tags, begun))

        return BackgroundTracker(which, open, run_dir, is_resumed=is_resumed, report=report)

    return Trackers(run_dir, [tracker(which) for which in _wanted(config)])


def _wanted(config: LoggingConfig) -> list[str]:
    return [name for name in TRACKERS if getattr(config, name)]


def _import(name: str) -> Any:
    with _importing:
        return import_module(name)


def open_mlflow(run: TrackedRun) -> Tracker:
    """Open a run of MLflow at MLFLOW_TRACKING_URI, or in `mlflow.db` in the working directory.

    The settings are its parameters, which MLflow never changes. NaN stands for every value that is not finite.
    """
    entities, tracking = _import("mlflow.entities"), _import("mlflow.tracking")
    if not os.environ.get("MLFLOW_LOGGING_LEVEL"):
        # A first use of a database writes a line per table.
        logging.getLogger("mlflow").setLevel(logging.WARNING)
    address = _mlflow_address()
    if address.startswith("sqlite"):
        _import("mlflow.store.tracking.sqlalchemy_store")
    client = tracking.MlflowClient(tracking_uri=address)
    if run.known_id is None:
        found = client.get_experiment_by_name(run.project)
        experiment = client.create_experiment(run.project) if found is None else found.experiment_id
        run_id = client.create_run(experiment, run_name=run.name).info.run_id
        run.begun(run_id)
    else:
        run_id = run.known_id
        client.update_run(run_id, status="RUNNING")
    known = client.get_run(run_id).data.params
    settings = {
        _allowed(key): (value if isinstance(value, str) else json.dumps(value, default=str))[:_MOST_CHARACTERS]
        for key, value in run.settings.items()
    }
    parameters = [entities.Param(key, value) for key, value in settings.items() if key not in known]
    for start in range(0, len(parameters), _MOST_PARAMETERS):
        client.log_batch(run_id, params=parameters[start : start + _MOST_PARAMETERS])
    for key, value in run.tags.items():
        client.set_tag(run_id, key, value[:_MOST_CHARACTERS])

    def log_rows(rows: Sequence[Row]) -> None:
        found = [
            entities.Metric(_allowed(name), value if math.isfinite(value) else math.nan, int(seconds * 1000), step)
            for step, seconds, values in rows
            for name, value in values.items()
        ]
        for start in range(0, len(found), _MOST_METRICS):
            client.log_batch(run_id, metrics=found[start : start + _MOST_METRICS])

    def log_text(step: int, name: str, value: Any) -> None:
        path = f"{_allowed(name)}/step_{step:08d}"
        if isinstance(value, str):
            client.log_text(run_id, value, f"{path}.txt")
        elif "png" in value:
            client.log_image(run_id, _image(value), f"{path}.png")
        else:
            client.log_dict(run_id, dict(value), f"{path}.json")

    def end(status: str, files: Sequence[Path]) -> None:
        client.set_tag(run_id, "jaxtrain.status", status)
        # Before the files: a store of artifacts that is away must not leave a run that has ended as one that runs.
        ended = "FINISHED" if status in _DONE else "KILLED" if status in _STOPPED else "FAILED"
        client.set_terminated(run_id, status=ended)
        for file in files:
            client.log_artifact(run_id, str(file))

    def last_step(name: str) -> int:
        return max((metric.step for metric in client.get_metric_history(run_id, _allowed(name))), default=-1)

    place = f"run {run_id} of experiment {run.project} in {address}"
    return Tracker(run_id, place, log_rows, log_text, end, last_step)


def open_wandb(run: TrackedRun) -> Tracker:
    """Open a run of Weights & Biases, or go on with it."""
    wandb = _import("wandb")
    if os.environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun") and not wandb.login(prompt=False):
        # Without a key wandb would ask for one on the terminal, and wait for the answer.
        raise ConfigError("there is no API key: run 'wandb login', or set WANDB_MODE=offline")
    opened = wandb.init(
        project=run.project,
        name=run.name,
        dir=str(run.run_dir),
        id=run.known_id,
        resume="allow",
        config=dict(run.settings),
        tags=[f"{key}={value}"[:64] for key, value in run.tags.items()],
        # What is printed stays with this process: wandb would replace its streams while it writes to them.
        settings={"silent": True, "console": "off"},
    )
    # W&B drops rows whose W&B step is lower than an earlier one, as after a resume: our step is a plain value.
    opened.define_metric("step")
    opened.define_metric("*", step_metric="step")

    def log_rows(rows: Sequence[Row]) -> None:
        for row in rows:
            numbers = {name: plain_number(value) for name, value in row.values.items()}
            opened.log({"step": row.step} | {name: one for name, one in numbers.items() if one is not None})

    def log_text(step: int, name: str, value: Any) -> None:
        if isinstance(value, Mapping) and "png" in value:
            value = wandb.Image(_image(value))
        elif isinstance(value, Mapping):
            value = wandb.Histogram(np_histogram=(np.array(value["counts"]), np.array(value["edges"])))
        opened.log({"step": step, name: value})

    def end(status: str, files: Sequence[Path]) -> None:
        opened.summary["status"] = status
        for file in files:
            if file.suffix == ".html":
                opened.log({file.stem: wandb.Html(str(file))})
        if status == "preempted":
            opened.mark_preempting()
        opened.finish(exit_code=0 if status in _DONE else _PREEMPTED_CODE if status == "preempted" else 1)

    place = opened.settings.sync_dir if opened.offline else opened.url
    return Tracker(opened.id, str(place), log_rows, log_text, end)


# A key of `logging` in the config -> the tracker; adding one is a row here, a function above and the key.
TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "mlflow": open_mlflow,
    "wandb": open_wandb,
}


def _mlflow_address() -> str:
    """Where MLflow keeps runs: MLFLOW_TRACKING_URI, or a database in the working directory, as `runs/` is."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def _allowed(name: str) -> str:
    """A name of a metric or parameter as MLflow takes it: its characters, and a path that no part leads out of."""
    parts = re.sub(r"[^\w\-./ :]", "_", name, flags=re.ASCII)[:250].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _image(value: Mapping[str, Any]) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(value["png"])))
