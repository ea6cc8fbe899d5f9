"""Whether the memory of this machine can hold a run at all: its state and one batch, before either is allocated."""

import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtrain.data.stream import BatchStream
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.format import format_bytes
from jaxtrain.train.assemble import Run

# In one batch.
_MOST_EPOCHS = 10_000
_MEMORY = Path("/proc/meminfo")


def check_memory(run: Run) -> None:
    """Raise where the state or a batch of a run is larger than all memory that there is for it, or all data many times.

    What passes may still not fit beside the rest of a step; what fails would be killed by the system, or page for ever.

    Args:
        run: assembled; nothing of it is allocated yet.

    Raises:
        ConfigError: names the bytes, those of the machine, and the key to change.
    """
    rows = run.config.train.global_batch_size
    if not isinstance(run.data.train, BatchStream) and rows > _MOST_EPOCHS * len(run.data.train):
        raise ConfigError(
            f"train.global_batch_size={rows}: every batch would hold the {len(run.data.train)} rows of the data more "
            f"than {_MOST_EPOCHS} times; lower it"
        )
    host = _host_bytes()
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.batches.spec()))
    batch = whole // jax.process_count()
    if host is not None and batch > host:
        raise ConfigError(
            f"train.global_batch_size={rows}: a batch takes {format_bytes(batch)} of memory, and this machine has "
            f"{format_bytes(host)}; lower it"
        )
    state, on_host = _state_bytes(run)
    local = [device for device in run.step.mesh.devices.flat if device.process_index == jax.process_index()]
    if not local:
        return
    if local[0].platform == "cpu":
        state, on_host = 0, on_host + state * len(local)
    limit = (local[0].memory_stats() or {}).get("bytes_limit")
    for found, there, where in ((state, limit, "per device, which"), (on_host, host, "of this machine, which")):
        if there is not None and found > there:
            raise ConfigError(
                f"the state of the model takes {format_bytes(found)} {where} has {format_bytes(there)} of memory; "
                "make the model smaller, or shard it with parallel.fsdp over more devices"
            )


def _state_bytes(run: Run) -> tuple[int, int]:
    """Bytes of the state per device, and of what stays in the memory of the host per device."""
    state, on_host = 0, 0
    places = zip(jax.tree.leaves(run.step.abstract_state), jax.tree.leaves(run.step.state_on_host), strict=True)
    for leaf, is_there in places:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            state, on_host = (state, on_host + size) if is_there else (state + size, on_host)
    return state, on_host


def _host_bytes() -> int | None:
    """Memory of this machine with its swap; None where the system does not say."""
    try:
        found = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return 1024 * sum(int(found[name].split()[0]) for name in ("MemTotal", "SwapTotal"))
    except (OSError, ValueError, KeyError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
