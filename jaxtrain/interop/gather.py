"""Arrays that are sharded in any way, brought to the host of the main process a layer at a time."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def on_main_host(array: Any, position: tuple[int, ...]) -> np.ndarray | None:
    """Returns what stands at a position of the leading dimensions of an array.

    Every process calls it, in the same order where an array is sharded over processes.

    Args:
        array: Array of NumPy or jax, sharded in any way.
        position: Index in each of the leading dimensions (layer, expert); (): the whole array.

    Returns:
        On the main process the part, of the array's dtype; None on the others.
    """
    main = jax.process_index() == 0
    if not isinstance(array, jax.Array):
        return np.asarray(array)[position] if main else None
    if array.is_fully_addressable and all(device.platform == "cpu" for device in array.sharding.device_set):
        # The shards lie in the host's memory: they are looked at, not gathered.
        return _of_shards(array, position) if main else None
    sharding = array.sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    # Waited for on every process, so that no more than one part is on the devices.
    part = jax.block_until_ready(_gather(whole)(array, *position))
    # Copied from the first device alone; the others' copies go with `part`.
    return np.asarray(part.addressable_data(0)) if main else None


@functools.lru_cache(maxsize=8)
def _gather(sharding: NamedSharding | None) -> Any:
    def pick(array: jax.Array, *position: jax.Array) -> jax.Array:
        for at in position:
            array = jax.lax.dynamic_index_in_dim(array, at, keepdims=False)
        return array

    return jax.jit(pick, out_shardings=sharding)


def _of_shards(array: jax.Array, position: tuple[int, ...]) -> np.ndarray:
    count = len(position)
    out = np.empty(array.shape[count:], array.dtype)
    for shard in array.addressable_shards:
        bounds = [one.indices(size) for one, size in zip(shard.index, array.shape, strict=True)]
        holds = all(start <= at < stop for at, (start, stop, _) in zip(position, bounds, strict=False))
        if holds and shard.replica_id == 0:
            inside = tuple(at - start for at, (start, _, _) in zip(position, bounds, strict=False))
            out[shard.index[count:]] = np.asarray(shard.data)[inside]
    return out
