"""Everything that `jaxtrain bench` measures of a config on this machine, as one JSON object; no jax until it is needed.

Figures that cannot be measured are null, and `reasons` says why.
"""

import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jaxtrain import __version__
from jaxtrain.config import Loaded
from jaxtrain.config.data import CalledData
from jaxtrain.config.schema import Config
from jaxtrain.plan.workload import Workload, describe_workload
from jaxtrain.runtime import distributed
from jaxtrain.runtime.cluster import detect_cluster
from jaxtrain.runtime.devices import FORMATS, peak_flops, usable_cores
from jaxtrain.runtime.host import SETTINGS

PARTS = ("start", "limits", "step")
_START_LIMIT_SECONDS = 600.0
# Settings added to those of the config, so that the process writes nothing outside of its temporary folder, claims no
# folder of checkpoints, and asks no service.
_QUIET = (
    *("logging.report=false", "logging.tensorboard=false"),
    *("logging.wandb=false", "logging.mlflow=false"),
    "checkpoint.directory=null",
    *("checkpoint.every=null", "checkpoint.every_minutes=null"),
    "profile.start_step=null",
)


def measure(
    loaded: Loaded,
    name: str,
    overrides: Sequence[str],
    *,
    emulate: int | None,
    skip: Sequence[str],
    phase: Callable[[str], AbstractContextManager[object]],
    step_budget_seconds: float = 10.0,
) -> dict[str, Any]:
    """Measure a config.

    Args:
        loaded: the config.
        name: name or path of the config as the user gave it, for the runs whose start is timed.
        overrides: `key=value` settings as the user gave them, for the same runs.
        emulate: number of CPU devices to emulate; None: the devices of the machine.
        skip: parts of `PARTS` that are not measured.
        phase: name of a part -> a context around it, which shows it to the user.
        step_budget_seconds: after so long no further step is timed.

    Returns:
        Strict JSON values, with the name of each part -> its figures.

    Raises:
        ConfigError: the config cannot run on this machine.
    """
    config = loaded.config
    # A function of the user's may start jax, which must wait until after the runs whose start is timed.
    described = None if isinstance(config.data, CalledData) else describe_workload(config)
    reasons: dict[str, str] = {part: f"--skip {part}" for part in skip}
    answer: dict[str, Any] = {
        "jaxtrain": __version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "config": name,
        "overrides": list(overrides),
        "machine": machine(),
        **dict.fromkeys(PARTS),
    }
    # Before this process starts jax, because on a GPU it then takes the memory that these runs need.
    if "start" not in skip:
        with phase("starting a run twice"):
            answer["start"] = _start(name, overrides, emulate, reasons)
    distributed.start(emulate=emulate, compilation_cache=None)
    workload = described or describe_workload(config)
    import jax

    from jaxtrain.bench import step as whole
    from jaxtrain.bench.limits import measure_limits

    answer["jax"] = jax.__version__
    devices = jax.devices()
    answer["device"] = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    step, batches = whole.workload_step(config, workload)
    step.batch_shardings(batches.spec())  # so that a batch that does not divide is an error before any measurement
    measured = None
    if "step" not in skip:
        # Before the other parts, whose arrays and programs would count into the peaks of memory.
        with phase("timing the step"):
            found = whole.measure_step(step, batches, seed=config.seed, budget_seconds=step_budget_seconds)
            measured = dataclasses.asdict(found)
    if "limits" not in skip:
        with phase("measuring the device"):
            answer["limits"] = dataclasses.asdict(measure_limits())
        reasons |= {f"limits.{what}": why for what, why in answer["limits"].pop("reasons").items()}
    if measured is not None:
        answer["step"] = _step(config, workload, measured, answer, reasons)
    # The choices of implementations and compiler options are known after the step was traced.
    answer["choices"] = list(step.choices)
    answer["compiler_options"] = dict(step.compiler_options.used)
    return answer | {"reasons": reasons}


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    found = {"cpu": model or platform.machine(), "cores": usable_cores(), "load": os.getloadavg()[0]}
    return {**found, "python": platform.python_version()}


class NoStepError(RuntimeError):
    """A started run made no first step; the message says why."""


