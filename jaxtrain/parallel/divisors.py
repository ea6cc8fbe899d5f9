"""What the loss sum of some rows is divided by before it is differentiated; their gradient is weighted afterwards.

It is the weight of the rows, so that gradients keep the range of a mean (fp16). Where layers round gradients to 8 bits,
which rows are differentiated together must not show in what is rounded: the mean of a microbatch, of a shard's part of
it and of the whole batch are different multiples of the same gradients, and each multiple is rounded to other numbers,
unless it is a power of two, which commutes with rounding. So the divisor is one there, and the rest of the division
follows in float32.
"""

import math

import jax
import jax.numpy as jnp

from jaxtrain.models.task import divisor
from jaxtrain.parallel.microbatches import Tree


def loss_divisor(weight: jax.Array, *, powers_of_two: bool) -> jax.Array:
    """What a loss sum of this weight is divided by before it is differentiated.

    Args:
        weight: float32 [], of the rows.
        powers_of_two: whether gradients are rounded to 8 bits on the way.

    Returns:
        float32 []: `divisor(weight)`, or the largest power of two that its magnitude reaches.
    """
    if not powers_of_two:
        return divisor(weight)
    bits = jax.lax.bitcast_convert_type(divisor(weight), jnp.int32)
    # Without mantissa and sign; at least the smallest normal number.
    return jax.lax.bitcast_convert_type(jnp.maximum(bits & 0x7F800000, 0x00800000), jnp.float32)


def loss_constant(number: float, *, powers_of_two: bool) -> float:
    """What loss sums are divided by that stages or shards add up before they are weighted: a number, or as above."""
    return math.ldexp(0.5, math.frexp(number)[1]) if powers_of_two else float(number)


def as_means(gradients: Tree, weight: jax.Array, *, powers_of_two: bool) -> Tree:
    """Gradients of a loss sum over its `loss_divisor` as those of the mean: in float32 where they differ."""
    if not powers_of_two:
        return gradients
    rest = loss_divisor(weight, powers_of_two=True) / divisor(weight)
    return jax.tree.map(lambda g: g.astype(jnp.float32) * rest, gradients)
