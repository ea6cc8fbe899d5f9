"""`jaxtrain doctor`: checks versions, devices, caches and speed, and gives the command that fixes each problem."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jaxtrain import __version__
from jaxtrain.commands.output import print_json, print_text
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.format import format_bytes
from jaxtrain.metrics.runinfo import PACKAGES, package_versions
from jaxtrain.runtime import distributed
from jaxtrain.runtime.compiler import cache_folder
from jaxtrain.runtime.devices import describe_devices, unused_accelerator

_OPTIONAL = {"scikit-learn": "digits", "wandb": "wandb", "trackio": "trackio", "mlflow-skinny": "mlflow"}
_LITTLE_DISK = 2 * 2**30
_CANNOT_WORK = 2

# The flax.nnx of these versions cannot be imported with jax from 0.11.1 on.
_NNX_BROKEN_FLAX = ((0, 12, 8), (0, 12, 9))
_NNX_BROKEN_SINCE_JAX = (0, 11, 1)
_OLDEST = {"jax": (0, 10, 2), "flax": (0, 12, 8)}


@dataclass(frozen=True)
class Problem:
    """A problem of the installation or the machine.

    Attributes:
        what: what is wrong.
        mend: the command or setting that fixes it.
        fatal: whether nothing can be trained before it is fixed.
    """

    what: str
    mend: str
    fatal: bool = False


@dataclass
class Report:
    """The results of the checks, in their order.

    Attributes:
        facts: values for JSON.
        lines: (name, text) for the terminal.
        problems: all problems that were found.
    """

    facts: dict[str, object] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def run_doctor(*, emulate: int | None, as_json: bool) -> int:
    """Check everything that a run needs, and print the results.

    Args:
        emulate: number of CPU devices to emulate; None: the devices of the machine.
        as_json: whether one JSON object is printed.

    Returns:
        The exit code: 2 where a problem is fatal, else 0.
    """
    report = Report()
    versions = package_versions(PACKAGES)
    versions["jaxtrain"] = versions["jaxtrain"] or __version__
    _check_versions(report, versions)
    if not any(problem.fatal for problem in report.problems):
        _check_devices(report, emulate)
    _check_cache(report)
    _check_disk(report)
    _check_optional(report)
    if as_json:
        print_json({**report.facts, "problems": [asdict(problem) for problem in report.problems]})
    else:
        _print(report)
    return _CANNOT_WORK if any(problem.fatal for problem in report.problems) else 0


def _print(report: Report) -> None:
    width = max(len(name) for name, _ in report.lines)
    for name, text in report.lines:
        print_text(f"{name:<{width}}  {text}")
    for problem in report.problems:
        print_text(f"problem: {problem.what}; {problem.mend}")
    print_text("no problem found" if not report.problems else f"problems: {len(report.problems)}")


def _numbers(version: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version: 0.12.8rc1 -> (0, 12, 8)."""
    digits = ("".join(c for c in part.split("rc")[0].split("dev")[0] if c.isdigit()) for part in version.split(".")[:3])
    return tuple(int(part) for part in digits if part)


def version_problems(versions: Mapping[str, str | None]) -> list[Problem]:
    """Find the problems of a set of package versions.

    Args:
        versions: name of a package -> its version; None where it is missing.
    """
    problems = [
        Problem(f"{name} is not installed", f"pip install {name}", fatal=True)
        for name, version in versions.items()
        if version is None
    ]
    for name, oldest in _OLDEST.items():
        version = versions.get(name)
        if version is not None and _numbers(version) < oldest:
            text = ".".join(map(str, oldest))
            problems.append(Problem(f"{name} {version} is older than {text}", f"pip install -U '{name}>={text}'", True))
    jax_version, flax_version = versions.get("jax"), versions.get("flax")
    if jax_version is not None and flax_version is not None:
        newer_jax = _numbers(jax_version) >= _NNX_BROKEN_SINCE_JAX
        if newer_jax and _numbers(flax_version) in _NNX_BROKEN_FLAX:
            what = f"flax {flax_version} does not work with jax {jax_version}: its nnx does not import"
            problems.append(Problem(what, "pip install -U 'flax>=0.12.10'", fatal=True))
    return problems


