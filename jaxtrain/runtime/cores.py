"""The number of cores that this process may use."""

import os


def usable_cores() -> int:
    """Returns the number of cores that this process may use, which in a cluster may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
