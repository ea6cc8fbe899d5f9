"""StableLM and StableLM 2. No jax here.

Sources: Bellagente et al. 2024, and the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, checked, decoder_keys, ignored, mapped, rope_keys, size
from jaxtrain.families.llama import ATTENTION, MLP, decoder
from jaxtrain.formats.rows import Entry, Row, block_rows, copy, dims

_FIXED = dict(position="rotary", norm="layernorm", norm_bias=True, activation="swiglu")
_COMMON = _FIXED | dict(rotary_fraction=0.25, max_sequence_length=4096, norm_epsilon=1e-5)
_12B = _COMMON | dict(qk_norm="per_head", block="parallel_one_norm")
_DEFAULTS = dict(vocab_size=50304, mlp_dim=6912, max_sequence_length=4096, norm_epsilon=1e-5)


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    H, G, K = dims(model, "HGK")
    absent = ("attention/query_norm", "attention/key_norm", "mlp_norm" if model["block"] != "pre" else None)
    rows = block_rows(model, {ours: theirs for ours, theirs in (ATTENTION | MLP).items() if ours not in absent})
    if model["qk_norm"]:  # one tensor per head
        for name, heads in (("query", H), ("key", G)):
            theirs = f"self_attn.{name[0]}_layernorm.norms.{{expert}}.weight"
            rows.append(Entry(f"blocks/attention/{name}_norm/scale", theirs, copy(K), stack=(heads,)))
    return decoder(model, rows)


FAMILY = Family(
    name="stablelm",
    architecture="StableLmForCausalLM",
    keys=(
        *decoder_keys(size(_DEFAULTS, 32, 2560, 32), names=dict(norm_epsilon="layer_norm_eps"), write_head_dim=False),
        checked("head_dim", None, lambda file: (None, file["hidden_size"] // file["num_attention_heads"])),
        mapped("use_qkv_bias", "bias", False, {False: False, True: "qkv"}),
        mapped("use_parallel_residual", "block", False, {False: "pre", True: "parallel_one_norm"}),
        mapped("qk_layernorm", "qk_norm", False, {False: False, True: "per_head"}),
        *rope_keys(10000.0, fraction=0.25),
        *ignored("hidden_dropout"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    sizes={
        "stablelm_3b_4e1t": size(_COMMON, 32, 2560, 32, vocab_size=50304, mlp_dim=6912),
        "stablelm_2_1.6b": size(_COMMON, 24, 2048, 32, vocab_size=100352, mlp_dim=5632, bias="qkv"),
        "stablelm_2_12b": size(_12B, 40, 5120, 32, vocab_size=100352, mlp_dim=13824, num_kv_heads=8),
    },
)
