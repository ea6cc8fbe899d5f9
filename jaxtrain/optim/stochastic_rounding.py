"""Rounding up or down at random, so that the mean is kept, with numbers that are the same on every layout."""

import jax
import jax.numpy as jnp

_BFLOAT16_DROPPED = 16


def round_to_bfloat16(x: jax.Array, random: jax.Array) -> jax.Array:
    """Round to bfloat16, up with the probability that keeps the mean.

    Args:
        x: float32.
        random: uint32 of the same shape, uniform.

    Returns:
        bfloat16 of the same shape.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (random & ((1 << _BFLOAT16_DROPPED) - 1))
    # The head of the bits is the number: no second rounding.
    return jax.lax.bitcast_convert_type((bits >> _BFLOAT16_DROPPED).astype(jnp.uint16), jnp.bfloat16)


def random_bits(shape: tuple[int, ...], count: jax.Array, number: int) -> jax.Array:
    """Draw uniform numbers for one rounding of one array: a hash of each element's place, so alike on every layout.

    A multiplicative hash (the finalizer of MurmurHash3) costs a tenth of threefry and rounding asks for no more.

    Args:
        shape: of the whole array.
        count: int32 [], updates done.
        number: of the array among those that are rounded.

    Returns:
        uint32 of this shape.
    """
    place = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(shape))):
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    seed = _mix(count.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + jnp.uint32(number))
    return _mix(place * jnp.uint32(0x9E3779B1) + seed)


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
