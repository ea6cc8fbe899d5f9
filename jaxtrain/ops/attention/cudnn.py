"""Attention by cuDNN's fused kernel on NVIDIA GPUs: its memory is linear in the length.

Shapes: B batch, L length, H query heads, G key-value heads, K head_dim.
"""

import importlib.util
from typing import Any

import jax

from jaxtrain.layout.manual import divides, run_manually, spec_of
from jaxtrain.layout.sharding import current_layout
from jaxtrain.ops.attention.form import AttentionForm
from jaxtrain.ops.attention.kernel_rules import AttentionCase, cudnn_refusal

_HOPPER = (9, 0)

_QUERIES = ("batch", "sequence", "activation_heads", None)
_KEYS = ("batch", "sequence", "activation_kv_heads", None)


def refusal(q_BLHK: jax.Array, k_BLGK: jax.Array, segments_BL: jax.Array | None, form: AttentionForm) -> str | None:
    """Return why cuDNN cannot compute these queries on the devices of the step, or None where it can.

    Args:
        q_BLHK, k_BLGK: queries and keys.
        segments_BL: numbers of packed documents; the kernel takes only the length of each row.
        form: the settings of attention.
    """
    layout = current_layout()
    device = jax.devices()[0] if layout is None else layout.mesh.devices.flat[0]
    capability = _capability(device)
    case = AttentionCase(
        device.platform,
        q_BLHK.dtype.name,
        q_BLHK.shape[1],
        q_BLHK.shape[-1],
        form,
        packed=segments_BL is not None,
        divides=layout is None or (divides(layout, q_BLHK, *_QUERIES) and divides(layout, k_BLGK, *_KEYS)),
        capability=capability,
        hopper_here=capability is not None and capability >= _HOPPER and jax.default_backend() == "gpu",
    )
    why = cudnn_refusal(case)
    if why is not None:
        return why
    # Where jax runs on a GPU it has loaded cuDNN; a compiler for an absent one needs the package.
    if jax.default_backend() != "gpu" and importlib.util.find_spec("nvidia.cudnn") is None:
        return "cuDNN is not installed (nvidia-cudnn-cu12)"
    return None


def _capability(device: Any) -> tuple[int, int] | None:
    """Return the major and minor version of a GPU; None where the device has no such attribute.

    Compile-only devices of some versions of jax have none.
    """
    text = str(getattr(device, "compute_capability", ""))
    major, dot, minor = text.partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None


def cudnn_attention(q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, form: AttentionForm) -> jax.Array:
    """Compute the attention of a sequence to itself by cuDNN's kernel; its softmax is in float32.

    Args:
        q_BLHK: queries, bfloat16 or float16; H must be a multiple of G.
        k_BLGK: keys, the same dtype.
        v_BLGK: values, the same dtype.
        form: the settings of attention.

    Returns:
        [B, L, H, K] in the dtype of q.
    """
    # jax counts only the keys before a query; the form counts the query's own position too.
    window = None if form.window is None else (form.window - 1, 0)

    def local(q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q_BLHK, k_BLGK, v_BLGK, is_causal=form.causal, local_window_size=window, implementation="cudnn"
        )

    layout = current_layout()
    if layout is None or layout.manual == frozenset(layout.mesh.axis_names) or layout.mesh.size == 1:
        return local(q_BLHK, k_BLGK, v_BLGK)
    # On each shard, because jax's own partitioning of the kernel fails inside a region that is manual over some axes
    # (an assertion in custom_partitioning, jax 0.10.2), as accumulation over `data` and pipelines are.
    queries, keys = spec_of(layout, *_QUERIES), spec_of(layout, *_KEYS)
    return run_manually(local, layout, (q_BLHK, k_BLGK, v_BLGK), in_specs=(queries, keys, keys), out_specs=queries)
