"""GLM-4, the dense models of 2025 (0414). No jax here.

Sources: GLM team 2024, and the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.interop.families.family import Family, decoder_keys, mapped, no_ids, own, rope_keys, size
from jaxtrain.interop.families.llama import ATTENTION, decoder
from jaxtrain.interop.formats.rows import Entry, Row, block, block_rows, dims, linear

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
_FUSED = "mlp.gate_up_proj.weight"


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    return dict(partial_rotary_factor=model["rotary_fraction"]) | no_ids(model, pad_token_id=151329)


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    D, F = dims(model, "DF")
    halves = [
        Entry(f"blocks/mlp/{half}/kernel", _FUSED, block(linear((D,), (F,)), dim=0, start=start, of=2 * F))
        for half, start in (("gate", 0), ("up", F))
    ]
    return decoder(model, [*block_rows(model, _NAMES), *halves])


FAMILY = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    keys=(
        *decoder_keys(size(_DEFAULTS, 40, 4096, 32)),
        mapped("attention_bias", "bias", True, {True: "qkv", False: False}),
        own("partial_rotary_factor", 0.5),
        *rope_keys(10000.0),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    write=_write,
    sizes={
        "glm4_9b": size(_COMMON, 40, 4096, 32, mlp_dim=13696, bias="qkv"),
        "glm4_32b": size(_COMMON, 61, 6144, 48, mlp_dim=23040),
    },
)
