"""Phi-3 and Phi-3.5, dense. No jax here.

Sources: the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, decoder_keys, fixed, ignored, no_ids, own, rope_keys, size
from jaxtrain.families.llama import decoder
from jaxtrain.formats.rows import Row, block_rows, fused

_FIXED = dict(position="rotary", norm="rmsnorm", bias=False)
_COMMON = _FIXED | dict(
    vocab_size=32064, max_sequence_length=4096, rope_theta=10000.0, norm_epsilon=1e-5, activation="swiglu",
    tie_embeddings=False, sliding_window=2047,
)  # fmt: skip
_DEFAULTS = dict(vocab_size=32064, mlp_dim=8192, max_sequence_length=4096, norm_epsilon=1e-5, sliding_window=None)


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    scaling = model["rope_scaling"]
    if scaling is not None and scaling["kind"] != "longrope":
        return dict(rope_scaling=None, rope_parameters=None)  # transformers opens a phi3 with longrope alone
    length = model["max_sequence_length"] if scaling is None else scaling["original_length"]
    return dict(original_max_position_embeddings=length) | no_ids(model, eos_token_id=32000, pad_token_id=32000)


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    rows = [
        *block_rows(model, {"attention_norm": "input_layernorm"}),
        *fused(model, "self_attn.qkv_proj.weight", "attention/query", "attention/key", "attention/value"),
        *block_rows(model, {"attention/output": "self_attn.o_proj"}),
        *block_rows(model, {"mlp_norm": "post_attention_layernorm"}),
        *fused(model, "mlp.gate_up_proj.weight", "mlp/gate", "mlp/up"),
        *block_rows(model, {"mlp/down": "mlp.down_proj"}),
    ]
    return decoder(model, rows)


FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    keys=(
        *decoder_keys(size(_DEFAULTS, 32, 3072, 32), write_head_dim=False),
        own("original_max_position_embeddings", 4096),
        *rope_keys(10000.0, fraction=1.0),
        fixed("attention_bias", False),
        *ignored("embd_pdrop", "resid_pdrop"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    write=_write,
    # The sizes for 128k tokens hold tables of factors; they are read from their folders.
    sizes={
        "phi3_mini_4k": size(_COMMON, 32, 3072, 32, mlp_dim=8192),
        "phi3_medium_4k": size(_COMMON, 40, 5120, 40, num_kv_heads=10, mlp_dim=17920),
    },
)
