"""Attention behind one signature: an ordered table of implementations a platform, which ends in the plain reference.

The first implementation that takes the case runs; what one cannot do it refuses with a reason, and never drops. A new
kernel is a file with a function, its rule and its place in the order in `kernel_rules.py`, and a row here.

Shapes: B batch, L sequence, H query heads, G key-value heads, K head dim.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import current_layout, platform
from jaxtrain.ops.attention import blockwise, cudnn, splash
from jaxtrain.ops.attention.context import context_attention
from jaxtrain.ops.attention.form import AttentionForm
from jaxtrain.ops.attention.kernel_rules import ELSEWHERE, ORDER, choose_kernel
from jaxtrain.ops.attention.reference import attention, reference_attention
from jaxtrain.runtime.choices import note_choice

Segments = jax.Array | None
Refusal = Callable[[jax.Array, jax.Array, Segments, AttentionForm], str | None]
Attend = Callable[[jax.Array, jax.Array, jax.Array, Segments, AttentionForm], jax.Array]


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
        name: as in `model.attention`.
        refusal: (q, k, segments, form) -> why it cannot or should not run here; None: it runs.
        attend: (q, k, v, segments, form) -> [B, L, H, K].
        keeps_output: names what its backward pass needs for the remat policies, the result among it.
    """

    name: str
    refusal: Refusal
    attend: Attend
    keeps_output: bool = False


CUDNN = Implementation("cudnn", cudnn.refusal, lambda q, k, v, segments, form: cudnn.cudnn_attention(q, k, v, form))
SPLASH = Implementation("splash", splash.refusal, splash.splash_attention, keeps_output=True)
BLOCKWISE = Implementation(
    "blockwise",
    lambda q, k, segments, form: blockwise.refusal(q),
    blockwise.blockwise_attention,
    keeps_output=True,
)
REFERENCE = Implementation("reference", lambda *_: None, reference_attention)

_ALL = {row.name: row for row in (CUDNN, SPLASH, BLOCKWISE, REFERENCE)}
# Platform of the step -> implementations in the order in which they are tried.
TABLE: Mapping[str, tuple[Implementation, ...]] = {
    name: tuple(_ALL[kernel] for kernel in order) for name, order in ORDER.items()
}


def choose(
    q_BLHK: jax.Array, k_BLGK: jax.Array, segments_BL: Segments, form: AttentionForm, *, wanted: str = "auto"
) -> Implementation:
    """The implementation that runs on the platform of the step, noted with the reasons against those before it.

    Raises:
        ConfigError: a wanted implementation that is unknown or cannot take the case.
    """
    rows = TABLE.get(platform(), tuple(_ALL[kernel] for kernel in ELSEWHERE))
    known = {**_ALL, **{row.name: row for row in rows}}

    def refuses(kernel: str) -> str | None:
        return known[kernel].refusal(q_BLHK, k_BLGK, segments_BL, form)

    name, refused = choose_kernel([row.name for row in rows], refuses, wanted)
    note_choice("attention", name, refused)
    return known[name]


def self_attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segments_BL: Segments = None,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Attention of a sequence to itself, in the order of the sequence dim, on whatever mesh the step has.

    Args:
        q_BLHK, k_BLGK, v_BLGK: global arrays; H must be a multiple of G.
        segments_BL: packed documents that do not see each other; None: one document a row.
        causal, window, softcap: see `AttentionForm`.
        implementation: auto, or a name from the table; a sequence that is spread over `context` takes the ways of
            `ops/attention/context.py`.

    Returns:
        [B, L, H, K] in the dtype of q, named "attention_output" for the remat policies.

    Raises:
        ConfigError: an implementation that cannot take the case.
    """
    form = AttentionForm(causal, window, softcap)
    layout = current_layout()
    if layout is not None and layout.degree("context") > 1:
        if implementation != "auto":
            raise ConfigError(
                f"model.attention={implementation} takes whole sequences, but parallel.context="
                f"{layout.degree('context')} spreads them; use model.attention=auto and parallel.context_attention"
            )
        out = context_attention(
            q_BLHK,
            k_BLGK,
            v_BLGK,
            segments_BL,
            form=form,
            layout=layout,
            local_attention=functools.partial(attention, softcap=softcap),
            whole_attention=functools.partial(_attend_whole, form=form),
        )
        return checkpoint_name(out, "attention_output")
    row = choose(q_BLHK, k_BLGK, segments_BL, form, wanted=implementation)
    with jax.named_scope(f"{row.name}_attention"):
        out = row.attend(q_BLHK, k_BLGK, v_BLGK, segments_BL, form)
    return out if row.keeps_output else checkpoint_name(out, "attention_output")


def _attend_whole(
    q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, segments_BL: Segments, *, form: AttentionForm
) -> jax.Array:
    """Whole sequences on one device, some of the heads: what `all_to_all` attends with."""
    row = choose(q_BLHK, k_BLGK, segments_BL, form)
    return row.attend(q_BLHK, k_BLGK, v_BLGK, segments_BL, form)
