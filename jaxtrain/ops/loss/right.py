"""Counts tokens whose largest logit is the target's, without all logits ever in memory.

Shapes: B batch, L sequence, V vocabulary, N blocks, C positions of a block.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.layout.sharding import current_layout
from jaxtrain.ops.loss.cross_entropy import DeferredLogits
from jaxtrain.ops.loss.sharded import mesh_axes

# Bytes of the logits of a block, over all devices.
_BLOCK_BYTES = 2**28


def weight_of_right(logits: jax.Array | DeferredLogits, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum the weights of the tokens whose largest logit is that of the target; not differentiated.

    Args:
        logits: [B, L, V], computed or deferred; deferred ones are computed for some positions at a time.
        targets: int32 [B, L].
        weights: float32 [B, L].

    Returns:
        float32 [].
    """
    if not isinstance(logits, DeferredLogits):
        return _sum_right(logits, targets, weights)
    logits = jax.lax.stop_gradient(logits)
    size = _block_size(logits)
    if size == targets.shape[1]:
        return _sum_right(logits.logits(), targets, weights)

    def blocks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    def add(total: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        hidden_BCD, targets_BC, weights_BC = block
        found = dataclasses.replace(logits, hidden=hidden_BCD).logits()
        return total + _sum_right(found, targets_BC, weights_BC), None

    return jax.lax.scan(add, jnp.float32(0), (blocks(logits.hidden), blocks(targets), blocks(weights)))[0]


def _sum_right(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(jnp.argmax(logits, axis=-1) == targets, weights, 0.0))


def _block_size(logits: DeferredLogits) -> int:
    """The most positions of a block that divide the sequence and are sharded as it is."""
    batch, length, _ = logits.hidden.shape
    layout = current_layout()
    shards = 1
    for axis in () if layout is None else mesh_axes(layout, "sequence"):
        shards *= layout.degree(axis) if layout is not None else 1
    wanted = max(1, _BLOCK_BYTES // (4 * batch * logits.vocabulary))
    sizes = [size for size in range(1, length + 1) if length % size == 0 and size % shards == 0]
    return max((size for size in sizes if size <= wanted), default=min(sizes, default=length))
