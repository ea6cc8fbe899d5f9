"""Attention by its plain formula, with all scores in memory at once: every kernel is tested against it.

Shapes: B batch, L length (of the queries), S length of keys and values, H query heads, G key-value heads, R = H / G,
K head_dim.
"""

import math

import jax
import jax.numpy as jnp

from jaxtrain.ops.attention.form import AttentionForm
from jaxtrain.ops.attention.relative import whole_bias

# Large and finite: a row that may see nothing gives a uniform softmax instead of NaN.
MASKED = -1e30


def attention_mask(
    query_positions_BL: jax.Array,
    key_positions_BS: jax.Array,
    *,
    causal: bool,
    window: jax.Array | int | None = None,
    query_segments_BL: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
) -> jax.Array:
    """Mark the keys that each query may see.

    Args:
        query_positions_BL: positions of the queries, integers; the batch dim may be 1.
        key_positions_BS: positions of the keys, integers; the batch dim may be 1.
        causal: as in `AttentionForm`.
        window: as in `AttentionForm`; an int32 [] may stand in its place.
        query_segments_BL: numbers of the packed documents of the queries; None: one document per row.
        key_segments_BS: numbers of the packed documents of the keys; a query sees only keys of its own document.

    Returns:
        bool [B, L, S], or [1, L, S] where all arguments have a batch dim of 1; True where a query may see a key.
    """
    mask = jnp.ones((1, query_positions_BL.shape[-1], key_positions_BS.shape[-1]), bool)
    distance = query_positions_BL[:, :, None] - key_positions_BS[:, None, :]
    if causal:
        mask = mask & (distance >= 0)
    if window is not None:
        mask = mask & (distance < window)
        mask = mask if causal else mask & (distance > -window)
    if query_segments_BL is not None and key_segments_BS is not None:
        mask = mask & (query_segments_BL[:, :, None] == key_segments_BS[:, None, :])
    return mask


def _scores(q_BLGRK: jax.Array, k_BSGK: jax.Array) -> jax.Array:
    """Multiply queries and keys: float32 [B, G, R, L, S]."""
    return jnp.einsum("blgrk,bsgk->bgrls", q_BLGRK, k_BSGK, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _low_precision_scores(q_BLGRK: jax.Array, k_BSGK: jax.Array) -> jax.Array:
    """Multiply queries and keys of bf16 or fp16 like `_scores`, with gradients in their dtype.

    Autodiff's backward pass would use slower float32 matmuls.
    """
    return _scores(q_BLGRK, k_BSGK)


def _scores_forward(q_BLGRK: jax.Array, k_BSGK: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _scores(q_BLGRK, k_BSGK), (q_BLGRK, k_BSGK)


def _scores_backward(inputs: tuple[jax.Array, jax.Array], d_BGRLS: jax.Array) -> tuple[jax.Array, jax.Array]:
    q_BLGRK, k_BSGK = inputs
    d_BGRLS = d_BGRLS.astype(q_BLGRK.dtype)
    return jnp.einsum("bgrls,bsgk->blgrk", d_BGRLS, k_BSGK), jnp.einsum("bgrls,blgrk->bsgk", d_BGRLS, q_BLGRK)


_low_precision_scores.defvjp(_scores_forward, _scores_backward)


def capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Limit scores to (-softcap, softcap).

    Args:
        scores: float32, any shape.
        softcap: as in `AttentionForm`; None: scores stay as they are.
    """
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def attention(
    q_BLHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask_BLS: jax.Array,
    *,
    softcap: float | None = None,
    bias_BHLS: jax.Array | None = None,
) -> jax.Array:
    """Compute softmax attention with grouped key-value heads; scores and softmax are in float32.

    Args:
        q_BLHK: queries, any float dtype.
        k_BSGK: keys, the same dtype; H must be a multiple of G.
        v_BSGK: values, the same dtype.
        mask_BLS: bool, True where a query may see a key; its batch dim may be 1.
        softcap: as in `AttentionForm`.
        bias_BHLS: float32, added to the scores; its batch dim may be 1. None: nothing is added.

    Returns:
        [B, L, H, K] in the dtype of q.
    """
    batch, length, heads, head_dim = q_BLHK.shape
    groups = k_BSGK.shape[2]
    q_BLGRK = q_BLHK.reshape(batch, length, groups, heads // groups, head_dim)
    # In float32 autodiff's own backward pass is faster on CPU than the one above, by up to 5 % of a step.
    score = _scores if q_BLGRK.dtype == jnp.float32 else _low_precision_scores
    scores_BGRLS = score(q_BLGRK, k_BSGK) * (1 / math.sqrt(head_dim))
    if bias_BHLS is not None:
        scores_BGRLS = scores_BGRLS + bias_BHLS.reshape(-1, groups, heads // groups, *bias_BHLS.shape[2:])
    scores_BGRLS = jnp.where(mask_BLS[:, None, None], capped(scores_BGRLS, softcap), MASKED)
    weights_BGRLS = jax.nn.softmax(scores_BGRLS, axis=-1).astype(v_BSGK.dtype)
    out_BLGRK = jnp.einsum("bgrls,bsgk->blgrk", weights_BGRLS, v_BSGK)
    return out_BLGRK.reshape(batch, length, heads, head_dim)


def reference_attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segments_BL: jax.Array | None,
    form: AttentionForm,
    bias_HW: jax.Array | None = None,
) -> jax.Array:
    """Compute the attention of a sequence to itself, where positions are the indices of the sequence dim.

    Args:
        q_BLHK: queries, any float dtype; H must be a multiple of G.
        k_BLGK: keys, the same dtype.
        v_BLGK: values, the same dtype.
        segments_BL: numbers of packed documents, which do not see each other; None: one document per row.
        form: the settings of attention.
        bias_HW: as in `self_attention`.

    Returns:
        [B, L, H, K] in the dtype of q.
    """
    order_L = jnp.arange(q_BLHK.shape[1])[None]
    mask_BLS = attention_mask(
        order_L,
        order_L,
        causal=form.causal,
        window=form.window,
        query_segments_BL=segments_BL,
        key_segments_BS=segments_BL,
    )
    bias_BHLS = None if bias_HW is None else whole_bias(bias_HW)[None]
    return attention(q_BLHK, k_BLGK, v_BLGK, mask_BLS, softcap=form.softcap, bias_BHLS=bias_BHLS)
