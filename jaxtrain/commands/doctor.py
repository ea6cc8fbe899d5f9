"""`jaxtrain doctor`: checks versions, devices, caches and speed, and gives the command that fixes each problem."""

import argparse
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jaxtrain.commands.shared import print_json, print_table, print_text
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.format import format_bytes
from jaxtrain.metrics.runinfo import PACKAGES, package_versions
from jaxtrain.runtime import accelerators, distributed
from jaxtrain.runtime.compilation_cache import cache_folder

_LITTLE_DISK = 2 * 2**30
_CANNOT_WORK = 2


@dataclass(frozen=True)
class Problem:
    """What is wrong, the command or setting that fixes it, and whether nothing can be trained before."""

    what: str
    mend: str
    fatal: bool = False


@dataclass
class Report:
    """The results of the checks: values for JSON, (name, text) for the terminal, and the problems."""

    facts: dict[str, object] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> int:
    """Check everything that a run needs, and print the results; 2 where a problem is fatal, else 0."""
    report = Report()
    _check_versions(report)
    if not report.problems:
        _check_devices(report, arguments.emulate)
    _check_cache(report)
    free = shutil.disk_usage(Path.cwd()).free
    report.facts["disk_free_bytes"] = free
    report.lines.append(("disk", f"{format_bytes(free)} free in {Path.cwd()}"))
    if free < _LITTLE_DISK:
        what = f"only {format_bytes(free)} are free here"
        report.problems.append(Problem(what, "free space, or write elsewhere with --run-dir"))
    if arguments.json:
        print_json({**report.facts, "problems": [asdict(problem) for problem in report.problems]})
    else:
        print_table(("what", "found"), report.lines)
        for problem in report.problems:
            print_text(f"problem: {problem.what}; {problem.mend}")
        print_text("no problem found" if not report.problems else f"problems: {len(report.problems)}")
    return _CANNOT_WORK if any(problem.fatal for problem in report.problems) else 0


def _check_versions(report: Report) -> None:
    versions = package_versions(PACKAGES)
    report.facts["versions"] = dict(versions)
    report.lines.append(("versions", ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())))
    for name, version in versions.items():
        if version is None and name != "jaxtrain":  # which a copy of the sources has none of
            report.problems.append(Problem(f"{name} is not installed", f"pip install {name}", fatal=True))
    if not report.problems:
        try:
            from flax import nnx  # noqa: F401  # of some pairs of versions with jax it cannot be imported
        except Exception as error:
            report.problems.append(Problem(f"flax.nnx: {_first_line(error)}", "pip install -U jax flax", fatal=True))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _check_devices(report: Report, emulate: int | None) -> None:
    try:
        distributed.start(emulate=emulate, compilation_cache=None)
        import jax

        devices = jax.devices()
    except ConfigError:
        raise
    except (RuntimeError, AssertionError) as error:  # a bare assert where a plugin is missing
        what = f"jax finds no device (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}): {_first_line(error)}"
        report.problems.append(Problem(what, "unset JAX_PLATFORMS, or reinstall jax", fatal=True))
        return
    platform = devices[0].platform
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    report.facts["devices"] = {
        "platform": platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "process_count": jax.process_count(),
        "memory_bytes": memory,
        "cpu_cores": os.cpu_count(),
        "host_memory_bytes": host,
    }
    each = "" if memory is None else f", {format_bytes(memory)} each"
    report.lines.append(("devices", f"{accelerators.describe_devices()} ({platform}){each}"))
    report.lines.append(("host", f"{os.cpu_count()} CPU cores, {format_bytes(host)} of memory"))
    unused = accelerators.unused_accelerator(platform)
    if unused is not None and emulate is None:
        what, _, mend = unused.partition(": ")
        report.problems.append(Problem(what, mend))
    _measure(report, len(devices))


def _measure(report: Report, num_devices: int) -> None:
    from jaxtrain.runtime.device_speed import matmul_flops_per_second, sums_over_devices

    rates = {dtype: matmul_flops_per_second(dtype) / 1e9 for dtype in ("float32", "bfloat16")}
    report.facts["matmul_gflops_per_second"] = rates
    shown = ", ".join(f"{rate:,.0f} GFLOP/s in {dtype}" for dtype, rate in rates.items())
    report.lines.append(("matmul", f"{shown} (one device)"))
    works = sums_over_devices() if num_devices > 1 else None
    report.facts["collective_works"] = works
    if works is not None:
        report.lines.append(("collective", f"a sum over {num_devices} devices is {'right' if works else 'WRONG'}"))
    if works is False:
        what = f"a sum over {num_devices} devices gives a wrong number"
        mend = "run with NCCL_P2P_DISABLE=1 to see whether a link is at fault, and test the devices one by one"
        report.problems.append(Problem(what, mend, fatal=True))


def _check_cache(report: Report) -> None:
    folder = cache_folder("auto")
    assert folder is not None
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(existing, os.W_OK)
    report.facts["compilation_cache"] = {"folder": str(folder), "bytes": size, "writable": writable}
    report.lines.append(("cache", f"{folder}, {format_bytes(size)}"))
    if not writable:
        what = f"the compilation cache {folder} cannot be written"
        report.problems.append(Problem(what, "export JAXTRAIN_CACHE_DIR=FOLDER, or train with compilation_cache=null"))
