"""`jaxtrain doctor`: checks versions, devices, caches and speed, and gives the command that fixes each problem."""

import argparse
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxtrain.commands.shared import print_json, print_table, print_text, value_text
from jaxtrain.errors import first_line
from jaxtrain.metrics.format import format_bytes
from jaxtrain.metrics.runinfo import PACKAGES, package_versions
from jaxtrain.runtime import distributed
from jaxtrain.runtime.compiler import cache_folder

_LITTLE_DISK = 2 * 2**30


@dataclass(frozen=True)
class Problem:
    """What is wrong, the command or setting that fixes it, and whether nothing can be trained before."""

    what: str
    mend: str
    fatal: bool = False


Facts = dict[str, object]


def run(arguments: argparse.Namespace) -> int:
    """Check everything that a run needs, and print the results; return 2 if a problem is fatal, else 0."""
    facts: Facts = {}
    problems = list(_check_versions(facts))
    if not problems:
        problems += _check_devices(facts, arguments.emulate)
    problems += _check_storage(facts)
    if arguments.json:
        print_json({**facts, "problems": [asdict(problem) for problem in problems]})
    else:
        rows = [(name.replace("_", " "), value_text(name, fact)) for name, fact in facts.items()]
        print_table(("what", "found"), rows)
        for problem in problems:
            print_text(f"problem: {problem.what}; {problem.mend}")
        print_text(f"problems: {len(problems)}")
    return 2 if any(problem.fatal for problem in problems) else 0


def _check_versions(facts: Facts) -> Iterator[Problem]:
    versions = package_versions(PACKAGES)
    facts["versions"] = versions
    for name, version in versions.items():
        if version is None and name != "jaxtrain":  # a copy of the sources has no version
            yield Problem(f"{name} is not installed", f"pip install {name}", fatal=True)
    try:
        from flax import nnx  # noqa: F401  # with some versions of jax it cannot be imported
    except Exception as error:
        yield Problem(f"flax.nnx: {first_line(error)}", "pip install -U jax flax", fatal=True)


def _check_devices(facts: Facts, emulate: int | None) -> Iterator[Problem]:
    """Check what the devices are and how fast they compute."""
    try:
        distributed.start(emulate=emulate, compilation_cache=None)
        import jax

        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts without a message that a plugin is installed
        platforms = os.environ.get("JAX_PLATFORMS")
        what = f"jax finds no device (JAX_PLATFORMS={platforms}): {first_line(error)}"
        yield Problem(what, "unset JAX_PLATFORMS, or reinstall jax", fatal=True)
        return
    from jaxtrain.runtime.devices import matmul_flops_per_second, sums_over_devices, unused_accelerator

    facts["devices"] = {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "process_count": jax.process_count(),
        "memory_bytes": (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"),
        "cpu_cores": os.cpu_count(),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    unused = unused_accelerator(devices[0].platform)
    if unused is not None and emulate is None:
        what, _, mend = unused.partition(": ")
        yield Problem(what, mend)
    facts["matmul_gflops_per_second"] = {
        dtype: matmul_flops_per_second(dtype) / 1e9 for dtype in ("float32", "bfloat16")
    }
    works = sums_over_devices() if len(devices) > 1 else None
    facts["collective_works"] = works
    if works is False:
        mend = "run with NCCL_P2P_DISABLE=1 to see whether a link is at fault, and test the devices one by one"
        what = f"a sum over {len(devices)} devices gives a wrong number"
        yield Problem(what, mend, fatal=True)


def _check_storage(facts: Facts) -> Iterator[Problem]:
    """Check the compilation cache and the free space of the disk."""
    folder = cache_folder("auto")
    assert folder is not None
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    is_writable = os.access(existing, os.W_OK)
    facts["compilation_cache"] = {"folder": str(folder), "bytes": size, "writable": is_writable}
    if not is_writable:
        mend = "export JAXTRAIN_CACHE_DIR=FOLDER, or train with compilation_cache=null"
        yield Problem(f"the compilation cache {folder} cannot be written", mend)
    free_bytes = shutil.disk_usage(Path.cwd()).free
    facts["disk_free_bytes"] = free_bytes
    if free_bytes < _LITTLE_DISK:
        what = f"only {format_bytes(free_bytes)} are free here"
        yield Problem(what, "free space, or use another --run-dir")
