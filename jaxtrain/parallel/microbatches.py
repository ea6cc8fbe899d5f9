"""The microbatches of a batch, and how a batch enters a region that is manual over `data`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.layout.sharding import constrain

# A nested structure of arrays with None in some places. Its structure is the model's, so that no type describes it.
Tree = Any


def split_microbatches(batch: Tree, count: int) -> Tree:
    """Split a batch into microbatches: microbatch m holds the rows m, m + count, m + 2 count, ...

    Striding keeps every device's rows on that device, because a device holds a contiguous block of rows; and it gives
    the same microbatches whether B are all rows or those of one shard.

    Args:
        batch: arrays [B, ...], where B divides by `count`; a scalar goes to every microbatch.
        count: microbatches.

    Returns:
        Arrays [count, B / count, ...], sharded as activations over "batch".
    """

    def split(x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return jnp.broadcast_to(x, (count,))
        x = jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)
        return constrain(x, None, "batch", *[None] * (x.ndim - 2))

    return jax.tree.map(split, batch)


def batch_specs(batch: Tree) -> Tree:
    """Specs of a batch for a region that is manual over `data`: rows are sharded, scalars replicated.

    Args:
        batch: arrays or their shapes.

    Returns:
        A `PartitionSpec` for each.
    """
    return jax.tree.map(lambda x: PartitionSpec("data") if jnp.ndim(x) else PartitionSpec(), batch)
