"""Attention a block of queries at a time, with its own backward pass: memory linear in the sequence, on any backend.

A block of queries meets all the keys that it may see at once, so its softmax is a plain one; keys that no query of a
group of blocks sees are never multiplied. The backward pass recomputes the weights from the log of their sum, which is
all that the forward pass keeps besides its result (Dao et al. 2022; Rabe and Staats 2021).

Shapes: B batch, L sequence, H query heads, G key-value heads, R = H / G, K head dim, Q queries of a block, P = R * Q,
S keys that a block meets.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.layout.sharding import constrain, current_layout, platform
from jaxtrain.ops.attention.blocks import QueryBlocks, block_size, cut_sequence, pairs_at_once, row_parts
from jaxtrain.ops.attention.reference import MASKED, AttentionForm, attention_mask, capped
from jaxtrain.remat.policy import KERNEL_RESIDUALS
from jaxtrain.runtime.cores import usable_cores


def refusal(q_BLHK: jax.Array) -> str | None:
    """Why blocks would not help, or None; they can always compute it."""
    block = block_size(platform(), q_BLHK.shape[1])
    return f"the sequence is one block of {block}" if q_BLHK.shape[1] <= block else None


def parts_of_batch(q_BLHK: jax.Array, form: AttentionForm, block: int) -> int:
    """In how many parts the rows are attended to, one after the other.

    One where rows may lie on several devices, because a cut would move them, and on accelerators, which want them all.
    """
    layout = current_layout()
    devices = jax.device_count() if layout is None else layout.mesh.size
    if platform() != "cpu" or devices > 1:
        return 1
    batch, length, heads, _ = q_BLHK.shape
    pairs = pairs_at_once(length, block, causal=form.causal, window=form.window)
    return row_parts(batch, heads * pairs, usable_cores())


def _in_parts(attend: Callable[..., Any], parts: int, *arrays: Any) -> Any:
    """`attend` of arrays [B, ...], None among them, a part of the rows after the other."""
    if parts == 1:
        return attend(*arrays)
    cut = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), arrays)
    joined = jax.lax.map(lambda part: attend(*part), cut)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), joined)


def _first_key(group: QueryBlocks, start: Any, length: int) -> Any:
    """The first key of the block that starts at query `start` (int or int32 [])."""
    if group.window is None:
        return 0
    return jnp.clip(start - (group.window - 1), 0, length - group.width)


def _keys(x: jax.Array, first: Any, width: int, dim: int) -> jax.Array:
    """`width` keys from `first` on; nothing is copied where that is all of them."""
    if isinstance(first, int):
        return jax.lax.slice_in_dim(x, first, first + width, axis=dim)
    return jax.lax.dynamic_slice_in_dim(x, first, width, axis=dim)


def _mask(group: QueryBlocks, start: Any, first: Any, segments_BL: jax.Array | None, form: AttentionForm) -> jax.Array:
    """bool [B or 1, Q, S] of the block that starts at query `start`."""
    queries, keys = start + jnp.arange(group.size), first + jnp.arange(group.width)
    own = None if segments_BL is None else _keys(segments_BL, start, group.size, 1)
    seen = None if segments_BL is None else _keys(segments_BL, first, group.width, 1)
    return attention_mask(
        queries[None],
        keys[None],
        causal=form.causal,
        window=form.window,
        query_segments_BL=own,
        key_segments_BS=seen,
    )


def _each_block(group: QueryBlocks, body: Any, carry: Any) -> tuple[Any, Any]:
    """`body(carry, start)` for every block of a group; results are stacked along a leading dim [blocks]."""
    if group.blocks == 1:
        carry, out = body(carry, group.start)
        return carry, jax.tree.map(lambda x: x[None], out)
    return jax.lax.scan(body, carry, group.start + group.size * jnp.arange(group.blocks))


def _rows(blocks: jax.Array) -> jax.Array:
    """[blocks, B, G, R, Q, ...] -> [B, G, R, blocks * Q, ...]."""
    moved = jnp.moveaxis(blocks, 0, 3)
    return moved.reshape(*moved.shape[:3], -1, *moved.shape[5:])


def _split(q_BLHK: jax.Array, groups: int) -> jax.Array:
    batch, length, heads, head_dim = q_BLHK.shape
    return q_BLHK.reshape(batch, length, groups, heads // groups, head_dim).transpose(0, 2, 3, 1, 4)


def _join(x_BGRLK: jax.Array) -> jax.Array:
    batch, groups, repeats, length, head_dim = x_BGRLK.shape
    return x_BGRLK.transpose(0, 3, 1, 2, 4).reshape(batch, length, groups * repeats, head_dim)


def _swap(x_BLGK: jax.Array) -> jax.Array:
    return x_BLGK.transpose(0, 2, 1, 3)


def _forward(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segments_BL: jax.Array | None,
    form: AttentionForm,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """The result [B, L, H, K] and the log of the sum of exponentials, float32 [B, G, R, L, 1]."""
    length = q_BLHK.shape[1]
    q, k, v = _split(q_BLHK, k_BLGK.shape[2]), _swap(k_BLGK), _swap(v_BLGK)
    outs, statistics = [], []
    for group in cut_sequence(length, block, causal=form.causal, window=form.window):

        def attend(carry: None, start: Any, group: QueryBlocks = group) -> tuple[None, tuple[jax.Array, jax.Array]]:
            first = _first_key(group, start, length)
            keys, values = (_keys(x, first, group.width, 2) for x in (k, v))
            mask = _mask(group, start, first, segments_BL, form)
            queries = _keys(q, start, group.size, 3)
            scores = jnp.einsum("bgrqk,bgsk->bgrqs", queries, keys, preferred_element_type=jnp.float32)
            scores = capped(scores * (1 / math.sqrt(q.shape[-1])), form.softcap)
            scores = jnp.where(mask[:, None, None], scores, MASKED)
            largest = jnp.max(scores, axis=-1, keepdims=True)
            weights = jnp.exp(scores - largest)
            total = jnp.sum(weights, axis=-1, keepdims=True)
            out = jnp.einsum("bgrqs,bgsk->bgrqk", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
            return carry, ((out / total).astype(q.dtype), largest + jnp.log(total))

        _, (out, statistic) = _each_block(group, attend, None)
        outs.append(_rows(out))
        statistics.append(_rows(statistic))
    return _join(jnp.concatenate(outs, 3)), jnp.concatenate(statistics, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segments_BL: jax.Array | None,
    form: AttentionForm,
    block: int,
    parts: int,
) -> jax.Array:
    return _attend_forward(q_BLHK, k_BLGK, v_BLGK, segments_BL, form, block, parts)[0]


def _attend_forward(
    q: Any, k: Any, v: Any, segments: Any, form: AttentionForm, block: int, parts: int
) -> tuple[Any, Any]:
    forward = functools.partial(_forward, form=form, block=block)
    out, statistics = _in_parts(forward, parts, q, k, v, segments)
    out = checkpoint_name(out, KERNEL_RESIDUALS)
    return out, (q, k, v, segments, out, checkpoint_name(statistics, KERNEL_RESIDUALS))


def _attend_backward(form: AttentionForm, block: int, parts: int, saved: Any, gradient_BLHK: Any) -> tuple[Any, ...]:
    backward = functools.partial(_backward, form=form, block=block)
    return *_in_parts(backward, parts, *saved, gradient_BLHK), None


def _backward(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segments_BL: jax.Array | None,
    out_BLHK: jax.Array,
    statistics: jax.Array,
    gradient_BLHK: jax.Array,
    form: AttentionForm,
    block: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v, from what the forward pass kept."""
    length, groups = q_BLHK.shape[1], k_BLGK.shape[2]
    q, k, v = _split(q_BLHK, groups), _swap(k_BLGK), _swap(v_BLGK)
    out, gradient = _split(out_BLHK, groups), _split(gradient_BLHK, groups)
    repeats, scale = q.shape[2], 1 / math.sqrt(q.shape[-1])
    # The softmax's own term: the same for all keys of a query.
    own = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    # From k, so that inside `jax.shard_map` they are known to vary over the axes that the sums will vary over.
    zeros = constrain(jnp.where(k == k, jnp.float32(0), jnp.float32(0)), "batch", "activation_kv_heads", None, None)
    sums, d_queries = (zeros, zeros), []
    for group in reversed(cut_sequence(length, block, causal=form.causal, window=form.window)):

        def pull(sums: Any, start: Any, group: QueryBlocks = group) -> tuple[Any, jax.Array]:
            first = _first_key(group, start, length)
            keys, values = (_keys(x, first, group.width, 2) for x in (k, v))
            queries, d_out, statistic, own_term = (
                _merge(_keys(x, start, group.size, 3)) for x in (q, gradient, statistics, own)
            )
            mask_BSP = jnp.tile(_mask(group, start, first, segments_BL, form).swapaxes(1, 2), (1, 1, repeats))
            # Keys times queries: XLA for CPU multiplies at half the rate where a product sums over the rows of its left
            # matrix, which in this order one of the three gradients does instead of two. Not measured elsewhere.
            plain = jnp.einsum("bgsk,bgpk->bgsp", keys, queries, preferred_element_type=jnp.float32)
            plain = capped(plain * scale, form.softcap)
            weights = jnp.exp(jnp.where(mask_BSP[:, None], plain, MASKED) - statistic.swapaxes(2, 3))
            d_weights = jnp.einsum("bgsk,bgpk->bgsp", values, d_out, preferred_element_type=jnp.float32)
            d_scores = weights * (d_weights - own_term.swapaxes(2, 3))
            if form.softcap is not None:
                d_scores = d_scores * (1 - jnp.square(plain / form.softcap))
            # In the dtype of the inputs, or autodiff's float32 products would cost a multiple of theirs.
            d_scores, weights = (d_scores * scale).astype(q.dtype), weights.astype(q.dtype)
            d_query = jnp.einsum("bgsp,bgsk->bgpk", d_scores, keys)
            d_key = jnp.einsum("bgsp,bgpk->bgsk", d_scores, queries, preferred_element_type=jnp.float32)
            d_value = jnp.einsum("bgsp,bgpk->bgsk", weights, d_out, preferred_element_type=jnp.float32)
            shape = (*d_query.shape[:2], repeats, group.size, d_query.shape[-1])
            return (_add(sums[0], d_key, first), _add(sums[1], d_value, first)), d_query.reshape(shape)

        sums, d_query = _each_block(group, pull, sums)
        d_queries.append(_rows(d_query))
    d_key, d_value = (_swap(total).astype(k.dtype) for total in sums)
    return _join(jnp.concatenate(d_queries[::-1], 3)), d_key, d_value


