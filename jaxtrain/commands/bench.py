"""`jaxtrain bench`: measures the limits of a device, and how much of them the step of a config reaches."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.bench.measure import PARTS, measure
from jaxtrain.commands.shared import check_or_remark, own_code, print_table, print_text
from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.progress import Progress
from jaxtrain.runtime.files import strict_json
from jaxtrain.runtime.terminal import print_remark


def run_bench(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain bench`: measures a config and prints the results; writes JSON where it is asked for.

    Raises:
        ConfigError: the config cannot run, a part is not known, or a file cannot be written.
    """
    skip = [part for given in arguments.skip for part in given.split(",")]
    wrong = [part for part in skip if part not in PARTS]
    if wrong:
        raise ConfigError(f"--skip {wrong[0]}: no such part; there are {', '.join(PARTS)}")
    loaded = load_config(arguments.config, overrides=arguments.overrides, weights=False)
    loaded.check_described()
    check_or_remark(loaded)
    if loaded.config.parallel.auto:
        raise ConfigError("parallel.auto: a bench measures one layout; set the degrees, or leave parallel out")
    path = None if arguments.json is None else Path(arguments.json)
    try:
        if path is not None:
            path.touch()  # before the measurements, which take minutes: a file that cannot be written is found here
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}; give another path") from None
    with own_code(loaded.config), Progress() as progress:
        name, overrides, emulate = arguments.config, arguments.overrides, arguments.emulate
        how: dict[str, Any] = {"emulate": emulate, "skip": skip, "phase": progress.phase}
        answer = measure(loaded, name, overrides, **how, step_budget_seconds=arguments.seconds)
    for title, header, rows in _tables(answer):
        print_text(f"\n{title}")
        print_table(header, rows)
    if path is not None:
        path.write_text(json.dumps(strict_json(answer), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        print_remark(f"wrote {path}")
    return 0


def _tables(answer: dict[str, Any]) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """The title, header and rows of each table."""
    device, machine = answer["device"], answer["machine"]
    where = f"{device['count']} x {device['kind']}, {machine['cores']} cores of {machine['cpu']}"
    limits, start, step = answer["limits"], answer["start"], answer["step"]
    if limits is not None:
        rows = [(f"matmul {name}", _shown(rate, 1e9, ",.0f", "GFLOP/s")) for name, rate in limits["matmul"].items()]
        rows.append(("memory", _shown(limits["memory"], 1e9, ",.1f", "GB/s")))
        rows.append(("sum over devices", _shown(limits["all_reduce"], 1e9, ",.1f", "GB/s")))
        yield f"{where}: limits", ("what", "measured"), rows
    rows = []
    if step is not None:
        rows += [
            ("step", f"{step['seconds'] * 1e3:,.4g} ms (median of {step['num_steps']})"),
            (f"{step['unit']} per second", f"{step['units_per_second']:,.0f}"),
            ("model FLOPs per device", _shown(step["flops_per_second_per_device"], 1e9, ",.1f", "GFLOP/s")),
            ("share of the published peak (MFU)", _shown(step["model_flops_utilization"], 0.01, ".1f", "%")),
            ("share of the measured matmul rate", _shown(step["share_of_measured_matmul"], 0.01, ".1f", "%")),
            ("host time per step outside the program", f"{step['host_seconds'] * 1e3:.2f} ms"),
            ("memory planned by the compiler", _shown(step["planned_bytes"], 2**20, ",.1f", "MiB")),
            ("peak memory of the device", _shown(step["device_peak_bytes"], 2**20, ",.1f", "MiB")),
            ("peak memory of the process", _shown(step["process_peak_bytes"], 2**20, ",.1f", "MiB")),
            ("tracing and compiling", f"{step['compile_seconds']:.1f} s"),
        ]
    if start is not None:
        rows += [
            ("start to first step, empty cache", f"{start['cold_seconds']:.1f} s"),
            ("start to first step, warm cache", f"{start['warm_seconds']:.1f} s ({start['cold_over_warm']:.1f} x)"),
        ]
    if rows:
        yield f"{answer['config']} on {where}", ("what", "measured"), rows
    if answer["reasons"]:
        yield "not measured", ("what", "why"), list(answer["reasons"].items())


def _shown(value: float | None, scale: float, form: str, unit: str) -> str:
    return "-" if value is None else f"{value / scale:{form}} {unit}"
