"""Attention by its plain formula, attention to a cache, and the relative positions of T5.

Every kernel is tested against the formula. A relative position adds a learned number per head and bucket of distances
to the scores (Raffel et al. 2020, section 2.1). It depends on the distance of key and query alone, so that a row of
2L - 1 numbers per head stands for the [L, L] of a sequence, and each kernel unfolds the part that it needs.

Shapes: B batch, L length (of the queries), S length of keys and values, H query heads, G key-value heads, R = H / G,
K head_dim, T queries, N buckets, W distances.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxtrain.ops.attention.rules import AttentionForm

# Large and finite: a row that may see nothing gives a uniform softmax instead of NaN.
MASKED = -1e30
# Keys that are read at a time where a cache is long.
BLOCK = 256


class Learned(NamedTuple):
    """Learned numbers beside the products of queries and keys.

    Attributes:
        bias_HW: added to the scores of each head by the distance of key and query, float32 [H, 2L - 1] from
            `distance_bias`; None: nothing is added.
        sink_H: float32, the score of one more key of each head, which every query sees and whose value is 0; None:
            there is none.
    """

    bias_HW: Array | None = None
    sink_H: Array | None = None


PLAIN = Learned()


def attention_mask(
    query_positions_BL: Array,
    key_positions_BS: Array,
    *,
    causal: bool,
    window: Array | int | None = None,
    chunked: bool = False,
    query_segments_BL: Array | None = None,
    key_segments_BS: Array | None = None,
) -> Array:
    """Mark the keys that each query may see.

    Args:
        query_positions_BL, key_positions_BS: integers; the batch dim may be 1.
        causal, window: as in `AttentionForm`; a window may be an int32 [].
        chunked: a query sees the keys of its own chunk of `window` positions instead.
        query_segments_BL, key_segments_BS: numbers of packed documents; a query sees only keys of its own. None: one
            document per row.

    Returns:
        bool [B, L, S], or [1, L, S] where all arguments have a batch dim of 1; True where a query may see a key.
    """
    mask = jnp.ones((1, query_positions_BL.shape[-1], key_positions_BS.shape[-1]), bool)
    distance = query_positions_BL[:, :, None] - key_positions_BS[:, None, :]
    if causal:
        mask = mask & (distance >= 0)
    if window is not None and chunked:
        mask = mask & (query_positions_BL[:, :, None] // window == key_positions_BS[:, None, :] // window)
    elif window is not None:
        mask = mask & (distance < window)
        mask = mask if causal else mask & (distance > -window)
    if query_segments_BL is not None and key_segments_BS is not None:
        mask = mask & (query_segments_BL[:, :, None] == key_segments_BS[:, None, :])
    return mask


def _scores(q_BLGRK: Array, k_BSGK: Array) -> Array:
    """Multiply queries and keys: float32 [B, G, R, L, S]."""
    return jnp.einsum("blgrk,bsgk->bgrls", q_BLGRK, k_BSGK, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _low_precision_scores(q_BLGRK: Array, k_BSGK: Array) -> Array:
    """Multiply queries and keys of bf16 or fp16 like `_scores`, with gradients in their dtype."""
    return _scores(q_BLGRK, k_BSGK)


def _scores_forward(q_BLGRK: Array, k_BSGK: Array) -> tuple[Array, tuple[Array, Array]]:
    return _scores(q_BLGRK, k_BSGK), (q_BLGRK, k_BSGK)


def _scores_backward(inputs: tuple[Array, Array], d_BGRLS: Array) -> tuple[Array, Array]:
    q_BLGRK, k_BSGK = inputs
    d_BGRLS = d_BGRLS.astype(q_BLGRK.dtype)
    return jnp.einsum("bgrls,bsgk->blgrk", d_BGRLS, k_BSGK), jnp.einsum("bgrls,blgrk->bsgk", d_BGRLS, q_BLGRK)


_low_precision_scores.defvjp(_scores_forward, _scores_backward)


def capped(scores: Array, softcap: float | None) -> Array:
    """Limit float32 scores of any shape to (-softcap, softcap); None: they stay as they are."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def attention(
    q_BLHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    mask_BLS: Array,
    *,
    softcap: float | None = None,
    bias_BHLS: Array | None = None,
    sink_H: Array | None = None,
) -> Array:
    """Compute softmax attention with grouped key-value heads; scores and softmax are in float32.

    Args:
        q_BLHK, k_BSGK, v_BSGK: of one float dtype, as is the result [B, L, H, K]; H must be a multiple of G.
        mask_BLS: bool, True where a query may see a key; its batch dim may be 1.
        softcap: as in `AttentionForm`.
        bias_BHLS: float32, added to the scores; its batch dim may be 1. None: nothing is added.
        sink_H: as in `Learned`.
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
    weights_BGRLS = _softmax(scores_BGRLS, sink_H).astype(v_BSGK.dtype)
    out_BLGRK = jnp.einsum("bgrls,bsgk->blgrk", weights_BGRLS, v_BSGK)
    return out_BLGRK.reshape(batch, length, heads, head_dim)


def _softmax(scores_BGRLS: Array, sink_H: Array | None) -> Array:
    """Weights of the keys; a sink takes its share and has no value."""
    if sink_H is None:
        return jax.nn.softmax(scores_BGRLS, axis=-1)
    sink_BGRL1 = jnp.broadcast_to(grouped_sinks(sink_H, scores_BGRLS.shape[1]), (*scores_BGRLS.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores_BGRLS, sink_BGRL1], axis=-1), axis=-1)[..., :-1]


def grouped_sinks(sink_H: Array, groups: int) -> Array:
    """The sinks of the heads as scores of one key: float32 [1, G, R, 1, 1]."""
    return sink_H.astype(jnp.float32).reshape(1, groups, -1, 1, 1)


def form_mask(
    form: AttentionForm, queries_L: Array, keys_S: Array, own_BL: Array | None, seen_BS: Array | None
) -> Array:
    """`attention_mask` of a form, for positions that all rows share, and the segments of queries and keys."""
    segments: Any = dict(query_segments_BL=own_BL, key_segments_BS=seen_BS)
    return attention_mask(queries_L[None], keys_S[None], causal=form.causal, window=form.window, **segments)


def reference_attention(
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    segments_BL: Array | None,
    form: AttentionForm,
    learned: Learned = PLAIN,
) -> Array:
    """Compute the attention of a sequence to itself; arguments and result as of `blockwise_attention`."""
    order_L = jnp.arange(q_BLHK.shape[1])
    mask_BLS = form_mask(form, order_L, order_L, segments_BL, segments_BL)
    bias_BHLS = None if learned.bias_HW is None else whole_bias(learned.bias_HW)[None]
    arrays, sink_H = (q_BLHK, k_BLGK, v_BLGK, mask_BLS), learned.sink_H
    return attention(*arrays, softcap=form.softcap, bias_BHLS=bias_BHLS, sink_H=sink_H)


# --- New tokens and a cache, which holds each head's positions side by side; T new tokens, S of its positions. ---


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


def cached_attention(
    q_BTHK: Array, keys: CachedKeys, *, softcap: float | None = None, sink_H: Array | None = None
) -> Array:
    """Compute softmax attention with grouped-query heads; scores and softmax are in float32.

    The keys are those of all positions of the cache; the result [B, T, H, K] is in the dtype of q.
    """
    weights_BGRTS = _softmax(_cached_scores(q_BTHK, keys, softcap), sink_H)
    return _ungrouped(_weighted(weights_BGRTS, keys, q_BTHK.dtype), q_BTHK)


def cached_attention_in_blocks(
    q_BTHK: Array,
    block: Callable[[Array], CachedKeys],
    num_blocks: Array,
    *,
    softcap: float | None = None,
    sink_H: Array | None = None,
) -> Array:
    """Compute the same over the first blocks of a cache alone, as many as hold a key that a query sees.

    Blocks that a row sees nothing of add exact zeros to it, so that its result depends on neither the number of blocks
    nor on the other rows (Milakov and Gimelshein 2018 for the running softmax).

    Args:
        q_BTHK: queries, any float dtype.
        block: int32 [], number of a block -> its keys, all blocks of one shape.
        num_blocks: int32 [], at least 1.
        softcap: as in `AttentionForm`.
        sink_H: as in `Learned`.
    """

    def advance(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        largest_BGRT1, total_BGRT1, out_BGRTK = carry
        keys = block(number)
        scores_BGRTS = _cached_scores(q_BTHK, keys, softcap)
        new_BGRT1 = jnp.maximum(largest_BGRT1, scores_BGRTS.max(axis=-1, keepdims=True))
        shrink_BGRT1 = jnp.exp(largest_BGRT1 - new_BGRT1)
        weights_BGRTS = jnp.exp(scores_BGRTS - new_BGRT1)
        total_BGRT1 = total_BGRT1 * shrink_BGRT1 + weights_BGRTS.sum(axis=-1, keepdims=True)
        added_BGRTK = _weighted(weights_BGRTS, keys, q_BTHK.dtype).astype(jnp.float32)
        return new_BGRT1, total_BGRT1, out_BGRTK * shrink_BGRT1 + added_BGRTK

    batch, length, heads, head_dim = q_BTHK.shape
    groups = jax.eval_shape(block, jax.ShapeDtypeStruct((), jnp.int32)).k_BGSK.shape[1]
    shape = (batch, groups, heads // groups, length)
    largest_BGRT1, total_BGRT1 = jnp.full((*shape, 1), MASKED), jnp.zeros((*shape, 1))
    if sink_H is not None:  # the softmax begins with the sink, whose weight is 1 and whose value is 0
        largest_BGRT1, total_BGRT1 = jnp.broadcast_to(grouped_sinks(sink_H, groups), (*shape, 1)), total_BGRT1 + 1
    start = (largest_BGRT1, total_BGRT1, jnp.zeros((*shape, head_dim)))
    _, total_BGRT1, out_BGRTK = jax.lax.fori_loop(0, num_blocks, advance, start)
    return _ungrouped((out_BGRTK / total_BGRT1).astype(q_BTHK.dtype), q_BTHK)


def _cached_scores(q_BTHK: Array, keys: CachedKeys, softcap: float | None) -> Array:
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


# --- Relative positions. ---


@functools.cache
def _buckets(reach: int, num_buckets: int, max_distance: int, causal: bool) -> np.ndarray:
    """Return the bucket of each distance (key - query) from -reach to reach: int32 [2 * reach + 1]."""
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


def distance_bias(table_NH: Array, reach: int, *, max_distance: int, causal: bool) -> Array:
    """Look up what is added to the scores at each distance of a key from its query.

    The table has learned numbers of any float dtype; the result is float32 [H, 2 * reach + 1], of the distances
    (key - query) from -reach to reach.
    """
    buckets_W = _buckets(reach, table_NH.shape[0], max_distance, causal)
    # A product with ones and zeros in place of a lookup, whose gradient would be a scatter.
    chosen_NW = (np.arange(table_NH.shape[0])[:, None] == buckets_W[None]).astype(np.float32)
    return jnp.einsum("nh,nw->hw", table_NH.astype(jnp.float32), chosen_NW, precision=jax.lax.Precision.HIGHEST)


def unfold(bias_HW: Array, num_queries: int) -> Array:
    """Lay the bias of consecutive distances out as that of T queries and S keys, both consecutive.

    Args:
        bias_HW: [..., H, T + S - 1], from the distance of the last query and the first key on.
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