def _merge(x_BGRQX: jax.Array) -> jax.Array:
    """[B, G, R, Q, X] -> [B, G, P, X]."""
    return x_BGRQX.reshape(*x_BGRQX.shape[:2], -1, x_BGRQX.shape[-1])


def _add(total_BGSK: jax.Array, part: jax.Array, first: Any) -> jax.Array:
    """The total with `part` added to the keys from `first` on."""
    if part.shape == total_BGSK.shape:
        return total_BGSK + part
    old = _keys(total_BGSK, first, part.shape[2], 2)
    return jax.lax.dynamic_update_slice_in_dim(total_BGSK, old + part, first, axis=2)


_attend.defvjp(_attend_forward, _attend_backward)


def blockwise_attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segments_BL: jax.Array | None,
    form: AttentionForm,
    *,
    block: int | None = None,
    parts: int | None = None,
) -> jax.Array:
    """Attention of a sequence to itself: [B, L, H, K] in the dtype of q; scores and softmax in float32.

    Args:
        q_BLHK, k_BLGK, v_BLGK: any float dtype; H must be a multiple of G.
        segments_BL: packed documents that do not see each other; None: one a row.
        form: who sees whom.
        block: queries of a block; None: what suits the platform.
        parts: of the rows, which must divide by it, one after the other; None: as many as keep scores in the caches of
            a CPU. The numbers are the same.
    """
    block = block or block_size(platform(), q_BLHK.shape[1])
    return _attend(q_BLHK, k_BLGK, v_BLGK, segments_BL, form, block, parts or parts_of_batch(q_BLHK, form, block))
