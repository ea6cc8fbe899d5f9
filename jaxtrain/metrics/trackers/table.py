"""The trackers: a row of the table and a function each, which opens a run there. No jax here.

Every function runs in a thread of its own (`background.py`), and imports its package there.
"""

import base64
import contextlib
import fcntl
import importlib.util
import io
import json
import logging
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.metrics.recorded import Row, Text
from jaxtrain.metrics.trackers.packages import import_package
from jaxtrain.metrics.trackers.tracker import BegunError, RefusedError, TrackedRun, Tracker
from jaxtrain.runtime.files import plain_number

# How a run may end that did what it was asked to do, and how one that can go on.
_DONE = ("done", "early stopped", "stopped by a callback")
STOPPED = ("preempted", "stopped")
_PREEMPTED_CODE = 75
# What MLflow takes in one request, and as one parameter.
_MOST_METRICS, _MOST_PARAMETERS, _MOST_CHARACTERS = 1000, 100, 6000
# Making the tables of a database takes MLflow seconds; a process that stands still meanwhile must not stop the others.
_DATABASE_SECONDS = 60.0


@dataclass(frozen=True)
class Kind:
    """A row of the table.

    Attributes:
        packages: what has to be installed, by the names that are imported; the extra has the name of the row.
        open: begins a run there, or goes on with it.
    """

    packages: Sequence[str]
    open: Callable[[TrackedRun], Tracker]


def open_mlflow(run: TrackedRun) -> Tracker:
    """Open a run of MLflow at MLFLOW_TRACKING_URI, or in `mlflow.db` in the working directory.

    The settings are its parameters. A setting that changed while the run was stopped is a tag, since MLflow never
    changes a parameter. NaN stands for every value that is not finite.
    """
    entities, exceptions = import_package("mlflow.entities"), import_package("mlflow.exceptions")
    tracking = import_package("mlflow.tracking")
    if not os.environ.get("MLFLOW_LOGGING_LEVEL"):
        # A first use of a database writes a line per table.
        logging.getLogger("mlflow").setLevel(logging.WARNING)
    address = mlflow_address()
    if address.startswith("sqlite"):
        import_package("mlflow.store.tracking.sqlalchemy_store")
    with _alone_in(address):
        client = tracking.MlflowClient(tracking_uri=address)
    if run.known_id is None:
        run_id = client.create_run(_experiment(client, run.project), run_name=run.name).info.run_id
    else:
        run_id = run.known_id
        client.update_run(run_id, status="RUNNING")
    try:
        known = client.get_run(run_id).data.params
        settings = {_allowed(key): _text(value)[:_MOST_CHARACTERS] for key, value in run.settings.items()}
        parameters = [entities.Param(key, value) for key, value in settings.items() if key not in known]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(run_id, params=parameters[start : start + _MOST_PARAMETERS])
        changed = {f"changed.{key}": value for key, value in settings.items() if known.get(key, value) != value}
        for key, value in {**run.tags, **changed}.items():
            client.set_tag(run_id, key, value[:_MOST_CHARACTERS])
    except Exception as error:
        raise BegunError(run_id) from error

    def log_rows(rows: Sequence[Row]) -> None:
        found = [
            entities.Metric(
                _allowed(name), float(value) if math.isfinite(value) else math.nan, int(row.seconds * 1000), row.step
            )
            for row in rows
            for name, value in row.values.items()
            if value is not None and name != "step"
        ]
        for start in range(0, len(found), _MOST_METRICS):
            try:
                client.log_batch(run_id, metrics=found[start : start + _MOST_METRICS])
            except exceptions.MlflowException as error:
                if error.error_code == "INVALID_PARAMETER_VALUE":
                    raise RefusedError(str(error)) from error
                raise

    def log_text(text: Text) -> None:
        path = f"{_allowed(text.name)}/step_{text.step:08d}"
        if isinstance(text.text, str):
            client.log_text(run_id, text.text, f"{path}.txt")
        elif "png" in text.text:
            client.log_image(run_id, _image(text.text), f"{path}.png")
        else:
            client.log_dict(run_id, dict(text.text), f"{path}.json")

    def end(status: str | None, files: Sequence[Path]) -> None:
        if status is not None:
            client.set_tag(run_id, "jaxtrain.status", status)
        # Before the files: a store of artifacts that is away must not leave a run that has ended as one that runs.
        ended = "FINISHED" if status is None or status in _DONE else "KILLED" if status in STOPPED else "FAILED"
        client.set_terminated(run_id, status=ended)
        for file in files:
            client.log_artifact(run_id, str(file))

    def last_step(name: str) -> int | None:
        return max((metric.step for metric in client.get_metric_history(run_id, _allowed(name))), default=None)

    place = f"run {run_id} of experiment {run.project} in {address}"
    return Tracker(run_id, place, log_rows, log_text, end, last_step)


