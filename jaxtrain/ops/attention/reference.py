"""What attention is: who sees whom, and the plain formula, all scores at once, that every kernel is tested against.

Shapes: B batch, L query positions, S key positions, H query heads, G key-value heads, R = H / G, K head dim.
"""

import math

import jax
import jax.numpy as jnp

from jaxtrain.ops.attention.form import AttentionForm

# Large and finite: a row that may see nothing gives a uniform softmax instead of NaN.
MASKED = -1e30


def attention_mask(
    query_positions_BL: jax.Array,
    key_positions_BS: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    query_segments_BL: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
) -> jax.Array:
    """Which keys a query may see: bool [B, L, S] (or [1, L, S]).

    Args:
        query_positions_BL, key_positions_BS: int positions.
        causal, window: as in `AttentionForm`.
        query_segments_BL, key_segments_BS: packed documents; a query sees only its own segment.
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


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """Float32 products of queries [B, L, G, R, K] and keys [B, S, G, K]: [B, G, R, L, S]."""
    return jnp.einsum("blgrk,bsgk->bgrls", q, k, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _low_precision_scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """The same for bf16 and fp16, with the gradient in their dtype; autodiff's would be slower float32 matmuls."""
    return _scores(q, k)


def _scores_forward(q: jax.Array, k: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _scores(q, k), (q, k)


def _scores_backward(inputs: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k = inputs
    gradient = gradient.astype(q.dtype)
    return jnp.einsum("bgrls,bsgk->blgrk", gradient, k), jnp.einsum("bgrls,blgrk->bsgk", gradient, q)


_low_precision_scores.defvjp(_scores_forward, _scores_backward)


def capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Scores squashed into (-softcap, softcap); as they are without one."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def attention(
    q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask_BLS: jax.Array, *, softcap: float | None = None
) -> jax.Array:
    """Softmax attention with grouped key-value heads; scores and softmax in float32.

    Args:
        q_BLHK: queries, any float dtype.
        k_BSGK, v_BSGK: keys and values; H must be a multiple of G.
        mask_BLS: bool, True where a query may see a key; its batch dim may be 1.
        softcap: as in `AttentionForm`.

    Returns:
        [B, L, H, K] in the dtype of q.
    """
    batch, length, heads, head_dim = q_BLHK.shape
    groups = k_BSGK.shape[2]
    q = q_BLHK.reshape(batch, length, groups, heads // groups, head_dim)
    # In float32 autodiff's own gradient is up to 5 % of a step faster on CPU than the one above.
    score = _scores if q.dtype == jnp.float32 else _low_precision_scores
    scores = score(q, k_BSGK) * (1 / math.sqrt(head_dim))
    scores = jnp.where(mask_BLS[:, None, None], capped(scores, softcap), MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSGK.dtype)
    out = jnp.einsum("bgrls,bsgk->blgrk", weights, v_BSGK)
    return out.reshape(batch, length, heads, head_dim)


def reference_attention(
    q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, segments_BL: jax.Array | None, form: AttentionForm
) -> jax.Array:
    """Attention of a sequence to itself, in the order of the sequence dim: [B, L, H, K] in the dtype of q."""
    order_L = jnp.arange(q_BLHK.shape[1])[None]
    mask_BLS = attention_mask(
        order_L,
        order_L,
        causal=form.causal,
        window=form.window,
        query_segments_BL=segments_BL,
        key_segments_BS=segments_BL,
    )
    return attention(q_BLHK, k_BLGK, v_BLGK, mask_BLS, softcap=form.softcap)
