"""GLM-4, the dense models of 2025 (0414). No jax here.

Sources: GLM team 2024, and the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, decoder_keys, mapped, no_ids, rope_keys, size
from jaxtrain.families.llama import ATTENTION, decoder
from jaxtrain.formats.rows import Row, block_rows, fused

_FIXED = dict(position="rotary", rotary_interleaved=True, norm="rmsnorm", block="sandwich")
_COMMON = _FIXED | dict(
    vocab_size=151552, max_sequence_length=32768, num_kv_heads=2, head_dim=128, rotary_fraction=0.5, rope_theta=10000.0,
    norm_epsilon=1e-5, activation="swiglu", tie_embeddings=False,
)  # fmt: skip
_DEFAULTS = _COMMON | dict(max_sequence_length=131072, norm_epsilon=1.5625e-7, mlp_dim=13696)
_NAMES = ATTENTION | {
    "attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm",
    "mlp/down": "mlp.down_proj",
}  # fmt: skip


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    halves = fused(model, "mlp.gate_up_proj.weight", "mlp/gate", "mlp/up")
    return decoder(model, [*block_rows(model, _NAMES), *halves])


FAMILY = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    keys=(
        *decoder_keys(size(_DEFAULTS, 40, 4096, 32)),
        mapped("attention_bias", "bias", True, {True: "qkv", False: False}),
        *rope_keys(10000.0, fraction=0.5),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    write=lambda model: no_ids(model, pad_token_id=151329),
    sizes={
        "glm4_9b": size(_COMMON, 40, 4096, 32, mlp_dim=13696, bias="qkv"),
        "glm4_32b": size(_COMMON, 61, 6144, 48, mlp_dim=23040),
    },
)