def open_wandb(run: TrackedRun) -> Tracker:
    """Open a run of Weights & Biases, or go on with it."""
    wandb = import_package("wandb")
    if os.environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun") and not wandb.login(prompt=False):
        # Without a key wandb would ask for one on the terminal, and wait for the answer.
        raise RefusedError("there is no API key: run 'wandb login', or set WANDB_MODE=offline")
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
            opened.log({"step": row.step} | _known(row.values))

    def end(status: str | None, files: Sequence[Path]) -> None:
        if status is not None:
            opened.summary["status"] = status
        for file in files:
            if file.suffix == ".html":
                opened.log({file.stem: wandb.Html(str(file))})
        if status == "preempted":
            opened.mark_preempting()
        is_done = status is None or status in _DONE
        opened.finish(exit_code=0 if is_done else _PREEMPTED_CODE if status == "preempted" else 1)

    def log_text(text: Text) -> None:
        opened.log({"step": text.step, text.name: _shown(text, wandb)})

    place = opened.settings.sync_dir if opened.offline else opened.url
    return Tracker(opened.id, str(place), log_rows, log_text, end)


def open_trackio(run: TrackedRun) -> Tracker:
    """Open a run of trackio, or go on with it.

    trackio goes on with the newest run of a name, so that each run has a name that no other has.
    """
    trackio = import_package("trackio")
    # What it prints is no result of this process. For a moment what others print goes to standard error as well.
    to_standard_error = contextlib.redirect_stdout(sys.stderr)
    name = f"{run.name}-{secrets.token_hex(3)}" if run.known_id is None else run.known_id
    resume = "never" if run.known_id is None else "allow"
    with to_standard_error:
        opened = trackio.init(project=run.project, name=name, resume=resume, config={**run.settings, **run.tags})
    last_step = 0

    def log_rows(rows: Sequence[Row]) -> None:
        nonlocal last_step
        for row in rows:
            last_step = row.step
            opened.log(_known(row.values), step=row.step)

    def end(status: str | None, files: Sequence[Path]) -> None:
        if status is not None:
            opened.log({"status": status}, step=last_step)
        with to_standard_error:
            opened.finish()

    return Tracker(
        name,
        f"run {name} of project {run.project}",
        log_rows,
        lambda text: opened.log({text.name: _shown(text, trackio)}, step=text.step),
        end,
    )


# A key of `logging` in the config -> the tracker; adding one is a row here, a function above and the key.
TRACKERS: Mapping[str, Kind] = {
    "mlflow": Kind(("mlflow",), open_mlflow),
    "wandb": Kind(("wandb",), open_wandb),
    "trackio": Kind(("trackio",), open_trackio),
}


def lacks_package(name: str) -> bool:
    """Whether a package that a tracker needs is not installed."""
    packages = TRACKERS[name].packages
    if name == "mlflow" and mlflow_address().startswith("sqlite"):
        packages = (*packages, "sqlalchemy", "alembic")  # which mlflow-skinny does not bring
    return not all(map(_is_installed, packages))


def mlflow_address() -> str:
    """Where MLflow keeps runs: MLFLOW_TRACKING_URI, or a database in the working directory, as `runs/` is."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


@contextlib.contextmanager
def _alone_in(address: str) -> Iterator[None]:
    """While a database of sqlite is opened, keep other runs of this machine from opening it, as those of a sweep do.

    The first use makes the tables: of two processes that do so at once, each fails over what the other has done.

    Args:
        address: of MLflow; one that is no file is left to its server.
    """
    path = re.fullmatch(r"sqlite[^:]*:///([^?]+)(\?.*)?", address)
    descriptor = None
    if path:
        # The lock is on the folder: a file of its own would stay there. A file system without such locks goes without.
        with contextlib.suppress(OSError):
            folder = Path(path[1]).parent
            folder.mkdir(parents=True, exist_ok=True)  # as MLflow does
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            until = time.monotonic() + _DATABASE_SECONDS
            while not _locked(descriptor) and time.monotonic() < until:
                time.sleep(0.05)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing it is not enough where a child has been forked
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_installed(package: str) -> bool:
    with contextlib.suppress(ValueError):  # a module that was put in place by hand has no record of its origin
        return importlib.util.find_spec(package) is not None
    return True


def _experiment(client: Any, name: str) -> str:
    """The id of an experiment of MLflow, which is made if need be."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name)
        except Exception:
            # Another run of a sweep may have made it at the same moment.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return found.experiment_id


def _allowed(name: str) -> str:
    """A name of a metric or parameter as MLflow takes it: its characters, and a path that no part leads out of."""
    parts = re.sub(r"[^\w\-./ :]", "_", name, flags=re.ASCII)[:250].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _shown(text: Text, package: Any) -> Any:
    """A text, or what wandb and trackio, which name them alike, call a histogram or an image."""
    if isinstance(text.text, str):
        return text.text
    if "png" in text.text:
        return package.Image(_image(text.text))
    return package.Histogram(np_histogram=(np.array(text.text["counts"]), np.array(text.text["edges"])))


def _image(value: Mapping[str, Any]) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(value["png"])))


def _known(values: Mapping[str, float | int | None]) -> dict[str, float | int]:
    numbers = {name: plain_number(value) for name, value in values.items() if name != "step"}
    return {name: number for name, number in numbers.items() if number is not None}
