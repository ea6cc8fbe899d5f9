"""Self-attention of a sequence that is sharded over mesh axis `context`: three methods, one signature.

The ring sends keys and values around the axis, so that no device holds the full sequence (Liu et al. 2023, arXiv
2310.01889). Causal masks leave the devices with unequal work on contiguous shards; as in Brandon et al. 2023, "Striped
Attention" (arXiv 2311.09431), positions are dealt out again, here in the zig-zag order: of 2n chunks device i computes
chunks i and 2n-1-i.

Shapes: B batch, L sequence (global outside, local shard inside), Z halves of it that are masked apart (2 causal, else
1), C = L / Z positions, S all key positions (of the ring: C of a block), H query heads, G key-value heads, R = H / G,
K head dim.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxtrain.layout.manual import run_manually, spec_of
from jaxtrain.layout.rules import entry_degree
from jaxtrain.layout.sharding import Layout
from jaxtrain.ops.attention.reference import MASKED, attention, form_mask
from jaxtrain.ops.attention.rules import (
    CAUSAL,
    AttentionForm,
    ContextCase,
    ScoreBlock,
    check_context_length,
    choose_context_way,
    home,
    own_blocks,
    passing_blocks,
)
from jaxtrain.runtime.compiler import note_choice

AXIS = "context"
# (q_BLHK, k_BLGK, v_BLGK, segments_BL or None) -> out_BLHK, of full sequences.
WholeAttention = Callable[[Array, Array, Array, Array | None], Array]
# Softmax over the keys seen up to this point: row maximum and sum [B, G, R, C], weighted values [B, G, R, C, K].
Partial = tuple[Array, Array, Array]
# One of the two halves of a device: 0 or 1, or bool [] where it depends on the device.
Half = int | Array
# A nested structure of arrays, None among them.
Tree = Any


def _repeat_heads(x_BLGK: Array, multiple: int) -> Array:
    """Repeat each key-value head just enough that their count divides by `multiple`."""
    groups = x_BLGK.shape[2]
    repeats = math.lcm(groups, multiple) // groups
    return x_BLGK if repeats == 1 else jnp.repeat(x_BLGK, repeats, axis=2)


def _gather_positions(x_BL: Array) -> Array:
    """Gather the shards of all devices: [B, L, ...] to [B, S, ...], in order."""
    return jax.lax.all_gather(x_BL, AXIS, axis=1, tiled=True)


def _all_to_all(
    q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array | None, whole_attention: WholeAttention
) -> Array:
    """Exchange each device's part of the sequence for the full sequence of fewer heads, attend, and exchange back.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv 2309.14509).
    """
    size = jax.lax.axis_size(AXIS)

    def to_heads(x: Array) -> Array:
        return jax.lax.all_to_all(x, AXIS, split_axis=2, concat_axis=1, tiled=True)

    k_BSGK, v_BSGK = (to_heads(_repeat_heads(x, size)) for x in (k_BLGK, v_BLGK))
    segments_BS = None if segments_BL is None else _gather_positions(segments_BL)
    out_BSHK = whole_attention(to_heads(q_BLHK), k_BSGK, v_BSGK, segments_BS)
    return jax.lax.all_to_all(out_BSHK, AXIS, split_axis=1, concat_axis=2, tiled=True)


def _gather(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array | None, form: AttentionForm) -> Array:
    """Gather all keys and values on every device, which attends to them from its own queries."""
    k_BSGK, v_BSGK = _gather_positions(k_BLGK), _gather_positions(v_BLGK)
    segments_BS = None if segments_BL is None else _gather_positions(segments_BL)
    length = q_BLHK.shape[1]
    positions_L = jax.lax.axis_index(AXIS) * length + jnp.arange(length, dtype=jnp.int32)
    order_S = jnp.arange(k_BSGK.shape[1], dtype=jnp.int32)
    mask_BLS = form_mask(form, positions_L, order_S, segments_BL, segments_BS)
    return attention(q_BLHK, k_BSGK, v_BSGK, mask_BLS, softcap=form.softcap)


def _head_parts(layout: Layout) -> int:
    """In how many parts the compiler's axes shard the heads."""
    (entry,) = spec_of(layout, "activation_heads")
    return entry_degree(entry, layout.degrees)


