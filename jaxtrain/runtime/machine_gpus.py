"""The NVIDIA GPUs of this machine, and an equal share of them for each of several processes. No jax here."""

import itertools
import os
import re
from pathlib import Path

from jaxtrain.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
# The driver lists every card of the machine; a container gets the files of its own cards only.
_DEVICES, _DRIVER = Path("/dev"), Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> list[str] | None:
    """Returns the GPUs that a process started here would see.

    Returns:
        Their numbers or names, as CUDA_VISIBLE_DEVICES writes them; empty where there are none; None where the
        environment keeps jax from using them, or says itself which ones this process uses.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if os.environ.get("JAX_LOCAL_DEVICE_IDS") or (platforms and not re.search("cuda|gpu", platforms)):
        return None
    listed = os.environ.get(VISIBLE)
    if listed is not None:
        names = [name.strip() for name in listed.split(",")]
        # CUDA reads a list up to the first entry that names no device, such as -1 or Slurm's NoDevFiles.
        return list(itertools.takewhile(re.compile(r"\d+$|GPU-|MIG-").match, names))
    if not _DRIVER.is_dir():
        return []
    files = [path for path in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    # CUDA numbers what it can open from 0; before the first use of a card its file may not be there.
    return [str(index) for index in range(len(files) or len(list(_DRIVER.iterdir())))]


def gpu_shares(gpus: list[str], num_processes: int, *, must_divide: bool = True) -> list[dict[str, str]]:
    """Returns the environment that gives each process its GPUs.

    Args:
        gpus: what `visible_gpus` found.
        num_processes: number of processes.
        must_divide: whether every GPU is to be used; else some may be left over.

    Returns:
        For each process the variable CUDA_VISIBLE_DEVICES, with GPUs in their order; nothing where there are none.

    Raises:
        ConfigError: the GPUs cannot be shared out.
    """
    if not gpus:
        return [{} for _ in range(num_processes)]
    share, left = divmod(len(gpus), num_processes)
    if not share or (left and must_divide):
        works = [str(count) for count in range(1, len(gpus) + 1) if len(gpus) % count == 0]
        count = f"{len(gpus)} {'GPU' if len(gpus) == 1 else 'GPUs'}"
        raise ConfigError(
            f"--processes {num_processes}: {count} of this machine cannot be shared out equally; use --processes "
            f"{' or '.join(works)}, or --emulate N for emulated CPU devices (JAX_PLATFORMS=cpu for real ones)"
        )
    parts = [gpus[index * share : (index + 1) * share] for index in range(num_processes)]
    return [{VISIBLE: ",".join(part)} for part in parts]
