"""Which GPUs of its node a process takes, where Slurm or Open MPI started it. No jax here.

jax gives every process that they start one GPU, by its number on the node: right for a process per GPU, and with one
process per node all GPUs but the first are hidden.
"""

import os
import re

# What the runtimes of NVIDIA and AMD, and Slurm through them, show a process.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def local_device_ids() -> list[int] | None:
    """Returns `local_device_ids` of `jax.distributed.initialize` for this process.

    Returns:
        The numbers of this process's GPUs among those that it sees; empty: all that it sees; None: what
        JAX_LOCAL_DEVICE_IDS says, or what jax decides where it is not known how many processes share the node.
    """
    if os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    place = _place_on_node()
    if place is None:
        return None
    index, processes = place
    if processes == 1:
        return []
    visible, on_node = _num_visible(), _whole("SLURM_GPUS_ON_NODE")
    if visible is not None and (visible < processes or visible < (on_node or 0) or _slurm_divides()):
        # Each process sees its own GPUs only, counted from 0.
        return []
    share = max((visible or on_node or processes) // processes, 1)
    return list(range(index * share, (index + 1) * share))


def _place_on_node() -> tuple[int, int] | None:
    """Returns the number of this process on its node and how many there are, or None where nobody says."""
    # Open MPI first, as in jax: under Slurm each of its daemons is a task, with the processes below it.
    index, processes = _whole("OMPI_COMM_WORLD_LOCAL_RANK"), _whole("OMPI_COMM_WORLD_LOCAL_SIZE")
    if index is None or processes is None:
        index, processes = _whole("SLURM_LOCALID"), _slurm_tasks_on_node()
    return None if index is None or processes is None else (index, processes)


def _slurm_tasks_on_node() -> int | None:
    """Returns this node's entry in the counts of a Slurm step: "2(x3),1" is three nodes of two tasks and one of one."""
    counts: list[int] = []
    for entry in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    node = _whole("SLURM_NODEID")
    if len(set(counts)) == 1:
        return counts[0]
    return None if node is None or node >= len(counts) else counts[node]


def _slurm_divides() -> bool:
    """Returns whether Slurm was asked to bind GPUs to tasks."""
    return bool(os.environ.get("SLURM_GPUS_PER_TASK")) or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")


def _num_visible() -> int | None:
    """Returns how many GPUs the environment shows this process, or None where it does not say."""
    shown = next((os.environ[name] for name in _VISIBLE if os.environ.get(name)), None)
    return None if shown is None else len(shown.split(","))


def _whole(name: str) -> int | None:
    """Returns a whole number of the environment, or None where there is none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None
