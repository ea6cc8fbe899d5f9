"""Attention of new tokens to the keys and values of a cache, which holds each head's positions side by side.

Shapes: B batch, T new tokens, S positions of the cache, H query heads, G key-value heads, R = H / G, K head_dim.
"""

import math

import jax
import jax.numpy as jnp

from jaxtrain.ops.attention.reference import MASKED, capped


def cached_attention(
    q_BTHK: jax.Array,
    k_BGSK: jax.Array,
    v_BGSK: jax.Array,
    mask_BTS: jax.Array,
    *,
    key_scale_BGS: jax.Array | None = None,
    value_scale_BGS: jax.Array | None = None,
    softcap: float | None = None,
    bias_BHTS: jax.Array | None = None,
) -> jax.Array:
    """Compute softmax attention with grouped-query heads; scores and softmax are in float32.

    Args:
        q_BTHK: queries, any float dtype.
        k_BGSK: keys, a float dtype or int8.
        v_BGSK: values, the dtype of the keys.
        mask_BTS: bool, True where a query may see a key; its batch dim may be 1.
        key_scale_BGS: float32, what keys are multiplied by; None: 1.
        value_scale_BGS: the same for values.
        softcap: as in `AttentionForm`; None: scores stay as they are.
        bias_BHTS: float32, added to the scores; its batch dim may be 1. None: nothing is added.

    Returns:
        [B, T, H, K] in the dtype of q.
    """
    batch, length, heads, head_dim = q_BTHK.shape
    groups, dtype = k_BGSK.shape[1], q_BTHK.dtype
    # The queries of a group are rows of one matrix: one product per key-value head.
    q_BGRTK = q_BTHK.reshape(batch, length, groups, heads // groups, head_dim).transpose(0, 2, 3, 1, 4)
    q_BGNK = q_BGRTK.reshape(batch, groups, -1, head_dim)
    scores_BGNS = jnp.einsum("bgnk,bgsk->bgns", q_BGNK, k_BGSK.astype(dtype), preferred_element_type=jnp.float32)
    scores_BGNS = scores_BGNS * (1 / math.sqrt(head_dim))
    if key_scale_BGS is not None:
        scores_BGNS = scores_BGNS * key_scale_BGS[:, :, None]
    scores_BGRTS = scores_BGNS.reshape(batch, groups, heads // groups, length, -1)
    if bias_BHTS is not None:
        scores_BGRTS = scores_BGRTS + bias_BHTS.reshape(-1, groups, heads // groups, *bias_BHTS.shape[2:])
    scores_BGRTS = jnp.where(mask_BTS[:, None, None], capped(scores_BGRTS, softcap), MASKED)
    weights_BGRTS = jax.nn.softmax(scores_BGRTS, axis=-1)
    if value_scale_BGS is not None:
        weights_BGRTS = weights_BGRTS * value_scale_BGS[:, :, None, None]
    weights_BGNS = weights_BGRTS.astype(dtype).reshape(batch, groups, -1, scores_BGNS.shape[-1])
    out_BGNK = jnp.einsum("bgns,bgsk->bgnk", weights_BGNS, v_BGSK.astype(dtype))
    out_BGRTK = out_BGNK.reshape(q_BGRTK.shape)
    return out_BGRTK.transpose(0, 3, 1, 2, 4).reshape(q_BTHK.shape)
