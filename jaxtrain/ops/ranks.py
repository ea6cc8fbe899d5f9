"""Arrays of fewer dims beside arrays of more, written out: `jax_numpy_rank_promotion` may forbid what is not."""

import jax


def aligned(values: jax.Array, like: jax.Array) -> jax.Array:
    """`values` with as many dims as `like`, those of size 1 first, as jax.numpy does by itself if it may."""
    return jax.lax.broadcast_to_rank(values, like.ndim)
