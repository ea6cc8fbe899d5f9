"""Relative positions of T5: a learned number per head and bucket of distances, added to the scores of attention.

Source: Raffel et al. 2020, section 2.1. The numbers depend on the distance of key and query alone, so that a row of
2L - 1 of them per head stands for the [L, L] of a sequence, and each kernel unfolds the part that it needs.

Shapes: B batch, L length, T queries, S keys, H query heads, N buckets, W distances.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np


@functools.cache
def _buckets(reach: int, num_buckets: int, max_distance: int, causal: bool) -> np.ndarray:
    """Return the bucket of each distance (key - query) from -reach to reach: int32 [2 * reach + 1].

    They are computed on the host, so that every platform rounds the logarithm in the same way.
    """
    distances = np.arange(-reach, reach + 1)
    first = np.zeros_like(distances)
    if causal:  # a key ahead of its query is masked; the bucket of distance 0 stands there
        steps = np.maximum(-distances, 0)
    else:
        num_buckets //= 2
        first = np.where(distances > 0, num_buckets, 0)
        steps = np.abs(distances)
    exact = num_buckets // 2
    ratios = np.maximum(steps, 1).astype(np.float32) / np.float32(exact)
    share = np.log(ratios) / np.float32(math.log(max_distance / exact))
    far = exact + (share * np.float32(num_buckets - exact)).astype(np.int32)
    found = first + np.where(steps < exact, steps, np.minimum(far, num_buckets - 1))
    return found.astype(np.int32)


def distance_bias(table_NH: jax.Array, reach: int, *, max_distance: int, causal: bool) -> jax.Array:
    """Look up what is added to the scores at each distance of a key from its query.

    Half of the buckets hold one distance each; the others grow with the logarithm of the distance up to
    `max_distance`, from where on the last one holds all. Without `causal`, half of all buckets are for keys ahead.

    Args:
        table_NH: learned numbers, any float dtype.
        reach: largest distance that is needed.
        max_distance: distance from which on all keys share a bucket.
        causal: whether queries see no keys ahead.

    Returns:
        float32 [H, 2 * reach + 1], of the distances (key - query) from -reach to reach.
    """
    buckets_W = _buckets(reach, table_NH.shape[0], max_distance, causal)
    # A product with ones and zeros in place of a lookup, whose gradient would be a scatter.
    chosen_NW = (np.arange(table_NH.shape[0])[:, None] == buckets_W[None]).astype(np.float32)
    return jnp.einsum("nh,nw->hw", table_NH.astype(jnp.float32), chosen_NW, precision=jax.lax.Precision.HIGHEST)


def unfold(bias_HW: jax.Array, num_queries: int) -> jax.Array:
    """Lay the bias of consecutive distances out as that of queries and keys, both consecutive.

    Args:
        bias_HW: [..., H, T + S - 1]: of the distances from that of the last query and the first key to that of the
            first query and the last key.
        num_queries: T.

    Returns:
        [..., H, T, S]; its element (t, s) is the bias at index s - t + T - 1.
    """
    num_keys = bias_HW.shape[-1] - num_queries + 1
    # One period of the distances modulo T + S, in which each next row of T + S - 1 starts one distance earlier.
    lead = bias_HW.shape[:-1]
    period = jnp.concatenate(
        [bias_HW[..., num_queries - 1 :], jnp.zeros((*lead, 1), bias_HW.dtype), bias_HW[..., : num_queries - 1]], -1
    )
    length = num_queries + num_keys
    rows = jnp.broadcast_to(period[..., None, :], (*lead, num_queries, length)).reshape(*lead, -1)
    rows = rows[..., : num_queries * (length - 1)].reshape(*lead, num_queries, length - 1)
    return rows[..., :num_keys]


def fold(bias_HTS: jax.Array) -> jax.Array:
    """Sum the pairs of each distance: the transpose of `unfold`, [..., H, T, S] -> [..., H, T + S - 1]."""
    *lead, num_queries, num_keys = bias_HTS.shape
    distances = jax.ShapeDtypeStruct((*lead, num_queries + num_keys - 1), bias_HTS.dtype)
    return jax.linear_transpose(lambda bias: unfold(bias, num_queries), distances)(bias_HTS)[0]


def whole_bias(bias_HW: jax.Array) -> jax.Array:
    """Lay the bias of a sequence and itself out: [H, 2L - 1] -> [H, L, L]."""
    return unfold(bias_HW, (bias_HW.shape[-1] + 1) // 2)


def bias_at(bias_HW: jax.Array, query_positions_BT: jax.Array, key_positions_S: jax.Array) -> jax.Array:
    """Look the bias of queries at positions of their own up, as generation needs it.

    Args:
        bias_HW: from `distance_bias`; larger distances than it holds take its ends.
        query_positions_BT: integers.
        key_positions_S: integers.

    Returns:
        float32 [B, H, T, S].
    """
    reach = (bias_HW.shape[-1] - 1) // 2
    distances_BTS = key_positions_S[None, None] - query_positions_BT[:, :, None]
    return jnp.moveaxis(bias_HW[:, jnp.clip(distances_BTS, -reach, reach) + reach], 0, 1)
