"""`jaxtrain bench`: measures the limits of a device, and how much of them the step of a config reaches."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.bench.measure import PARTS, measure
from jaxtrain.commands.kinds import check_or_remark
from jaxtrain.commands.output import print_table, print_text
from jaxtrain.commands.own_code import own_code
from jaxtrain.config import load_config, shipped_configs
from jaxtrain.config.local_path import local_path
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.format import format_bytes
from jaxtrain.metrics.progress import Progress
from jaxtrain.runtime.files import strict_json
from jaxtrain.runtime.terminal import print_remark, printable


def run_bench(
    config: str,
    overrides: Sequence[str],
    *,
    json_path: str | None,
    out: str | None,
    skip: Sequence[str],
    emulate: int | None,
) -> int:
    """Measure a config and print the results; write JSON and a picture where they are asked for.

    Args:
        config: a shipped name or a path.
        overrides: `key=value` settings that replace those of the config.
        json_path: file for everything that was measured; None: no file.
        out: folder for bench.json and bench.svg, which is created; None: no folder.
        skip: parts that are not measured.
        emulate: number of CPU devices to emulate; None: the devices of the machine.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: the config cannot run, a part is not known, or a file cannot be written.
    """
    skip = [part for given in skip for part in given.split(",")]
    wrong = [part for part in skip if part not in PARTS]
    if wrong:
        raise ConfigError(f"--skip {wrong[0]}: no such part; there are {', '.join(PARTS)}")
    if "limits" in skip and "blocks" not in skip:
        raise ConfigError("--skip limits: blocks are compared with the limits; add --skip blocks")
    loaded = load_config(config, overrides=overrides, weights=False)
    loaded.check_described()
    check_or_remark(loaded)
    if loaded.config.parallel.auto:
        raise ConfigError("parallel.auto: a bench measures one layout; set the degrees, or leave parallel out")
    if json_path in shipped_configs():
        raise ConfigError(f"--json {json_path} is a config; give the file to write, as in --json {json_path}.json")
    paths = [local_path(json_path, what="--json")] if json_path else []
    folder = None if out is None else local_path(out, what="--out")
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            paths.append(folder / "bench.json")
        for path in paths:
            path.touch()  # before the measurements, which take minutes: a file that cannot be written is found here
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}; give another place") from None
    with own_code(loaded.config), Progress() as progress:
        answer = measure(loaded, config, overrides, emulate=emulate, skip=skip, phase=progress.phase)
    _print(answer)
    text = json.dumps(strict_json(answer), indent=2, allow_nan=False) + "\n"
    for path in paths:
        path.write_text(text, encoding="utf-8")
        print_remark(f"wrote {path}")
    if folder is not None:
        from jaxtrain.bench.picture import draw

        draw(answer, folder / "bench.svg")
        print_remark(f"wrote {folder / 'bench.svg'}")
    return 0


def _print(answer: dict[str, Any]) -> None:
    for title, (header, rows) in _tables(answer):
        if sys.stdout.isatty():
            _print_rich(title, header, rows)
        else:
            print_text(f"\n{title}")
            print_table(header, rows)


def _print_rich(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(header):
        # Figures are aligned at their ends; the first column and the reasons are text.
        figures = index > 0 and name != "why"
        table.add_column(name, justify="right" if figures else "left", overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(highlight=False)
    console.print()
    console.print(table)


def _tables(answer: dict[str, Any]) -> Iterator[tuple[str, tuple[Sequence[str], Sequence[Sequence[str]]]]]:
    """Make the title, header and rows of each table."""
    device, machine = answer["device"], answer["machine"]
    where = f"{device['count']} x {device['kind']}, {machine['cores']} cores of {machine['cpu']}"
    limits, start, step = answer["limits"], answer["start"], answer["step"]
    if limits is not None:
        rows = [(f"matmul {name}", f"{rate / 1e9:,.0f} GFLOP/s") for name, rate in limits["matmul"].items() if rate]
        rows.append(("memory", f"{limits['memory'] / 1e9:,.1f} GB/s"))
        if limits["all_reduce"]:
            rows.append(("sum over devices", f"{limits['all_reduce'] / 1e9:,.1f} GB/s"))
        yield f"{where}: limits", (("what", "measured"), rows)
    if answer["blocks"] is not None:
        rows = [
            (
                block["name"],
                str(block["count"]),
                f"{block['seconds'] * 1e3:.3g} ms",
                f"{block['roofline_seconds'] * 1e3:.3g} ms ({block['bound']})",
                f"{block['share_of_roofline']:.0%}",
            )
            for block in answer["blocks"]
        ]
        yield "blocks, forward and backward", (("block", "per step", "time", "roofline", "share"), rows)
    rows = []
    if step is not None:
        rows += [
            ("step", f"{step['seconds'] * 1e3:,.4g} ms (median of {step['num_steps']})"),
            (f"{step['unit']} per second", f"{step['units_per_second']:,.0f}"),
            ("model FLOPs per device", _rate(step["flops_per_second_per_device"])),
            ("share of the published peak (MFU)", _share(step["model_flops_utilization"])),
            ("share of the measured matmul rate", _share(step["share_of_measured_matmul"])),
            ("host time per step besides the program", f"{step['host_seconds'] * 1e3:.2f} ms"),
            ("memory planned by the compiler", _bytes(step["planned_bytes"])),
            ("peak memory of the device", _bytes(step["device_peak_bytes"])),
            ("peak memory of the process", _bytes(step["process_peak_bytes"])),
            (f"energy per {step['unit'].rstrip('s')}", _joules(step["joules_per_unit"])),
            ("tracing and compiling", f"{step['compile_seconds']:.1f} s"),
        ]
    if start is not None:
        rows += [
            ("start to first step, empty cache", f"{start['cold_seconds']:.1f} s"),
            ("start to first step, warm cache", f"{start['warm_seconds']:.1f} s ({start['cold_over_warm']:.1f} x)"),
        ]
    if answer["cpu"] is not None:
        rows.append(("the same step on the CPU", f"{answer['cpu']['over_device']:.1f} x as long"))
    if rows:
        yield f"{answer['config']} on {where}", (("what", "measured"), rows)
    if answer["reasons"]:
        yield "not measured", (("what", "why"), list(answer["reasons"].items()))


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:,.1f} GFLOP/s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _bytes(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def _joules(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} J"
