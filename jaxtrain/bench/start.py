"""Time from the start of a process to the end of its first step, with an empty and with a warm cache. No jax here."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.runtime.host import SETTINGS

_LIMIT_SECONDS = 600.0
# A week: no timed start takes so long.
_NEVER_MINUTES = 10_080
# Settings added to those of the config, so that the process writes nothing outside of its temporary folder, claims no
# folder of checkpoints, and asks no service. Saves by the clock are those that spikes.action=roll_back accepts.
_QUIET = (
    *("logging.report=false", "logging.tensorboard=false"),
    *("logging.wandb=false", "logging.trackio=false", "logging.mlflow=false"),
    *("checkpoint.directory=null", "checkpoint.mirror=null"),
    *("checkpoint.every=null", f"checkpoint.every_minutes={_NEVER_MINUTES}"),
    *("profile.start_step=null", "notices.metadata=false"),
)


class NoStepError(RuntimeError):
    """A started run made no first step; the message says why."""


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        seconds: from the start of the process to the first row of metrics.jsonl.
        said: lines that the run printed to standard error until then.
    """

    seconds: float
    said: tuple[str, ...]


def start_seconds(
    config: str,
    overrides: Sequence[str],
    cache: str | Path,
    *,
    emulate: int | None = None,
    limit: float = _LIMIT_SECONDS,
) -> Start:
    """Start `jaxtrain train` on a config in a temporary folder, and end it after its first step.

    Args:
        config: a shipped name or a path.
        overrides: `key=value` settings that replace those of the config.
        cache: folder for compiled programs, whatever `compilation_cache` of the config is.
        emulate: number of CPU devices to emulate; None: the devices of the machine.
        limit: seconds after which the run is stopped.

    Raises:
        NoStepError: the run ended or reached the limit before its first step.
    """
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    # The settings of malloc under which a bench runs are removed, because a start has to set them itself.
    inherited = {name: value for name, value in os.environ.items() if SETTINGS.get(name) != value}
    environment = {**inherited, "PYTHONPATH": path}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        metrics, log = Path(folder) / "run" / "metrics.jsonl", Path(folder) / "said"
        command = [sys.executable, "-m", "jaxtrain", "train", config, *overrides, *_QUIET]
        command.append(f"compilation_cache={json.dumps(str(cache))}")
        command += ["--run-dir", str(metrics.parent), *(() if emulate is None else ("--emulate", str(emulate)))]
        with log.open("wb") as errors:
            began = time.monotonic()
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
            try:
                while not (metrics.exists() and metrics.stat().st_size):
                    if time.monotonic() - began > limit:
                        raise NoStepError(f"no step within {limit:.0f} s")
                    if process.poll() is not None and not metrics.exists():
                        said = log.read_text(errors="replace").strip().splitlines()
                        raise NoStepError(said[-1] if said else f"it ended with {process.returncode}")
                    time.sleep(0.005)
                seconds = time.monotonic() - began
            finally:
                process.kill()
                process.wait()
        said = tuple(line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip())
        return Start(seconds, said)


def cold_and_warm(
    config: str, overrides: Sequence[str], *, emulate: int | None = None, limit: float = _LIMIT_SECONDS
) -> tuple[Start, Start]:
    """Time a start with an empty cache, and then one with the programs that the first wrote there.

    Args:
        config: a shipped name or a path.
        overrides: `key=value` settings that replace those of the config.
        emulate: number of CPU devices to emulate; None: the devices of the machine.
        limit: seconds after which a run is stopped.

    Raises:
        NoStepError: a run ended or reached the limit before its first step.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        cold = start_seconds(config, overrides, cache, emulate=emulate, limit=limit)
        return cold, start_seconds(config, overrides, cache, emulate=emulate, limit=limit)
