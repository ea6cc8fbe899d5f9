"""Dropout whose masks follow from the number of a row in the batch, so that they are the same on every mesh."""

import jax
import jax.numpy as jnp

from jaxtrain.layout.sharding import row_numbers


def drop_by_row(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Apply inverted dropout; each row draws from a key that is folded with its number in the (micro)batch.

    Args:
        x: [B, ...], any float dtype.
        rate: share of the elements that become 0, from 0 to below 1.
        key: random key, the same on every shard.

    Returns:
        The shape and dtype of x.
    """
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, row_numbers(x.shape[0]))
    keep = jax.vmap(lambda row_key: jax.random.bernoulli(row_key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))