def _case(layout: Layout, num_heads: int, num_kv_heads: int, form: AttentionForm) -> ContextCase:
    mesh = layout.mesh.shape
    return ContextCase(mesh[AXIS], mesh["pipe"], _head_parts(layout), num_heads, num_kv_heads, form)


def choose_context(layout: Layout, num_heads: int, num_kv_heads: int, form: AttentionForm = CAUSAL) -> str:
    """The implementation that runs on a layout: `choose_context_way`."""
    return choose_context_way(layout.context_attention, _case(layout, num_heads, num_kv_heads, form))


def context_attention(
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    segments_BL: Array | None = None,
    *,
    form: AttentionForm,
    layout: Layout,
    whole_attention: WholeAttention,
) -> Array:
    """Attend to a sequence that is sharded over `context` in its true order, with heads sharded over `tensor`.

    It is called where the compiler handles `context`, at the top of a step or inside a region that is manual over other
    axes, and enters the remaining axes of the mesh. A batch that does not divide by its axes is replicated.

    Args:
        q_BLHK, k_BLGK, v_BLGK, segments_BL, form: as of `blockwise_attention`; the result is sharded like q.
        layout: of the code that calls this; names the method (see `choose_context`).
        whole_attention: what attends over full sequences where a device has some of the heads (all_to_all).

    Raises:
        ConfigError: heads or a sequence that do not divide; names sizes that work.
    """
    batch, length, heads, _ = q_BLHK.shape
    groups = k_BLGK.shape[2]
    if layout.mesh.shape[AXIS] == 1:
        return whole_attention(q_BLHK, k_BLGK, v_BLGK, segments_BL)
    check_context_length(layout.context_attention, _case(layout, heads, groups, form), length)
    name = choose_context(layout, heads, groups, form)
    note_choice("attention over context", name, [])
    spec = spec_of(layout, "batch", "sequence", "activation_heads", None)
    if batch % entry_degree(spec[0], layout.degrees):
        spec = PartitionSpec(None, *spec[1:])
    # Keys and values are sharded as the queries are, so that a device's query heads meet their own key-value heads.
    k_BLGK, v_BLGK = (_repeat_heads(x, _head_parts(layout)) for x in (k_BLGK, v_BLGK))

    def local(q: Array, k: Array, v: Array, segments: Array | None = None) -> Array:
        with jax.named_scope(f"context_{name}"):
            match name:
                case "ring":  # whose kernel is its own, without window and softcap
                    return ring_attention(q, k, v, segments, causal=form.causal)
                case "all_to_all":
                    return _all_to_all(q, k, v, segments, whole_attention)
            return _gather(q, k, v, segments, form)

    constants: tuple[Array, ...] = () if segments_BL is None else (segments_BL,)
    return run_manually(
        local,
        layout,
        (q_BLHK, k_BLGK, v_BLGK),
        constants,
        in_specs=(spec, spec, spec, *[PartitionSpec(*spec[:2])] * len(constants)),
        out_specs=spec,
    )


# --- The ring, on local shards. ---


