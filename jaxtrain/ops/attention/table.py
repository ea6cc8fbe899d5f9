"""Attention behind one signature: an ordered table of kernels per platform, which ends in the plain reference.

The first implementation that takes the case runs; what one cannot do it refuses with a reason, and never drops. A new
kernel is a function, its rule and its place in the order in `rules.py`, and a row here.

Shapes: B batch, L sequence, H query heads, G key-value heads, K head dim.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.errors import ConfigError
from jaxtrain.layout.manual import divides
from jaxtrain.layout.sharding import current_layout, platform
from jaxtrain.ops.attention import rules
from jaxtrain.ops.attention.blockwise import blockwise_attention
from jaxtrain.ops.attention.context import context_attention
from jaxtrain.ops.attention.fused import KEYS, QUERIES, cudnn_attention, splash_attention
from jaxtrain.ops.attention.reference import reference_attention
from jaxtrain.ops.attention.rules import AttentionCase, AttentionForm
from jaxtrain.runtime.compiler import note_choice

Segments = Array | None
Bias = Array | None
Attend = Callable[[Array, Array, Array, Segments, AttentionForm, Bias], Array]
_HOPPER = (9, 0)


@dataclass(frozen=True)
class Kernel:
    """A way to compute attention on a platform.

    Attributes:
        name: as in `model.attention`.
        attend: (q, k, v, segments, form, bias) -> [B, L, H, K]; there is a bias where `form.relative` is true.
        keeps_output: names what its backward pass needs for the remat policies, the result among it.
    """

    name: str
    attend: Attend
    keeps_output: bool = False


CUDNN = Kernel("cudnn", lambda q, k, v, segments, form, bias: cudnn_attention(q, k, v, form))
SPLASH = Kernel(
    "splash", lambda q, k, v, segments, form, bias: splash_attention(q, k, v, segments, form), keeps_output=True
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
    """Choose the kernel that runs on the platform of the step, and note it with the reasons against those before it.

    Raises:
        ConfigError: a wanted kernel (a name, not auto) that is unknown or cannot take the case.
    """
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
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    bias_HW: Bias = None,
    implementation: str = "auto",
) -> Array:
    """Attend from a sequence to itself, in the order of the sequence dim, on whatever mesh the step has.

    Args:
        q_BLHK, k_BLGK, v_BLGK: global arrays; H must be a multiple of G.
        segments_BL: packed documents that do not see each other; None: one document per row.
        causal, window, softcap: see `AttentionForm`.
        bias_HW: added to the scores of each head by the distance of key and query, float32 [H, 2L - 1] from
            `distance_bias`; None: nothing is added.
        implementation: auto, or a name from the table; a sequence that is sharded over `context` takes the methods of
            `ops/attention/context.py`.

    Returns:
        [B, L, H, K] in the dtype of q, named "attention_output" for the remat policies.

    Raises:
        ConfigError: a kernel that cannot take the case.
    """
    form = AttentionForm(causal, window, softcap, relative=bias_HW is not None)
    layout = current_layout()
    if layout is not None and layout.degree("context") > 1:
        if implementation != "auto":
            raise ConfigError(
                f"model.attention={implementation} takes full sequences, but parallel.context="
                f"{layout.degree('context')} shards them; use model.attention=auto and parallel.context_attention"
            )
        out = context_attention(
            q_BLHK,
            k_BLGK,
            v_BLGK,
            segments_BL,
            form=form,
            layout=layout,
            whole_attention=functools.partial(_attend_whole, form=form),
        )
        return checkpoint_name(out, "attention_output")
    row = choose(q_BLHK, k_BLGK, segments_BL, form, wanted=implementation)
    with jax.named_scope(f"{row.name}_attention"):
        out = row.attend(q_BLHK, k_BLGK, v_BLGK, segments_BL, form, bias_HW)
    return out if row.keeps_output else checkpoint_name(out, "attention_output")


def _attend_whole(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Segments, *, form: AttentionForm) -> Array:
    """Attend to full sequences of some heads on one device, as `all_to_all` does between its two exchanges."""
    row = choose(q_BLHK, k_BLGK, segments_BL, form)
    return row.attend(q_BLHK, k_BLGK, v_BLGK, segments_BL, form, None)
