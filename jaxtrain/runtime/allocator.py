"""Settings of glibc's malloc for steps on CPU: memory is kept between steps, in huge pages.

XLA allocates a step's temporaries by malloc, which maps and unmaps large blocks. That costs 150,000 page faults and a
tenth of the time of a step (6 layers, width 384, 4,096 tokens, 2 cores; docs/benchmarks.md). Malloc reads its settings
when a process starts, so the command replaces its own process once.
"""

import os
import platform
import sys
from collections.abc import Mapping

SETTINGS = {
    # Huge pages where malloc grows its heap: 512 times fewer faults.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # Large blocks come from the heap and stay in it, where they would otherwise be mapped again for every step.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


def restart_environment(environment: Mapping[str, str], *, accelerator: bool) -> dict[str, str] | None:
    """Returns the environment to start a training process with, or None where a restart would change nothing.

    Args:
        environment: Environment of this process; if it already sets malloc, it is not changed.
        accelerator: Whether steps run on a GPU or TPU, whose memory malloc does not manage.
    """
    own = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in environment)
    if own or accelerator or platform.libc_ver()[0] != "glibc":
        return None
    return {**environment, **SETTINGS}


def restart(*, accelerator: bool) -> None:
    """Starts this command again with `SETTINGS`, in this process; returns where that would change nothing.

    Args:
        accelerator: Whether steps run on a GPU or TPU, whose memory malloc does not manage.
    """
    environment = restart_environment(os.environ, accelerator=accelerator)
    if environment is not None and sys.executable and sys.orig_argv:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