def fold(bias_HTS: Array) -> Array:
    """Sum the pairs of each distance: the transpose of `unfold`, [..., H, T, S] -> [..., H, T + S - 1]."""
    *lead, num_queries, num_keys = bias_HTS.shape
    distances = jax.ShapeDtypeStruct((*lead, num_queries + num_keys - 1), bias_HTS.dtype)
    return jax.linear_transpose(lambda bias: unfold(bias, num_queries), distances)(bias_HTS)[0]


def whole_bias(bias_HW: Array) -> Array:
    """Lay the bias of a sequence and itself out: [H, 2L - 1] -> [H, L, L]."""
    return unfold(bias_HW, (bias_HW.shape[-1] + 1) // 2)


def bias_at(bias_HW: Array, query_positions_BT: Array, key_positions_S: Array) -> Array:
    """Look the bias of queries at positions of their own up, as generation needs it: float32 [B, H, T, S].

    Larger distances than `bias_HW` of `distance_bias` holds take its ends; positions are integers.
    """
    reach = (bias_HW.shape[-1] - 1) // 2
    distances_BTS = key_positions_S[None, None] - query_positions_BT[:, :, None]
    return jnp.moveaxis(bias_HW[:, jnp.clip(distances_BTS, -reach, reach) + reach], 0, 1)
