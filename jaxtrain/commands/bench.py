"""`jaxtrain bench`: measures the limits of a device, and how much of them the step of a config reaches."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.bench.measure import PARTS, measure
from jaxtrain.commands.shared import json_text, load_described, own_code, print_table, print_text, write_output, writes
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.progress import Progress

# Part of the answer -> key, label, the unit in which it is shown, and how much of the key's unit that is.
_SHOWN = {
    "limits": (
        ("memory", "memory", "GB/s", 1e9),
        ("all_reduce", "sum over devices", "GB/s", 1e9),
    ),
    "step": (
        ("seconds", "step (median)", "ms", 1e-3),
        ("flops_per_second_per_device", "model FLOPs per device", "GFLOP/s", 1e9),
        ("model_flops_utilization", "share of the published peak (MFU)", "%", 0.01),
        ("share_of_measured_matmul", "share of the measured matmul rate", "%", 0.01),
        ("host_seconds", "host time per step outside the program", "ms", 1e-3),
        ("planned_bytes", "memory planned by the compiler", "MiB", 2**20),
        ("device_peak_bytes", "peak memory of the device", "MiB", 2**20),
        ("process_peak_bytes", "peak memory of the process", "MiB", 2**20),
        ("compile_seconds", "tracing and compiling", "s", 1),
    ),
    "start": (
        ("cold_seconds", "start to first step, empty cache", "s", 1),
        ("warm_seconds", "start to first step, warm cache", "s", 1),
    ),
}


def run(arguments: argparse.Namespace) -> int:
    """Measure a config and print the results; write JSON if it is asked for; return 0.

    Raises:
        ConfigError: the config cannot run, a part does not exist, or a file cannot be written.
    """
    skip = [part for parts in arguments.skip for part in parts.split(",")]
    for part in skip:
        if part not in PARTS:
            raise ConfigError(f"--skip {part}: no such part; there are {', '.join(PARTS)}")
    loaded = load_described(arguments)
    if loaded.config.parallel.auto:
        raise ConfigError("parallel.auto: a bench measures one layout; set the degrees, or leave parallel out")
    if arguments.json is not None:
        with writes("--json"):
            Path(arguments.json).touch()  # before the measurements, which take minutes
    with own_code(loaded.config), Progress() as progress:
        answer = measure(
            loaded,
            arguments.config,
            arguments.overrides,
            emulate=arguments.emulate,
            skip=skip,
            phase=progress.phase,
            step_budget_seconds=arguments.seconds,
        )
    _print_answer(answer)
    if arguments.json is not None:
        write_output("--json", arguments.json, f"{json_text(answer)}\n")
    return 0


def _print_answer(answer: Mapping[str, Any]) -> None:
    device = answer["device"]
    machine = answer["machine"]
    rows = []
    if answer["limits"] is not None:
        for name, rate in answer["limits"]["matmul"].items():
            rows.append((f"matmul {name}", _with_unit(rate, "GFLOP/s", 1e9)))
    for part, entries in _SHOWN.items():
        if answer[part] is None:
            continue
        for key, label, unit, scale in entries:
            rows.append((label, _with_unit(answer[part][key], unit, scale)))
        if part == "step":
            rows.append((f"{answer[part]['unit']} per second", _with_unit(answer[part]["units_per_second"], "", 1)))
    devices = f"{device['count']} x {device['kind']}, {machine['cores']} cores of {machine['cpu']}"
    print_text(f"\n{answer['config']} on {devices}")
    print_table(("what", "measured"), rows)
    if answer["reasons"]:
        print_text("\nnot measured")
        print_table(("what", "why"), list(answer["reasons"].items()))


def _with_unit(value: float | None, unit: str, scale: float) -> str:
    """Return a number with three digits at least, and its unit; a dash for None."""
    if value is None:
        return "-"
    scaled = value / scale
    text = f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3g}"
    return f"{text} {unit}".rstrip()
