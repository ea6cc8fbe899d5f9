"""OLMo 2. No jax here.

Sources: OLMo et al. 2024, and the config.json published with each model (the base models).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.interop.families.family import Family, decoder_keys, mapped, no_ids, rope_keys, size
from jaxtrain.interop.families.llama import ATTENTION, MLP, decoder
from jaxtrain.interop.formats.rows import Row, block_rows

_FIXED = dict(block="output", position="rotary", norm="rmsnorm", qk_norm="whole")
_COMMON = _FIXED | dict(
    vocab_size=100352, max_sequence_length=4096, rope_theta=500000.0, norm_epsilon=1e-6, activation="swiglu",
    bias=False, tie_embeddings=False,
)  # fmt: skip
# Llama's name for the norm of the MLP's input is that of attention's output here.
_NAMES = {ours: name for ours, name in ATTENTION.items() if ours not in ("attention_norm", "mlp_norm")} | MLP | {
    "attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm",
}  # fmt: skip


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    return decoder(model, block_rows(model, _NAMES))


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    return no_ids(model, pad_token_id=1, eos_token_id=50279)


OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=(
        *decoder_keys(
            size({}, 32, 4096, 32, vocab_size=50304, mlp_dim=11008, max_sequence_length=2048, norm_epsilon=1e-5),
            write_head_dim=False,
        ),
        *rope_keys(10000.0),
        mapped("attention_bias", "bias", False, {False: False, True: "attention"}),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    write=_write,
    sizes={
        "olmo2_1b": size(_COMMON, 16, 2048, 16, mlp_dim=8192),
        "olmo2_7b": size(_COMMON, 32, 4096, 32, mlp_dim=11008),
        "olmo2_13b": size(_COMMON, 40, 5120, 40, mlp_dim=13824),
        "olmo2_32b": size(_COMMON, 64, 5120, 40, num_kv_heads=8, mlp_dim=27648),
    },
)