def _moves(size: int, *, back: bool) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(from, to) of the even chunks and of the odd ones; device d holds chunks 2d and 2d+1 before, its own after."""
    even, odd = ([(device, home(2 * device + parity, size)) for device in range(size)] for parity in (0, 1))
    return ([(b, a) for a, b in even], [(b, a) for a, b in odd]) if back else (even, odd)


def _to_zigzag(x_BL: Array) -> Array:
    """[B, L, ...] of contiguous positions as [2, B, C, ...]: the chunks i and 2n-1-i."""
    moves = _moves(jax.lax.axis_size(AXIS), back=False)
    even, odd = (jax.lax.ppermute(x, AXIS, m) for x, m in zip(jnp.split(x_BL, 2, axis=1), moves, strict=True))
    first_is_odd = jax.lax.axis_index(AXIS) % 2 == 1
    return jnp.stack([jnp.where(first_is_odd, odd, even), jnp.where(first_is_odd, even, odd)])


def _from_zigzag(x_ZBC: Array) -> Array:
    """[2, B, C, ...] in zig-zag order as [B, L, ...] of contiguous positions."""
    first, second = x_ZBC
    first_is_odd = jax.lax.axis_index(AXIS) % 2 == 1
    chunks = jnp.where(first_is_odd, second, first), jnp.where(first_is_odd, first, second)
    moves = _moves(jax.lax.axis_size(AXIS), back=True)
    return jnp.concatenate([jax.lax.ppermute(x, AXIS, m) for x, m in zip(chunks, moves, strict=True)], axis=1)


def visible(
    query_positions_C: Array | None,
    key_positions_S: Array | None,
    query_segments_BC: Array | None,
    key_segments_BS: Array | None,
) -> Array | None:
    """Mark the keys that a query may see: bool [B or 1, C, S]; None: every query sees every key.

    A query sees keys at or before its own position, and of its own segment; None: order or segments do not matter.
    """
    mask = None
    if query_positions_C is not None and key_positions_S is not None:
        mask = (key_positions_S[None, :] <= query_positions_C[:, None])[None]
    if query_segments_BC is not None and key_segments_BS is not None:
        same = query_segments_BC[:, :, None] == key_segments_BS[:, None, :]
        mask = same if mask is None else mask & same
    return mask


def _scores(q_BCGRK: Array, k_BSGK: Array, mask_BCS: Array | None) -> Array:
    """Float32 scores [B, G, R, C, S]."""
    scores = jnp.einsum("bcgrk,bsgk->bgrcs", q_BCGRK, k_BSGK, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(q_BCGRK.shape[-1])
    # A sum: a select would broadcast the scalar to all scores, and keep it as a loop constant (see `_tied`).
    return scores if mask_BCS is None else scores + (1 - mask_BCS.astype(jnp.float32))[:, None, None] * MASKED


def _attend(q_BCGRK: Array, k_BSGK: Array, v_BSGK: Array, mask_BCS: Array | None) -> Partial:
    """Compute the softmax over one block of keys, not yet divided by its sum."""
    scores = _scores(q_BCGRK, k_BSGK, mask_BCS)
    maximum = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - maximum[..., None])
    values = jnp.einsum("bgrcs,bsgk->bgrck", weights.astype(v_BSGK.dtype), v_BSGK, preferred_element_type=jnp.float32)
    return maximum, jnp.sum(weights, axis=-1), values


def _merge(one: Partial, other: Partial) -> Partial:
    """Combine the softmax over two blocks of keys into that over both."""
    maximum = jnp.maximum(one[0], other[0])
    scales = jnp.exp(one[0] - maximum), jnp.exp(other[0] - maximum)
    total, values = (
        one[i] * scales[0].reshape(shape) + other[i] * scales[1].reshape(shape)
        for i, shape in ((1, maximum.shape), (2, (*maximum.shape, 1)))
    )
    return maximum, total, values


def _attend_backward(
    q_BCGRK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    mask_BCS: Array | None,
    logsumexp_BGRC: Array,
    gradient_BCGRK: Array,
    delta_BGRC: Array,
) -> tuple[Array, Array, Array]:
    """Compute float32 gradients of q, k and v from one block: Dao et al. 2022, "FlashAttention", algorithm 4.

    The logsumexp is that of the scores with all keys; delta is the sum over K of the output times its gradient.
    """
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    weights = jnp.exp(_scores(q_BCGRK, k_BSGK, mask_BCS) - logsumexp_BGRC[..., None])
    d_weights = einsum("bcgrk,bsgk->bgrcs", gradient_BCGRK, v_BSGK)
    d_scores = (weights * (d_weights - delta_BGRC[..., None]) / math.sqrt(q_BCGRK.shape[-1])).astype(q_BCGRK.dtype)
    dv = einsum("bgrcs,bcgrk->bsgk", weights.astype(v_BSGK.dtype), gradient_BCGRK)
    return einsum("bgrcs,bsgk->bcgrk", d_scores, k_BSGK), einsum("bgrcs,bcgrk->bsgk", d_scores, q_BCGRK), dv


def _take(tree: Tree, half: Half) -> Tree:
    """One half of arrays [Z, ...]."""
    index = jnp.int32(half)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def _put(tree: Tree, half: Half, values: Tree) -> Tree:
    """Arrays [Z, ...] with one half replaced."""
    index = jnp.int32(half)
    return jax.tree.map(lambda x, v: jax.lax.dynamic_update_index_in_dim(x, v, index, 0), tree, values)


def _add(tree: Tree, half: Half, values: Tree) -> Tree:
    """Arrays [Z, ...] with values added to one half."""
    return _put(tree, half, jax.tree.map(jnp.add, _take(tree, half), values))


def _stack(trees: list[Tree]) -> Tree:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def _pass_on(tree: Tree) -> Tree:
    """Send arrays to the next device of the ring, and receive those of the device before."""
    size = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(tree, AXIS, [(device, (device + 1) % size) for device in range(size)])


def _around(visit: Callable[[Tree, Tree, Array], Tree], state: Tree, tree: Tree) -> Tree:
    """Visit the arrays of every other device: `visit(state, arrays of a device, its index int32 [])` -> state.

    The next arrays are sent before the present ones are visited, so that the two can overlap.
    """
    size, own = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)

    def turn(carry: tuple[Tree, Tree], step: Array) -> tuple[tuple[Tree, Tree], None]:
        state, tree = carry
        following = _pass_on(tree)
        return (visit(state, tree, (own - step) % size), following), None

    carry = (state, _pass_on(tree))
    if size > 2:
        carry, _ = jax.lax.scan(turn, carry, jnp.arange(1, size - 1, dtype=jnp.int32))
    return visit(*carry, (own + 1) % size)


def _tied(tree: Tree, x: Array) -> Tree:
    """Make a tree depend on `x`: in a scan over layers masks would else be made once and kept for all blocks."""
    return jax.lax.optimization_barrier((tree, x))[0]


def _own_masks(segments_ZBC: Array | None, rows_ZBC: Array, *, causal: bool) -> list[Array | None]:
    """Make the masks of `own_blocks`: of pairs of the same half a triangle, if causal."""
    order = _tied(jnp.arange(rows_ZBC.shape[2], dtype=jnp.int32), rows_ZBC)
    segments = [None, None] if segments_ZBC is None else segments_ZBC
    return [
        visible(*((order, order) if causal and a == b else (None, None)), segments[a], segments[b])
        for a, b in own_blocks(causal=causal)
    ]


def _passing_mask(own_ZBC: Array | None, passing_ZBC: Array | None, block: ScoreBlock) -> Array | None:
    """Make the mask of a block of own queries and passing keys, from their segments."""
    return visible(None, None, _take(own_ZBC, block[0]), _take(passing_ZBC, block[1]))


def _ring_forward(
    q_ZBCGRK: Array, k_ZBSGK: Array, v_ZBSGK: Array, segments_ZBC: Array | None, causal: bool
) -> tuple[Array, Tree]:
    """Attend to the halves of all devices: [Z, B, C, G, R, K] in the dtype of q, and what the backward pass needs."""
    own, halves = jax.lax.axis_index(AXIS), q_ZBCGRK.shape[0]
    segments_ZBC = _tied(segments_ZBC, q_ZBCGRK)
    blocks, masks = own_blocks(causal=causal), _own_masks(segments_ZBC, q_ZBCGRK, causal=causal)
    partials = [_attend(q_ZBCGRK[a], k_ZBSGK[b], v_ZBSGK[b], m) for (a, b), m in zip(blocks, masks, strict=True)]
    state = _stack(partials[:halves])
    for (query, _), partial in zip(blocks[halves:], partials[halves:], strict=True):
        state = _put(state, query, _merge(_take(state, query), partial))

    def visit(state: Tree, tree: Tree, source: Array) -> Tree:
        k, v, segments = tree
        for block in passing_blocks(own, source, causal=causal):
            query, key = block
            mask = _passing_mask(segments_ZBC, segments, block)
            partial = _attend(_take(q_ZBCGRK, query), _take(k, key), _take(v, key), mask)
            state = _put(state, query, _merge(_take(state, query), partial))
        return state

    maximum, total, values = _around(visit, state, (k_ZBSGK, v_ZBSGK, segments_ZBC))
    out = jnp.einsum("zbgrck->zbcgrk", values / total[..., None]).astype(q_ZBCGRK.dtype)
    return out, (q_ZBCGRK, k_ZBSGK, v_ZBSGK, segments_ZBC, out, maximum + jnp.log(total))


def _ring_backward(causal: bool, saved: Tree, gradient: Array) -> tuple[Array, Array, Array, None]:
    """Go around the ring a second time: the gradients of keys and values are sent with them, and back at the end."""
    q, k, v, segments, out, logsumexp = saved
    own, halves = jax.lax.axis_index(AXIS), q.shape[0]
    delta = jnp.einsum("zbcgrk,zbcgrk->zbgrc", out, gradient, preferred_element_type=jnp.float32)
    rows = (q, logsumexp, gradient, delta)

    def pull(query: Half, k: Array, v: Array, mask: Array | None) -> tuple[Array, tuple[Array, Array]]:
        q, logsumexp, gradient, delta = _take(rows, query)
        dq, dk, dv = _attend_backward(q, k, v, mask, logsumexp, gradient, delta)
        return dq, (dk, dv)

    blocks, masks = own_blocks(causal=causal), _own_masks(segments, gradient, causal=causal)
    pulled = [pull(a, k[b], v[b], mask) for (a, b), mask in zip(blocks, masks, strict=True)]
    dq, dkv = _stack(pulled[:halves])
    for (query, key), (dq_block, dkv_block) in zip(blocks[halves:], pulled[halves:], strict=True):
        dq, dkv = _add(dq, query, dq_block), _add(dkv, key, dkv_block)

    def visit(state: Tree, tree: Tree, source: Array) -> Tree:
        dq, dkv = state
        dkv = _pass_on(dkv)  # needed only after the block's own products, so the two can overlap
        k, v, passing_segments = tree
        for block in passing_blocks(own, source, causal=causal):
            query, key = block
            mask = _passing_mask(segments, passing_segments, block)
            dq_block, dkv_block = pull(query, _take(k, key), _take(v, key), mask)
            dq, dkv = _add(dq, query, dq_block), _add(dkv, key, dkv_block)
        return dq, dkv

    dq, dkv = _around(visit, (dq, dkv), (k, v, segments))
    dk, dv = _pass_on(dkv)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(q_ZBCGRK: Array, k_ZBSGK: Array, v_ZBSGK: Array, segments_ZBC: Array | None, causal: bool) -> Array:
    """Attend to the halves of all devices; autodiff of it would keep the scores of every step."""
    return _ring_forward(q_ZBCGRK, k_ZBSGK, v_ZBSGK, segments_ZBC, causal)[0]


_ring.defvjp(_ring_forward, _ring_backward)


def ring_attention(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array | None, *, causal: bool) -> Array:
    """Attend from local shards to the full sequence, in memory that grows with the local sequence only.

    Arguments and result are the shards of those of `blockwise_attention`; where it is causal, L must be even.
    """
    batch, length, heads, head_dim = q_BLHK.shape
    groups = k_BLGK.shape[2]
    q_BLGRK = q_BLHK.reshape(batch, length, groups, heads // groups, head_dim)
    split = _to_zigzag if causal else functools.partial(jnp.expand_dims, axis=0)
    halves = jax.tree.map(split, (q_BLGRK, k_BLGK, v_BLGK, segments_BL))
    out_ZBCGRK: Any = _ring(*halves, causal)
    out_BLGRK = _from_zigzag(out_ZBCGRK) if causal else out_ZBCGRK[0]
    return out_BLGRK.reshape(q_BLHK.shape)
