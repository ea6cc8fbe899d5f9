"""Mistral 7B and Nemo, Mixtral 8x7B and 8x22B. No jax here.

Sources: the config.json published with each model (the base models).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.interop.families import llama
from jaxtrain.interop.families.family import Family
from jaxtrain.interop.families.keys import decoder_keys, fixed, ignored, mapped, own, rope_keys, split_width
from jaxtrain.interop.formats.entries import Row

_FIXED = dict(position="rotary", norm="rmsnorm", bias=False)
_7B = _FIXED | dict(
    num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14336, max_sequence_length=32768,
    norm_epsilon=1e-5, activation="swiglu", tie_embeddings=False,
)  # fmt: skip
_NEMO = dict(num_layers=40, embed_dim=5120, head_dim=128, vocab_size=131072, max_sequence_length=131072)
_MIXTRAL = _7B | dict(vocab_size=32000, rope_theta=1e6, head_dim=128, experts=dict(num_experts=8, experts_per_token=2))
_SIZES = (32000, 4096, 14336, 32, 32, 8, split_width, 131072)

FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    keys=(
        *decoder_keys(*_SIZES, norm_epsilon=1e-6, tied=False),
        mapped("sliding_window", "sliding_window", 4096),
        *ignored("layer_types"),
        *rope_keys(10000.0),
    ),
    tensors=llama.tensors,
    fixed=_FIXED,
    rotary=True,
    sizes={
        "mistral_7b_v0.1": _7B | dict(vocab_size=32000, rope_theta=10000.0, sliding_window=4096),
        "mistral_7b_v0.3": _7B | dict(vocab_size=32768, rope_theta=1e6),
        "mistral_nemo_12b": _7B | _NEMO | dict(rope_theta=1e6),
    },
)


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    if file["num_experts_per_tok"] == 1 != file["num_local_experts"]:
        raise ConfigError(
            "config.json has num_experts_per_tok: 1, whose expert has the weight 1 in the family mixtral and its "
            "probability in jaxtrain; 2 or more would work"
        )
    return dict(experts=dict(num_experts=file["num_local_experts"], experts_per_token=file["num_experts_per_tok"]))


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    experts = model["experts"]
    if experts is None:
        return {}
    return dict(num_local_experts=experts["num_experts"], num_experts_per_tok=experts["experts_per_token"])


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    moe = "block_sparse_moe"
    experts = llama.expert_blocks(model, f"{moe}.gate", f"{moe}.experts.{{expert}}", gate="w1", down="w2", up="w3")
    return (*llama.in_decoder([*llama.attention_blocks(model), *experts], model), *llama.ends(model))


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    keys=(
        *decoder_keys(*_SIZES, norm_epsilon=1e-5, tied=False),
        mapped("sliding_window", "sliding_window", None),
        own("num_local_experts", 8),
        own("num_experts_per_tok", 2),
        *rope_keys(1e6),
        fixed("router_jitter_noise", 0.0, 0),
        *ignored("router_aux_loss_coef", "output_router_logits"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    read=_read,
    write=_write,
    sizes={
        "mixtral_8x7b": _MIXTRAL,
        "mixtral_8x22b": _MIXTRAL
        | dict(num_layers=56, embed_dim=6144, num_heads=48, mlp_dim=16384, max_sequence_length=65536),
    },
)
