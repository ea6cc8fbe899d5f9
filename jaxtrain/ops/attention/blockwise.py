"""Attention by blocks of queries, with its own backward pass: its memory is linear in the length, on any backend.

A block of queries is multiplied with all the keys that it may see at once, so that its softmax is a plain one; keys
that no query of a group of blocks sees are never multiplied. The backward pass recomputes the weights from the log of
their sum, which is all that the forward pass keeps besides its result (Dao et al. 2022; Rabe and Staats 2021).

Shapes: B batch, L length, S keys of a block, H query heads, G key-value heads, R = H / G, K head_dim, Q queries of a
block, P = R * Q, W distances of keys and queries.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.layout.sharding import constrain, current_layout, platform
from jaxtrain.ops.attention.reference import MASKED, PLAIN, Learned, capped, fold, form_mask, grouped_sinks, unfold
from jaxtrain.ops.attention.rules import AttentionForm, QueryBlocks, block_size, cut_sequence, pairs_at_once, row_parts
from jaxtrain.remat.policy import KERNEL_RESIDUALS
from jaxtrain.runtime.devices import usable_cores

# An index that is known when the code is traced, or int32 [].
Index = int | Array
# Gradients of keys and values, and of the bias of each row where there is one.
Sums = tuple[Array, ...]
# The arrays of `blockwise_attention`.
Arrays = tuple[Array, Array, Array, Array | None, Learned]


@dataclass(frozen=True)
class _How:
    """The settings of attention, the queries of a block, and the parts in which the rows of a batch are processed."""

    form: AttentionForm
    block: int
    parts: int

    def cut(self, length: int) -> list[QueryBlocks]:
        return cut_sequence(length, self.block, causal=self.form.causal, window=self.form.window)


def parts_of_batch(q_BLHK: Array, form: AttentionForm, block: int) -> int:
    """Return in how many parts the rows of a batch are processed, one after the other; the results are the same.

    It is 1 where rows may be sharded over devices, because chunks of the batch would move them between devices, on
    accelerators, which are fastest with all rows at once, and in an exported program for any number of rows.
    """
    layout = current_layout()
    devices = jax.device_count() if layout is None else layout.mesh.size
    batch, length, heads, _ = q_BLHK.shape
    if platform() != "cpu" or devices > 1 or not isinstance(batch, int):
        return 1
    pairs = pairs_at_once(length, block, causal=form.causal, window=form.window)
    return row_parts(batch, heads * pairs, usable_cores())


def _in_parts(attend: Callable[..., tuple[Array, ...]], parts: int, *arrays: Any) -> tuple[Array, ...]:
    """Apply `attend` to arrays [B, ...], some of which may be None, one part of the rows after the other."""
    if parts == 1:
        return attend(*arrays)
    chunks = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), arrays)
    joined = jax.lax.map(lambda part: attend(*part), chunks)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), joined)


def _first_key(group: QueryBlocks, start: Index, length: int) -> Index:
    """Return the first key of the block that starts at query `start`."""
    if group.window is None:
        return 0
    return jnp.clip(start - (group.window - 1), 0, length - group.width)


def _keys(x: Array, first: Index, width: int, dim: int) -> Array:
    """Take `width` keys from `first` on along a dim; nothing is copied where these are all keys."""
    if isinstance(first, int):
        return jax.lax.slice_in_dim(x, first, first + width, axis=dim)
    return jax.lax.dynamic_slice_in_dim(x, first, width, axis=dim)


def _mask(group: QueryBlocks, start: Index, first: Index, segments_BL: Array | None, form: AttentionForm) -> Array:
    """Make the mask of the block that starts at query `start` and key `first`: bool [B or 1, Q, S]."""
    queries, keys = start + jnp.arange(group.size), first + jnp.arange(group.width)
    own = None if segments_BL is None else _keys(segments_BL, start, group.size, 1)
    seen = None if segments_BL is None else _keys(segments_BL, first, group.width, 1)
    return form_mask(form, queries, keys, own, seen)


def _bias(bias_HW: Array, group: QueryBlocks, start: Index, first: Index, groups: int) -> Array:
    """Unfold the bias of the block that starts at query `start` and key `first`: float32 [G, R, Q, S]."""
    length = (bias_HW.shape[-1] + 1) // 2
    distances = _keys(bias_HW, length - group.size + first - start, group.size + group.width - 1, 1)
    bias_HQS = unfold(distances, group.size)
    return bias_HQS.reshape(groups, -1, *bias_HQS.shape[1:])


def _each_block(group: QueryBlocks, body: Callable[[Any, Index], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
    """Call `body(carry, start)` for every block of a group; results are stacked along a leading dim [blocks]."""
    if group.blocks == 1:
        carry, out = body(carry, group.start)
        return carry, jax.tree.map(lambda x: x[None], out)
    return jax.lax.scan(body, carry, group.start + group.size * jnp.arange(group.blocks))


def _rows(blocks: Array) -> Array:
    """Join the rows of blocks: [blocks, B, G, R, Q, ...] -> [B, G, R, blocks * Q, ...]."""
    moved = jnp.moveaxis(blocks, 0, 3)
    return moved.reshape(*moved.shape[:3], -1, *moved.shape[5:])


def _split(q_BLHK: Array, groups: int) -> Array:
    batch, length, heads, head_dim = q_BLHK.shape
    return q_BLHK.reshape(batch, length, groups, heads // groups, head_dim).transpose(0, 2, 3, 1, 4)


def _join(x_BGRLK: Array) -> Array:
    batch, groups, repeats, length, head_dim = x_BGRLK.shape
    return x_BGRLK.transpose(0, 3, 1, 2, 4).reshape(batch, length, groups * repeats, head_dim)


def _swap(x_BLGK: Array) -> Array:
    return x_BLGK.transpose(0, 2, 1, 3)


def _forward(
    q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array | None, learned: Learned, how: _How
) -> tuple[Array, Array]:
    """Compute the result [B, L, H, K] and the log of the sum of exponentials, float32 [B, G, R, L, 1]."""
    form, length, (bias_HW, sink_H) = how.form, q_BLHK.shape[1], learned
    q, k, v = _split(q_BLHK, k_BLGK.shape[2]), _swap(k_BLGK), _swap(v_BLGK)
    outs, statistics = [], []
    for group in how.cut(length):

        def attend(carry: None, start: Index, group: QueryBlocks = group) -> tuple[None, tuple[Array, Array]]:
            first = _first_key(group, start, length)
            keys, values = (_keys(x, first, group.width, 2) for x in (k, v))
            mask = _mask(group, start, first, segments_BL, form)
            queries = _keys(q, start, group.size, 3)
            scores = jnp.einsum("bgrqk,bgsk->bgrqs", queries, keys, preferred_element_type=jnp.float32)
            scores = scores * (1 / math.sqrt(q.shape[-1]))
            if bias_HW is not None:
                scores = scores + _bias(bias_HW, group, start, first, q.shape[1])
            scores = capped(scores, form.softcap)
            scores = jnp.where(mask[:, None, None], scores, MASKED)
            largest = jnp.max(scores, axis=-1, keepdims=True)
            if sink_H is not None:
                largest = jnp.maximum(largest, grouped_sinks(sink_H, q.shape[1]))
            weights = jnp.exp(scores - largest)
            total = jnp.sum(weights, axis=-1, keepdims=True)
            if sink_H is not None:
                total = total + jnp.exp(grouped_sinks(sink_H, q.shape[1]) - largest)
            out = jnp.einsum("bgrqs,bgsk->bgrqk", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
            return carry, ((out / total).astype(q.dtype), largest + jnp.log(total))

        _, (out, statistic) = _each_block(group, attend, None)
        outs.append(_rows(out))
        statistics.append(_rows(statistic))
    return _join(jnp.concatenate(outs, 3)), jnp.concatenate(statistics, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(arrays: Arrays, how: _How) -> Array:
    return _attend_forward(arrays, how)[0]


def _attend_forward(arrays: Arrays, how: _How) -> tuple[Array, tuple[Any, ...]]:
    *rows, learned = arrays
    out_BLHK, statistics = _in_parts(functools.partial(_forward, learned=learned, how=how), how.parts, *rows)
    out_BLHK = checkpoint_name(out_BLHK, KERNEL_RESIDUALS)
    return out_BLHK, (*arrays, out_BLHK, checkpoint_name(statistics, KERNEL_RESIDUALS))


def _attend_backward(how: _How, saved: tuple[Any, ...], gradient_BLHK: Array) -> tuple[tuple[Any, ...]]:
    *rows, learned, out_BLHK, statistics = saved
    backward = functools.partial(_backward, bias_HW=learned.bias_HW, how=how)
    d_query, d_key, d_value, *d_bias = _in_parts(backward, how.parts, tuple(rows), out_BLHK, statistics, gradient_BLHK)
    d_sink = None
    if learned.sink_H is not None:
        # Its value is 0, so that of the softmax's gradient the term that all keys share is left.
        groups = statistics.shape[1]
        own = jnp.sum(_split(gradient_BLHK.astype(jnp.float32) * out_BLHK.astype(jnp.float32), groups), -1)
        shares = jnp.exp(grouped_sinks(learned.sink_H, groups) - statistics)[..., 0]
        d_sink = -jnp.sum(shares * own, (0, 3)).reshape(-1).astype(learned.sink_H.dtype)
    return ((d_query, d_key, d_value, None, Learned(jnp.sum(d_bias[0], 0) if d_bias else None, d_sink)),)


def _backward(
    rows: tuple[Any, ...], out_BLHK: Array, statistics: Array, gradient_BLHK: Array, bias_HW: Array | None, how: _How
) -> tuple[Array, ...]:
    """Compute the gradients of q, k and v, and of the bias of each row, from the arrays that the forward pass kept."""
    q_BLHK, k_BLGK, v_BLGK, segments_BL = rows
    form, length, groups = how.form, q_BLHK.shape[1], k_BLGK.shape[2]
    q, k, v = _split(q_BLHK, groups), _swap(k_BLGK), _swap(v_BLGK)
    out, gradient = _split(out_BLHK, groups), _split(gradient_BLHK, groups)
    repeats, scale = q.shape[2], 1 / math.sqrt(q.shape[-1])
    # The term of the softmax's gradient that is the same for all keys of a query.
    own = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    # Derived from k, so that inside `jax.shard_map` they vary over the same axes as the sums will.
    zeros = constrain(jnp.where(k == k, jnp.float32(0), jnp.float32(0)), "batch", "activation_kv_heads", None, None)
    sums, d_queries = (zeros, zeros), []
    if bias_HW is not None:
        # One for each row, so that the rows of other devices are summed once and not in every block.
        zeros = jnp.where(own == own, jnp.float32(0), jnp.float32(0))[:, :, :, 0].reshape(-1, bias_HW.shape[0], 1)
        zeros = jnp.broadcast_to(zeros, (*zeros.shape[:2], bias_HW.shape[-1]))
        sums = (*sums, constrain(zeros, "batch", "activation_heads", None))
    for group in reversed(how.cut(length)):

        def pull(sums: Sums, start: Index, group: QueryBlocks = group) -> tuple[Sums, Array]:
            first = _first_key(group, start, length)
            keys, values = (_keys(x, first, group.width, 2) for x in (k, v))
            queries, d_out, statistic, own_term = (
                _merge(_keys(x, start, group.size, 3)) for x in (q, gradient, statistics, own)
            )
            mask_BSP = jnp.tile(_mask(group, start, first, segments_BL, form).swapaxes(1, 2), (1, 1, repeats))
            # Keys times queries: XLA for CPU multiplies at half the rate where a product sums over the rows of its left
            # matrix, which in this order one of the three gradients does instead of two. Other backends were not
            # measured.
            plain = jnp.einsum("bgsk,bgpk->bgsp", keys, queries, preferred_element_type=jnp.float32)
            plain = plain * scale
            if bias_HW is not None:
                plain = plain + _merge(_bias(bias_HW, group, start, first, groups)[None]).swapaxes(2, 3)
            plain = capped(plain, form.softcap)
            weights = jnp.exp(jnp.where(mask_BSP[:, None], plain, MASKED) - statistic.swapaxes(2, 3))
            d_weights = jnp.einsum("bgsk,bgpk->bgsp", values, d_out, preferred_element_type=jnp.float32)
            d_scores = weights * (d_weights - own_term.swapaxes(2, 3))
            if form.softcap is not None:
                d_scores = d_scores * (1 - jnp.square(plain / form.softcap))
            more = sums[2:]
            if bias_HW is not None:
                d_bias = d_scores.swapaxes(2, 3).reshape(d_scores.shape[0], -1, group.size, group.width)
                more = (_add(more[0], fold(d_bias), length - group.size + first - start),)
            # In the dtype of the inputs, because float32 products take several times as long.
            d_scores, weights = (d_scores * scale).astype(q.dtype), weights.astype(q.dtype)
            d_query = jnp.einsum("bgsp,bgsk->bgpk", d_scores, keys)
            d_key = jnp.einsum("bgsp,bgpk->bgsk", d_scores, queries, preferred_element_type=jnp.float32)
            d_value = jnp.einsum("bgsp,bgpk->bgsk", weights, d_out, preferred_element_type=jnp.float32)
            shape = (*d_query.shape[:2], repeats, group.size, d_query.shape[-1])
            kept = (_add(sums[0], d_key, first), _add(sums[1], d_value, first))
            return (*kept, *more), d_query.reshape(shape)

        sums, d_query = _each_block(group, pull, sums)
        d_queries.append(_rows(d_query))
    d_key, d_value = (_swap(total).astype(k.dtype) for total in sums[:2])
    return _join(jnp.concatenate(d_queries[::-1], 3)), d_key, d_value, *sums[2:]


def _merge(x_BGRQX: Array) -> Array:
    """Join the queries of a group of heads: [B, G, R, Q, X] -> [B, G, P, X]."""
    return x_BGRQX.reshape(*x_BGRQX.shape[:2], -1, x_BGRQX.shape[-1])


def _add(total_BGSK: Array, part: Array, first: Index) -> Array:
    """Add `part` to dim 2 (the keys) of the total from `first` on."""
    if part.shape == total_BGSK.shape:
        return total_BGSK + part
    old = _keys(total_BGSK, first, part.shape[2], 2)
    return jax.lax.dynamic_update_slice_in_dim(total_BGSK, old + part, first, axis=2)


_attend.defvjp(_attend_forward, _attend_backward)


def blockwise_attention(
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    segments_BL: Array | None,
    form: AttentionForm,
    learned: Learned = PLAIN,
    *,
    block: int | None = None,
) -> Array:
    """Compute the attention of a sequence to itself by blocks of queries; scores and softmax are in float32.

    Args:
        q_BLHK, k_BLGK, v_BLGK: of one float dtype; H must be a multiple of G.
        segments_BL: numbers of packed documents, which do not see each other; None: one document per row.
        form: the settings of attention.
        learned: numbers beside the products of queries and keys.
        block: queries of a block; None: a size that suits the platform.

    Returns:
        [B, L, H, K] in the dtype of q.
    """
    block = block or block_size(platform(), q_BLHK.shape[1])
    how = _How(form, block, parts_of_batch(q_BLHK, form, block))
    return _attend((q_BLHK, k_BLGK, v_BLGK, segments_BL, learned), how)
