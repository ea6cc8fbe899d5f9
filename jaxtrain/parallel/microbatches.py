"""The microbatches of a batch, and what the loss sum of some rows is divided by before it is differentiated.

That is the weight of the rows, so that gradients keep the range of a mean (fp16); their gradient is weighted
afterwards. Where layers round gradients to 8 bits, which rows are differentiated together must not show in what is
rounded: the divisor is a power of two there, which commutes with rounding, and the rest of the division follows in
float32.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.layout.sharding import constrain
from jaxtrain.models.task import divisor

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
    """Return the specs of a batch for a region that is manual over `data`: rows are sharded, scalars replicated."""
    return jax.tree.map(lambda x: PartitionSpec("data") if jnp.ndim(x) else PartitionSpec(), batch)


def loss_divisor(weight: jax.Array, *, powers_of_two: bool) -> jax.Array:
    """Return what a loss sum of rows of this weight is divided by before it is differentiated; float32 [].

    `divisor(weight)`, or with `powers_of_two` the largest power of two that its magnitude reaches.
    """
    if not powers_of_two:
        return divisor(weight)
    bits = jax.lax.bitcast_convert_type(divisor(weight), jnp.int32)
    # Without mantissa and sign; at least the smallest normal number.
    return jax.lax.bitcast_convert_type(jnp.maximum(bits & 0x7F800000, 0x00800000), jnp.float32)


def loss_constant(number: float, *, powers_of_two: bool) -> float:
    """Return what loss sums are divided by that stages or shards add up before their weight is known.

    That is a number of targets, or with `powers_of_two` the largest power of two that it reaches.
    """
    return math.ldexp(0.5, math.frexp(number)[1]) if powers_of_two else float(number)


def as_means(gradients: Tree, weight: jax.Array, *, powers_of_two: bool) -> Tree:
    """Turn gradients of a loss sum over its `loss_divisor` into those of the mean."""
    if not powers_of_two:
        return gradients
    rest = loss_divisor(weight, powers_of_two=True) / divisor(weight)
    return jax.tree.map(lambda g: g.astype(jnp.float32) * rest, gradients)