def _check_versions(report: Report, versions: Mapping[str, str | None]) -> None:
    report.facts["versions"] = dict(versions)
    report.lines.append(("versions", ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())))
    report.problems += version_problems(versions)
    if report.problems:
        return
    try:
        from flax import nnx

        report.lines.append(("jax and flax", f"a pair that works ({nnx.__name__} imports)"))
    except Exception as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        report.problems.append(Problem(f"flax.nnx does not import: {reason}", "pip install -U jax flax", fatal=True))


def _check_devices(report: Report, emulate: int | None) -> None:
    try:
        distributed.start(emulate=emulate, compilation_cache=None)
        import jax

        devices = jax.devices()
    except ConfigError:
        raise
    except (RuntimeError, AssertionError) as error:  # a bare assert where a plugin is missing
        reason = str(error).splitlines()[0][:300] if str(error) else f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}"
        report.problems.append(Problem(f"jax finds no device: {reason}", "unset JAX_PLATFORMS, or reinstall jax", True))
        return
    platform = devices[0].platform
    stats = jax.local_devices()[0].memory_stats() or {}
    memory = stats.get("bytes_limit")
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
    report.lines.append(("devices", f"{describe_devices()} ({platform}){each}"))
    report.lines.append(("host", f"{os.cpu_count()} CPU cores, {format_bytes(host)} of memory"))
    unused = unused_accelerator(platform)
    if unused is not None and emulate is None:
        what, _, mend = unused.partition(": ")
        report.problems.append(Problem(what, mend))
    _measure(report, len(devices))


def _measure(report: Report, num_devices: int) -> None:
    from jaxtrain.runtime.devices import matmul_flops_per_second, sums_over_devices

    rates = {dtype: matmul_flops_per_second(dtype) / 1e9 for dtype in ("float32", "bfloat16")}
    report.facts["matmul_gflops_per_second"] = rates
    shown = ", ".join(f"{rate:,.0f} GFLOP/s in {dtype}" for dtype, rate in rates.items())
    report.lines.append(("matmul", f"{shown} (one device)"))
    report.facts["collective_works"] = None
    if num_devices > 1:
        works = sums_over_devices()
        report.facts["collective_works"] = works
        report.lines.append(("collective", f"a sum over {num_devices} devices is {'right' if works else 'WRONG'}"))
        if not works:
            what = f"a sum over {num_devices} devices gives a wrong number"
            mend = "run with NCCL_P2P_DISABLE=1 to see whether a link is at fault, and test the devices one by one"
            report.problems.append(Problem(what, mend, fatal=True))


def _check_cache(report: Report) -> None:
    folder = cache_folder("auto")
    assert folder is not None
    size = _folder_bytes(folder)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    report.facts["compilation_cache"] = {"folder": str(folder), "bytes": size, "writable": writable}
    report.lines.append(("cache", f"{folder}, {format_bytes(size)}{'' if writable else ', not writable'}"))
    if not writable:
        what = f"the compilation cache {folder} cannot be written"
        report.problems.append(Problem(what, "export JAXTRAIN_CACHE_DIR=FOLDER, or train with compilation_cache=null"))


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:  # another run may replace files meanwhile
                continue
    return total


def _check_disk(report: Report) -> None:
    free = shutil.disk_usage(Path.cwd()).free
    report.facts["disk_free_bytes"] = free
    report.lines.append(("disk", f"{format_bytes(free)} free in {Path.cwd()}"))
    if free < _LITTLE_DISK:
        what = f"only {format_bytes(free)} are free here"
        report.problems.append(Problem(what, "free space, or write elsewhere with --run-dir"))


def _check_optional(report: Report) -> None:
    found = package_versions(tuple(_OPTIONAL))
    report.facts["optional"] = {name: found[name] for name in _OPTIONAL}
    texts = [
        f"{name} {found[name]}" if found[name] else f"{name} missing (pip install 'jaxtrain[{extra}]')"
        for name, extra in _OPTIONAL.items()
    ]
    report.lines.append(("optional", ", ".join(texts)))
