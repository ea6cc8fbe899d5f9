"""Fused attention kernels: cuDNN's on NVIDIA GPUs, and splash (Pallas, shipped with jax) on TPUs.

Their memory is linear in the length. Shapes: B batch, L length, H query heads, G key-value heads, K head_dim.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxtrain.layout.manual import run_manually, spec_of
from jaxtrain.layout.sharding import current_layout
from jaxtrain.ops.attention.rules import SPLASH_LANES, AttentionForm
from jaxtrain.remat.policy import KERNEL_RESIDUALS

QUERIES = ("batch", "sequence", "activation_heads", None)
KEYS = ("batch", "sequence", "activation_kv_heads", None)
# Larger tiles read keys and values from memory less often.
_LARGEST_BLOCK = 512


def cudnn_attention(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, form: AttentionForm) -> Array:
    """Compute the attention of a sequence to itself by cuDNN's kernel; its softmax is in float32.

    Queries, keys and values are bfloat16 or float16, and so is the result [B, L, H, K]; H must be a multiple of G.
    """
    # jax counts only the keys before a query; the form counts the query's own position too.
    window = None if form.window is None else (form.window - 1, 0)

    def local(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array) -> Array:
        return jax.nn.dot_product_attention(
            q_BLHK, k_BLGK, v_BLGK, is_causal=form.causal, local_window_size=window, implementation="cudnn"
        )

    # On each shard, because jax's own partitioning of the kernel fails inside a region that is manual over some axes
    # (an assertion in custom_partitioning, jax 0.10.2), as accumulation over `data` and pipelines are.
    return _on_shards(local, (q_BLHK, k_BLGK, v_BLGK), ())


def splash_attention(
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    segments_BL: Array | None,
    form: AttentionForm,
    *,
    interpret: bool = False,
) -> Array:
    """Compute the attention of a sequence to itself by the splash kernel; its softmax is in float32.

    Arguments and result are those of `blockwise_attention`; with `interpret` the kernel's steps run as plain
    operations, on any platform, for tests.
    """

    def local(q: Array, k: Array, v: Array, segments: Array | None = None) -> Array:
        # The kernel does not scale scores, so that the queries are scaled, in their dtype: exactly where head_dim is 64
        # or 256 (a power of two), else with one rounding.
        scaled = q * jnp.asarray(1 / math.sqrt(q.shape[-1]), q.dtype)
        kernel: Any = _kernel(q.shape[2], q.shape[1], form, interpret=interpret)
        heads_first = [x.transpose(0, 2, 1, 3) for x in (scaled, k, v)]
        rows = heads_first if segments is None else [*heads_first, segments]

        def attend(q: Array, k: Array, v: Array, *segments: Array) -> Array:
            return kernel(q, k, v, *map(_segment_ids, segments))

        out = jax.vmap(attend)(*rows)
        return out.transpose(0, 2, 1, 3)

    # Unchecked, because a Pallas call does not say over which axes its result varies. Every axis of more than one
    # device is in the specs (the rule asks for heads that divide), so that no gradient needs a sum over devices.
    constants = () if segments_BL is None else (segments_BL,)
    return _on_shards(local, (q_BLHK, k_BLGK, v_BLGK), constants, check_vma=False)


def _on_shards(
    local: Callable[..., Array], arrays: tuple[Array, ...], segments: tuple[Array, ...], **checks: bool
) -> Array:
    """Call a function of queries, keys, values and perhaps segments on the shards of the step's mesh."""
    layout = current_layout()
    if layout is None or layout.mesh.size == 1 or layout.manual == frozenset(layout.mesh.axis_names):
        return local(*arrays, *segments)
    queries, keys = spec_of(layout, *QUERIES), spec_of(layout, *KEYS)
    return run_manually(
        local,
        layout,
        arrays,
        segments,
        in_specs=(queries, keys, keys, *[spec_of(layout, *QUERIES[:2])] * len(segments)),
        out_specs=queries,
        **checks,
    )


def _segment_ids(segments_L: Array) -> Any:  # a class of Pallas, which is imported only where a TPU needs it
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel.SegmentIds(segments_L, segments_L)


def _kernel(heads: int, length: int, form: AttentionForm, *, interpret: bool) -> Any:  # a class of Pallas
    """Make the kernel for one row: q [H, L, K], k and v [G, L, K] -> [H, L, K]."""
    # Imported here, because Pallas adds 0.3 s to the start and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (length, length)
    if form.window is not None:
        mask = masks.LocalMask(shape, (form.window - 1, 0 if form.causal else form.window - 1), 0)
    else:
        mask = masks.CausalMask(shape) if form.causal else masks.FullMask(shape)
    block = max(
        size for size in range(SPLASH_LANES, min(length, _LARGEST_BLOCK) + 1, SPLASH_LANES) if length % size == 0
    )
    tiles = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    named: Any = {f"block_{tile}": block for tile in tiles}
    sizes = splash.BlockSizes(**named)
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        attn_logits_soft_cap=form.softcap,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=KERNEL_RESIDUALS,
        interpret=interpret,
    )