def start_seconds(
    config: str, overrides: Sequence[str], cache: str | Path, *, emulate: int | None = None
) -> tuple[float, list[str]]:
    """Start `jaxtrain train` on a config in a temporary folder, and end it after its first step.

    Args:
        config: a shipped name or a path.
        overrides: `key=value` settings that replace those of the config.
        cache: folder for compiled programs, whatever `compilation_cache` of the config is.
        emulate: number of CPU devices to emulate; None: the devices of the machine.

    Returns:
        Seconds from the start of the process to the first row of metrics.jsonl, and the lines that the run printed to
        standard error until then.

    Raises:
        NoStepError: the run ended, or took longer than ten minutes, before its first step.
    """
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
    # The settings of malloc under which a bench runs are removed, because a start has to set them itself.
    inherited = {name: value for name, value in os.environ.items() if SETTINGS.get(name) != value}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        metrics, log = Path(folder) / "run" / "metrics.jsonl", Path(folder) / "said"
        command = [sys.executable, "-m", "jaxtrain", "train", config, *overrides, *_QUIET]
        command.append(f"compilation_cache={json.dumps(str(cache))}")
        command += ["--run-dir", str(metrics.parent), *(() if emulate is None else ("--emulate", str(emulate)))]
        with log.open("wb") as errors:
            began = time.monotonic()
            process = subprocess.Popen(
                command, env={**inherited, "PYTHONPATH": path}, stdout=subprocess.DEVNULL, stderr=errors
            )
            try:
                while not (metrics.exists() and metrics.stat().st_size):
                    if time.monotonic() - began > _START_LIMIT_SECONDS:
                        raise NoStepError(f"no step within {_START_LIMIT_SECONDS:.0f} s")
                    if process.poll() is not None and not metrics.exists():
                        said = log.read_text(errors="replace").strip().splitlines()
                        raise NoStepError(said[-1] if said else f"it ended with exit code {process.returncode}")
                    time.sleep(0.005)
                seconds = time.monotonic() - began
            finally:
                process.kill()
                process.wait()
        return seconds, log.read_text(errors="replace").splitlines()


def _start(
    name: str, overrides: Sequence[str], emulate: int | None, reasons: dict[str, str]
) -> dict[str, float] | None:
    """Time a start with an empty cache, and then one with the programs that the first wrote there."""
    if detect_cluster() is not None:
        # A run that is timed here would join the others, in place of this process.
        reasons["start"] = "the start of one of several processes is not timed; run bench in a single process"
        return None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        try:
            cold, warm = (start_seconds(name, overrides, cache, emulate=emulate)[0] for _ in range(2))
        except NoStepError as error:
            reasons["start"] = str(error)
            return None
    return {"cold_seconds": cold, "warm_seconds": warm, "cold_over_warm": cold / warm}


def _step(
    config: Config, workload: Workload, measured: dict[str, Any], answer: dict[str, Any], reasons: dict[str, str]
) -> dict[str, Any]:
    """Add the rates that follow from the measured step."""
    units = workload.tokens or workload.rows
    seconds, device, policy = measured["seconds"], answer["device"], config.precision.policy
    flops = None if workload.flops_per_row is None else workload.flops_per_row * workload.rows
    rate = None if flops is None else flops / seconds / device["count"]
    peak = peak_flops(device["kind"], policy)
    if rate is None:
        reasons["step.model_flops"] = "the FLOPs of a model of your own (model.call) are not known"
    elif peak is None:
        reasons["step.model_flops_utilization"] = f"no published {FORMATS[policy]} peak of {device['kind']}"
    measured_rate = ((answer["limits"] or {}).get("matmul") or {}).get(FORMATS[policy])
    if measured_rate is not None and device["platform"] == "cpu":
        measured_rate /= device["count"]  # emulated devices share the cores
    if measured["device_peak_bytes"] is None:
        reasons["step.device_peak_bytes"] = f"a {device['platform']} does not report it; see process_peak_bytes"
    return {
        **measured,
        "unit": workload.unit,
        "units": units,
        "units_per_second": units / seconds,
        "model_flops": flops,
        "flops_per_second_per_device": rate,
        "model_flops_utilization": None if peak is None or rate is None else rate / peak,
        "share_of_measured_matmul": None if not measured_rate or rate is None else rate / measured_rate,
    }
