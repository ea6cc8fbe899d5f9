"""`jaxtrain doctor`: checks versions, devices, caches and speed, and gives the command that fixes each problem."""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from jaxtrain.commands.shared import print_json, print_table, print_text
from jaxtrain.errors import first_line
from jaxtrain.metrics.format import format_bytes
from jaxtrain.metrics.runinfo import PACKAGES, package_versions
from jaxtrain.runtime import distributed
from jaxtrain.runtime.compiler import cache_folder

_LITTLE_DISK = 2 * 2**30


def _problem(what: str, mend: str, *, fatal: bool = False) -> dict[str, Any]:
    """What is wrong, the command or setting that fixes it, and whether nothing can be trained before."""
    return {"what": what, "mend": mend, "fatal": fatal}


def run(arguments: argparse.Namespace) -> int:
    """Check everything that a run needs, and print the results; 2 where a problem is fatal, else 0."""
    problems: list[dict[str, Any]] = []
    facts: dict[str, object] = {"versions": _versions(problems)}
    if not problems:
        facts |= _devices(problems, arguments.emulate)
    folder = cache_folder("auto")
    assert folder is not None
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    writable = os.access(next(path for path in (folder, *folder.parents) if path.exists()), os.W_OK)
    facts["compilation_cache"] = {"folder": str(folder), "bytes": size, "writable": writable}
    if not writable:
        mend = "export JAXTRAIN_CACHE_DIR=FOLDER, or train with compilation_cache=null"
        problems.append(_problem(f"the compilation cache {folder} cannot be written", mend))
    facts["disk_free_bytes"] = free = shutil.disk_usage(Path.cwd()).free
    if free < _LITTLE_DISK:
        problems.append(_problem(f"only {format_bytes(free)} are free here", "free space, or use another --run-dir"))
    if arguments.json:
        print_json({**facts, "problems": problems})
    else:
        print_table(("what", "found"), [(name.replace("_", " "), _shown(name, fact)) for name, fact in facts.items()])
        for problem in problems:
            print_text(f"problem: {problem['what']}; {problem['mend']}")
        print_text("no problem found" if not problems else f"problems: {len(problems)}")
    return 2 if any(problem["fatal"] for problem in problems) else 0


def _shown(name: str, fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_shown(key, value)}" for key, value in fact.items())
    if name.endswith("bytes"):
        return format_bytes(fact)
    return f"{fact:,.0f}" if isinstance(fact, float) else "-" if fact is None else str(fact)


def _versions(problems: list[dict[str, Any]]) -> dict[str, str | None]:
    versions = package_versions(PACKAGES)
    for name, version in versions.items():
        if version is None and name != "jaxtrain":  # which a copy of the sources has none of
            problems.append(_problem(f"{name} is not installed", f"pip install {name}", fatal=True))
    if not problems:
        try:
            from flax import nnx  # noqa: F401  # of some pairs of versions with jax it cannot be imported
        except Exception as error:
            problems.append(_problem(f"flax.nnx: {first_line(error)}", "pip install -U jax flax", fatal=True))
    return versions


def _devices(problems: list[dict[str, Any]], emulate: int | None) -> dict[str, object]:
    """What the devices are and how fast they compute; nothing where jax finds none."""
    try:
        distributed.start(emulate=emulate, compilation_cache=None)
        import jax

        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # a bare assert where a plugin is missing
        what = f"jax finds no device (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}): {first_line(error)}"
        problems.append(_problem(what, "unset JAX_PLATFORMS, or reinstall jax", fatal=True))
        return {}
    from jaxtrain.runtime.devices import matmul_flops_per_second, sums_over_devices, unused_accelerator

    found = {
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
        problems.append(_problem(what, mend))
    rates = {dtype: matmul_flops_per_second(dtype) / 1e9 for dtype in ("float32", "bfloat16")}
    works = sums_over_devices() if len(devices) > 1 else None
    if works is False:
        mend = "run with NCCL_P2P_DISABLE=1 to see whether a link is at fault, and test the devices one by one"
        problems.append(_problem(f"a sum over {len(devices)} devices gives a wrong number", mend, fatal=True))
    return {"devices": found, "matmul_gflops_per_second": rates, "collective_works": works}
