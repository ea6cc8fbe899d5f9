"""Chooses the GPUs of its node for a process that Slurm or Open MPI started. No jax here.

By itself jax gives every such process one GPU, by the number of the process on the node. That is correct with one
process per GPU, but with one process per node it hides all GPUs except the first.
"""

import os
import re

# The variables with which the runtimes of NVIDIA and AMD, and Slurm through them, list the GPUs of a process.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def local_device_ids() -> list[int] | None:
    """Returns the argument `local_device_ids` of `jax.distributed.initialize` for this process.

    Returns:
        The numbers of this process's GPUs among those that it sees; an empty list: all that it sees; None: those of
        JAX_LOCAL_DEVICE_IDS or, where the number of processes on the node is not known, those that jax chooses.
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
        # Each process sees only its own GPUs, numbered from 0.
        return []
    share = max((visible or on_node or processes) // processes, 1)
    return list(range(index * share, (index + 1) * share))


def _place_on_node() -> tuple[int, int] | None:
    """Returns the number of this process on its node and the number of processes there, or None if not known."""
    # Open MPI comes first, as in jax: under Slurm each of its daemons is a task that starts several processes.
    index, processes = _whole("OMPI_COMM_WORLD_LOCAL_RANK"), _whole("OMPI_COMM_WORLD_LOCAL_SIZE")
    if index is None or processes is None:
        index, processes = _whole("SLURM_LOCALID"), _slurm_tasks_on_node()
    return None if index is None or processes is None else (index, processes)


def _slurm_tasks_on_node() -> int | None:
    """Returns this node's entry in a Slurm step's counts: "2(x3),1" is 2 tasks on three nodes and 1 on a fourth."""
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
    """Returns how many GPUs the environment shows to this process, or None where no variable says it."""
    shown = next((os.environ[name] for name in _VISIBLE if os.environ.get(name)), None)
    return None if shown is None else len(shown.split(","))


def _whole(name: str) -> int | None:
    """Returns an environment variable as an integer, or None where it is not set or not an integer."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None
