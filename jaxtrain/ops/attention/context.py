"""Self-attention of a sequence that is sharded over mesh axis `context`: three methods, one signature.

Shapes: B batch, L sequence (global outside, local shard inside), S all key positions, H query heads, G key-value
heads, K head dim.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxtrain.layout.manual import run_manually, spec_of
from jaxtrain.layout.rules import entry_degree
from jaxtrain.layout.sharding import Layout
from jaxtrain.ops.attention.reference import attention, form_mask
from jaxtrain.ops.attention.ring import AXIS, ring_attention
from jaxtrain.ops.attention.rules import CAUSAL, AttentionForm, ContextCase, check_context_length, choose_context_way
from jaxtrain.runtime.compiler import note_choice

# (q_BLHK, k_BLGK, v_BLGK, segments_BL or None) -> out_BLHK, of full sequences.
WholeAttention = Callable[[Array, Array, Array, Array | None], Array]


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
