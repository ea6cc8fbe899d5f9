"""Attention behind one signature: an ordered table of kernels per platform, which ends in the plain reference.

The first implementation that takes the case runs; what one cannot do it refuses with a reason, and never drops. A new
kernel is a function, its rule and its place in the order in `rules.py`, and a row here. The fused ones are cuDNN's on
NVIDIA GPUs, and splash (Pallas, shipped with jax) on TPUs; their memory is linear in the length.

Shapes: B batch, L sequence, H query heads, G key-value heads, K head dim.
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.errors import ConfigError
from jaxtrain.layout.manual import divides, run_manually, spec_of
from jaxtrain.layout.sharding import current_layout, platform
from jaxtrain.ops.attention import rules
from jaxtrain.ops.attention.blockwise import blockwise_attention
from jaxtrain.ops.attention.context import context_attention
from jaxtrain.ops.attention.reference import PLAIN, Learned, reference_attention
from jaxtrain.ops.attention.rules import CAUSAL, SPLASH_LANES, AttentionCase, AttentionForm
from jaxtrain.remat.policy import KERNEL_RESIDUALS
from jaxtrain.runtime.compiler import note_choice

Segments = Array | None
Attend = Callable[[Array, Array, Array, Segments, AttentionForm, Learned], Array]
_HOPPER = (9, 0)
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


@dataclass(frozen=True)
class Kernel:
    """A way to compute attention on a platform.

    Attributes:
        name: as in `model.attention`.
        attend: (q, k, v, segments, form, learned) -> [B, L, H, K].
        keeps_output: names what its backward pass needs for the remat policies, the result among it.
    """

    name: str
    attend: Attend
    keeps_output: bool = False


CUDNN = Kernel("cudnn", lambda q, k, v, segments, form, learned: cudnn_attention(q, k, v, form))
SPLASH = Kernel(
    "splash", lambda q, k, v, segments, form, learned: splash_attention(q, k, v, segments, form), keeps_output=True
)
BLOCKWISE = Kernel("blockwise", blockwise_attention, keeps_output=True)
REFERENCE = Kernel("reference", reference_attention)

_ALL = {row.name: row for row in (CUDNN, SPLASH, BLOCKWISE, REFERENCE)}
# Platform of the step -> kernels in the order in which they are tried.
TABLE: Mapping[str, tuple[Kernel, ...]] = {
    name: tuple(_ALL[kernel] for kernel in order) for name, order in rules.ORDER.items()
}


def refusal(kernel: str, q_BLHK: Array, k_BLGK: Array, segments_BL: Segments, form: AttentionForm) -> str | None:
    """Return why a kernel cannot or should not compute these queries on the devices of the step; None: it runs."""
    layout = current_layout()
    device = jax.devices()[0] if layout is None else layout.mesh.devices.flat[0]
    # Compile-only devices of some versions of jax have no such attribute.
    major, dot, minor = str(getattr(device, "compute_capability", "")).partition(".")
    capability = (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None
    case = AttentionCase(
        device.platform,
        q_BLHK.dtype.name,
        q_BLHK.shape[1],
        q_BLHK.shape[-1],
        form,
        packed=segments_BL is not None,
        divides=kernel not in ("cudnn", "splash")
        or layout is None
        or (divides(layout, q_BLHK, *QUERIES) and divides(layout, k_BLGK, *KEYS)),
        capability=capability,
        hopper_here=capability is not None and capability >= _HOPPER and jax.default_backend() == "gpu",
    )
    why = rules.refusal(kernel, case)
    if why is not None or kernel != "cudnn":
        return why
    # Where jax runs on a GPU it has loaded cuDNN; a compiler for an absent one needs the package.
    if jax.default_backend() != "gpu" and importlib.util.find_spec("nvidia.cudnn") is None:
        return "cuDNN is not installed (nvidia-cudnn-cu12)"
    return None


def choose(q_BLHK: Array, k_BLGK: Array, segments_BL: Segments, form: AttentionForm, *, wanted: str = "auto") -> Kernel:
    """Choose the kernel that runs on the platform of the step, and note it with the reasons against those before it."""
    rows = TABLE.get(platform(), tuple(_ALL[kernel] for kernel in rules.ELSEWHERE))
    known = {**_ALL, **{row.name: row for row in rows}}
    name, refused = rules.choose_kernel(
        [row.name for row in rows], lambda kernel: refusal(kernel, q_BLHK, k_BLGK, segments_BL, form), wanted
    )
    note_choice("attention", name, refused)
    return known[name]


def self_attention(
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    segments_BL: Segments = None,
    form: AttentionForm = CAUSAL,
    learned: Learned = PLAIN,
    *,
    implementation: str = "auto",
) -> Array:
    """Attend from a sequence to itself, in the order of the sequence dim, on whatever mesh the step has.

    Args:
        q_BLHK, k_BLGK, v_BLGK: global arrays; H must be a multiple of G.
        segments_BL: packed documents that do not see each other; None: one document per row.
        form: which pairs of a query and a key are computed.
        learned: numbers beside the products of queries and keys.
        implementation: auto, or a name from the table; a sequence that is sharded over `context` takes the methods of
            `ops/attention/context.py`.

    Returns:
        [B, L, H, K] in the dtype of q, named "attention_output" for the remat policies.

    Raises:
        ConfigError: a kernel that cannot take the case.
    """
    layout = current_layout()
    form = replace(form, relative=learned.bias_HW is not None, sinks=learned.sink_H is not None)
    if layout is not None and layout.degree("context") > 1:
        if implementation != "auto":
            raise ConfigError(
                f"model.attention={implementation} takes full sequences, but parallel.context="
                f"{layout.degree('context')} shards them; use model.attention=auto and parallel.context_attention"
            )
        whole = functools.partial(_attend_whole, form=form)
        arrays = (q_BLHK, k_BLGK, v_BLGK, segments_BL)
        out = context_attention(*arrays, form=form, layout=layout, whole_attention=whole)
        return checkpoint_name(out, "attention_output")
    row = choose(q_BLHK, k_BLGK, segments_BL, form, wanted=implementation)
    with jax.named_scope(f"{row.name}_attention"):
        out = row.attend(q_BLHK, k_BLGK, v_BLGK, segments_BL, form, learned)
    return out if row.keeps_output else checkpoint_name(out, "attention_output")


def _attend_whole(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Segments, *, form: AttentionForm) -> Array:
    """Attend to full sequences of some heads on one device, as `all_to_all` does between its two exchanges."""
    row = choose(q_BLHK, k_BLGK, segments_BL, form)
    return row.attend(q_BLHK, k_BLGK, v_BLGK, segments_BL, form, PLAIN)
