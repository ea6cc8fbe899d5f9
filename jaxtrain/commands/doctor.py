"""`jaxtrain doctor`: checks versions, devices, caches and speed, and gives the command that fixes each problem."""

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxtrain.commands.shared import print_facts, print_json, print_text
from jaxtrain.errors import first_line
from jaxtrain.metrics.format import format_bytes
from jaxtrain.metrics.runinfo import PACKAGES, package_versions
from jaxtrain.runtime import distributed
from jaxtrain.runtime.compiler import cache_folder

_LITTLE_DISK = 2 * 2**30

Facts = dict[str, Any]
# What is wrong, the command or setting that fixes it, and whether nothing can be trained before.
Problem = dict[str, Any]


def run(arguments: argparse.Namespace) -> int:
    """Check everything that a run needs, and print the results; return 2 if a problem is fatal, else 0."""
    facts: Facts = {}
    problems = list(_check_versions(facts))
    if not problems:
        problems += _check_devices(facts, arguments.emulate)
    problems += _check_storage(facts)
    if arguments.json:
        print_json({**facts, "problems": problems})
    else:
        print_facts(facts)
        for problem in problems:
            print_text(f"problem: {problem['what']}; {problem['mend']}")
        print_text(f"problems: {len(problems)}")
    return 2 if any(problem["fatal"] for problem in problems) else 0


def _problem(what: str, mend: str, *, fatal: bool = False) -> Problem:
    return {"what": what, "mend": mend, "fatal": fatal}


def _check_versions(facts: Facts) -> Iterator[Problem]:
    facts["versions"] = package_versions(PACKAGES)
    try:
        from flax import nnx  # noqa: F401  # with some versions of jax it cannot be imported
    except Exception as error:
        yield _problem(f"flax.nnx: {first_line(error)}", "pip install -U jax flax", fatal=True)


def _check_devices(facts: Facts, emulate: int | None) -> Iterator[Problem]:
    """Check what the devices are and how fast they compute."""
    try:
        distributed.start(emulate=emulate)
        import jax

        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts without a message that a plugin is installed
        platforms = os.environ.get("JAX_PLATFORMS")
        what = f"jax finds no device (JAX_PLATFORMS={platforms}): {first_line(error)}"
        yield _problem(what, "unset JAX_PLATFORMS, or reinstall jax", fatal=True)
        return
    from jaxtrain.runtime.devices import matmul_flops_per_second, sums_over_devices, unused_accelerator

    facts["devices"] = {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "process_count": jax.process_count(),
        "memory_bytes": (devices[0].memory_stats() or {}).get("bytes_limit"),
        "cpu_cores": os.cpu_count(),
    }
    unused = unused_accelerator(devices[0].platform)
    if unused is not None and emulate is None:
        what, _, mend = unused.partition(": ")
        yield _problem(what, mend)
    facts["matmul_gflops_per_second"] = {
        dtype: matmul_flops_per_second(dtype) / 1e9 for dtype in ("float32", "bfloat16")
    }
    facts["collective_works"] = sums_over_devices()
    if not facts["collective_works"]:
        what = f"a sum over {len(devices)} devices gives a wrong number"
        yield _problem(what, "run with NCCL_P2P_DISABLE=1 to see whether a link is at fault", fatal=True)


def _check_storage(facts: Facts) -> Iterator[Problem]:
    """Note the folder of the compilation cache, and check the free space of the disk."""
    facts["compilation_cache"] = cache_folder("auto")
    free_bytes = shutil.disk_usage(Path.cwd()).free
    facts["disk_free_bytes"] = free_bytes
    if free_bytes < _LITTLE_DISK:
        yield _problem(f"only {format_bytes(free_bytes)} are free here", "free space, or use another --run-dir")
