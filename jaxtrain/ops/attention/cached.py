"""Attention of new tokens to the keys and values of a cache, which holds each head's positions side by side.

Shapes: B batch, T new tokens, S positions of the cache, H query heads, G key-value heads, R = H / G, K head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxtrain.ops.attention.reference import MASKED, capped

# Keys that are read at a time where a cache is long.
BLOCK = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachedKeys:
    """Keys and values of some positions of a cache, and what queries make of them.

    Attributes:
        k_BGSK: keys, a float dtype or int8.
        v_BGSK: values, the dtype of the keys.
        mask_BTS: bool, True where a query may see a key; its batch dim may be 1.
        key_scale_BGS: float32, what keys are multiplied by; None: 1.
        value_scale_BGS: the same for values.
        bias_BHTS: float32, added to the scores; its batch dim may be 1. None: nothing is added.
    """

    k_BGSK: Array
    v_BGSK: Array
    mask_BTS: Array
    key_scale_BGS: Array | None = None
    value_scale_BGS: Array | None = None
    bias_BHTS: Array | None = None


def cached_attention(q_BTHK: Array, keys: CachedKeys, *, softcap: float | None = None) -> Array:
    """Compute softmax attention with grouped-query heads; scores and softmax are in float32.

    The keys are those of all positions of the cache; the result [B, T, H, K] is in the dtype of q.
    """
    weights_BGRTS = jax.nn.softmax(_scores(q_BTHK, keys, softcap), axis=-1)
    return _ungrouped(_weighted(weights_BGRTS, keys, q_BTHK.dtype), q_BTHK)


def cached_attention_in_blocks(
    q_BTHK: Array, block: Callable[[Array], CachedKeys], num_blocks: Array, *, softcap: float | None = None
) -> Array:
    """Compute the same over the first blocks of a cache alone, as many as hold a key that a query sees.

    Blocks that a row sees nothing of add exact zeros to it, so that its result depends on neither the number of blocks
    nor on the other rows (Milakov and Gimelshein 2018 for the running softmax).

    Args:
        q_BTHK: queries, any float dtype.
        block: int32 [], number of a block -> its keys, all blocks of one shape.
        num_blocks: int32 [], at least 1.
        softcap: as in `AttentionForm`.
    """

    def advance(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        largest_BGRT1, total_BGRT1, out_BGRTK = carry
        keys = block(number)
        scores_BGRTS = _scores(q_BTHK, keys, softcap)
        new_BGRT1 = jnp.maximum(largest_BGRT1, scores_BGRTS.max(axis=-1, keepdims=True))
        shrink_BGRT1 = jnp.exp(largest_BGRT1 - new_BGRT1)
        weights_BGRTS = jnp.exp(scores_BGRTS - new_BGRT1)
        total_BGRT1 = total_BGRT1 * shrink_BGRT1 + weights_BGRTS.sum(axis=-1, keepdims=True)
        added_BGRTK = _weighted(weights_BGRTS, keys, q_BTHK.dtype).astype(jnp.float32)
        return new_BGRT1, total_BGRT1, out_BGRTK * shrink_BGRT1 + added_BGRTK

    batch, length, heads, head_dim = q_BTHK.shape
    groups = jax.eval_shape(block, jax.ShapeDtypeStruct((), jnp.int32)).k_BGSK.shape[1]
    shape = (batch, groups, heads // groups, length)
    start = (jnp.full((*shape, 1), MASKED), jnp.zeros((*shape, 1)), jnp.zeros((*shape, head_dim)))
    _, total_BGRT1, out_BGRTK = jax.lax.fori_loop(0, num_blocks, advance, start)
    return _ungrouped((out_BGRTK / total_BGRT1).astype(q_BTHK.dtype), q_BTHK)


def _scores(q_BTHK: Array, keys: CachedKeys, softcap: float | None) -> Array:
    """Masked scores, float32 [B, G, R, T, S]."""
    batch, length, heads, head_dim = q_BTHK.shape
    groups = keys.k_BGSK.shape[1]
    # The queries of a group are rows of one matrix: one product per key-value head.
    q_BGRTK = q_BTHK.reshape(batch, length, groups, heads // groups, head_dim).transpose(0, 2, 3, 1, 4)
    q_BGNK, k_BGSK = q_BGRTK.reshape(batch, groups, -1, head_dim), keys.k_BGSK.astype(q_BTHK.dtype)
    scores_BGNS = jnp.einsum("bgnk,bgsk->bgns", q_BGNK, k_BGSK, preferred_element_type=jnp.float32)
    scores_BGNS = scores_BGNS * (1 / math.sqrt(head_dim))
    if keys.key_scale_BGS is not None:
        scores_BGNS = scores_BGNS * keys.key_scale_BGS[:, :, None]
    scores_BGRTS = scores_BGNS.reshape(*q_BGRTK.shape[:-1], -1)
    if keys.bias_BHTS is not None:
        bias_BHTS = keys.bias_BHTS
        scores_BGRTS = scores_BGRTS + bias_BHTS.reshape(-1, groups, heads // groups, *bias_BHTS.shape[2:])
    return jnp.where(keys.mask_BTS[:, None, None], capped(scores_BGRTS, softcap), MASKED)


def _weighted(weights_BGRTS: Array, keys: CachedKeys, dtype: DTypeLike) -> Array:
    """The values, summed with their weights: [B, G, R, T, K] in the dtype of the queries."""
    if keys.value_scale_BGS is not None:
        weights_BGRTS = weights_BGRTS * keys.value_scale_BGS[:, :, None, None]
    batch, groups, _, _, num_keys = weights_BGRTS.shape
    weights_BGNS = weights_BGRTS.astype(dtype).reshape(batch, groups, -1, num_keys)
    out_BGNK = jnp.einsum("bgns,bgsk->bgnk", weights_BGNS, keys.v_BGSK.astype(dtype))
    return out_BGNK.reshape(*weights_BGRTS.shape[:-1], -1)


def _ungrouped(out_BGRTK: Array, q_BTHK: Array) -> Array:
    return out_BGRTK.transpose(0, 3, 1, 2, 4).reshape(q_BTHK.shape)
