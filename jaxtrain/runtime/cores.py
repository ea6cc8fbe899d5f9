"""How many cores there are for this process."""

import os


def usable_cores() -> int:
    """The cores that this process may use; a cluster gives a process fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
