"""Everything that `jaxtrain bench` measures of a config on this machine, as one JSON object.

Figures that cannot be measured are null, and `reasons` says why.
"""

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jaxtrain import __version__
from jaxtrain.bench.start import NoStepError, cold_and_warm
from jaxtrain.config import Loaded
from jaxtrain.config.data import CalledData
from jaxtrain.config.schema import Config
from jaxtrain.plan.search.own_step import own_functions
from jaxtrain.plan.workload.describe import describe_workload
from jaxtrain.plan.workload.record import Workload
from jaxtrain.runtime import distributed
from jaxtrain.runtime.cluster import detect_cluster
from jaxtrain.runtime.devices import FORMATS, peak_flops, usable_cores
from jaxtrain.runtime.host import restart_environment

PARTS = ("start", "limits", "blocks", "step", "cpu")
_CPU_LIMIT_SECONDS = 300


def measure(
    loaded: Loaded,
    name: str,
    overrides: Sequence[str],
    *,
    emulate: int | None,
    skip: Sequence[str],
    phase: Callable[[str], AbstractContextManager[object]],
) -> dict[str, Any]:
    """Measure a config.

    Args:
        loaded: the config.
        name: name or path of the config as the user gave it, for the runs whose start is timed.
        overrides: `key=value` settings as the user gave them, for the same runs.
        emulate: number of CPU devices to emulate; None: the devices of the machine.
        skip: parts of `PARTS` that are not measured; blocks need limits.
        phase: name of a part -> a context around it, which shows it to the user.

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
        "machine": _machine(),
    }
    # Before this process starts jax, because on a GPU it then takes the memory that these runs need.
    answer["start"] = None
    if "start" not in skip:
        with phase("starting a run twice"):
            answer["start"] = _start(name, overrides, emulate, reasons)
    distributed.start(emulate=emulate, compilation_cache=None)
    workload = described or describe_workload(config)
    import jax

    from jaxtrain.bench.whole_step import workload_step

    answer["jax"] = jax.__version__
    devices = jax.devices()
    answer["device"] = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    step, batches = workload_step(config, workload)
    step.batch_shardings(batches.spec())  # so that a batch that does not divide is an error before any measurement
    answer["limits"] = answer["blocks"] = answer["step"] = None
    measured = None
    if "step" not in skip:
        from jaxtrain.bench.whole_step import measure_step

        # Before the other parts, whose arrays and programs would count into the peaks of memory.
        with phase("timing the step"):
            measured = dataclasses.asdict(measure_step(step, batches, seed=config.seed))
    limits = None
    if "limits" not in skip:
        from jaxtrain.bench.limits import measure_limits

        with phase("measuring the device"):
            limits = measure_limits()
        found = dataclasses.asdict(limits)
        reasons |= {f"limits.{what}": why for what, why in found.pop("reasons").items()}
        answer["limits"] = found
    functions = own_functions(config)
    if functions:
        reasons.setdefault("blocks", f"the blocks of {functions} are not known")
    elif "blocks" not in skip and limits is not None:
        from jaxtrain.bench.blocks import time_blocks

        with phase("timing blocks"):
            timed = time_blocks(config, workload, step, limits)
        answer["blocks"] = [{**dataclasses.asdict(one), "share_of_roofline": one.share_of_roofline} for one in timed]
    if measured is not None:
        answer["step"] = _step(config, workload, measured, answer, reasons)
    # The choices of implementations and compiler options are known after the step was traced.
    answer["choices"] = list(step.choices)
    answer["compiler_options"] = dict(step.compiled_with)
    answer["cpu"] = None
    if "cpu" not in skip:
        with phase("comparing with the CPU"):
            answer["cpu"] = _cpu(config, answer, reasons)
    return answer | {"reasons": reasons}


def _machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def _start(
    name: str, overrides: Sequence[str], emulate: int | None, reasons: dict[str, str]
) -> dict[str, float] | None:
    if detect_cluster() is not None:
        # A run that is timed here would join the others, in place of this process.
        reasons["start"] = "the start of one process among several is not timed; run bench in a process alone"
        return None
    try:
        cold, warm = cold_and_warm(name, overrides, emulate=emulate)
    except NoStepError as error:
        reasons["start"] = str(error)
        return None
    return {
        "cold_seconds": cold.seconds,
        "warm_seconds": warm.seconds,
        "cold_over_warm": cold.seconds / warm.seconds,
    }


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
    joules, why = measured.pop("joules"), measured.pop("joules_reason")
    if joules is None:
        reasons["step.joules_per_unit"] = why
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
        "joules_per_unit": None if joules is None else joules / units,
    }


def _cpu(config: Config, answer: dict[str, Any], reasons: dict[str, str]) -> dict[str, float] | None:
    """Measure the same step on the CPU of a machine with an accelerator."""
    if answer["device"]["platform"] == "cpu":
        reasons["cpu"] = "no GPU here: the step was measured on the CPU"
        return None
    if answer["step"] is None:
        reasons["cpu"] = "the step was not measured"
        return None
    # The CPU is one device, so that nothing is sharded.
    parallel = {"auto": False} | dict.fromkeys(("pipe", "data", "fsdp", "expert", "context", "tensor"), 1)
    request = {"config": config.model_dump(mode="json") | {"parallel": parallel}}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jaxtrain.bench.step_on_cpu"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_CPU_LIMIT_SECONDS,
            env=restart_environment(environment, accelerator=False) or environment,
        )
    except subprocess.TimeoutExpired:
        reasons["cpu"] = f"not done within {_CPU_LIMIT_SECONDS} s"
        return None
    if done.returncode:
        reasons["cpu"] = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:200]
        return None
    seconds = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return {"seconds": seconds, "over_device": seconds / answer["step"]["seconds"]}
