"""OLMo 2 and 3. No jax here.

Sources: OLMo et al. 2024 and 2025, and the config.json published with each model (the base models).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, checked, decoder_keys, mapped, no_ids, own, rope_keys, size
from jaxtrain.families.llama import ATTENTION, MLP, decoder
from jaxtrain.formats.rope import read_ropes, read_windows, whole_every, write_rope, write_ropes, write_windows
from jaxtrain.formats.rows import Row, block_rows

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


_KEYS = (
    *decoder_keys(
        size({}, 32, 4096, 32, vocab_size=50304, mlp_dim=11008, max_sequence_length=2048, norm_epsilon=1e-5),
        write_head_dim=False,
    ),
    mapped("attention_bias", "bias", False, {False: False, True: "attention"}),
)
OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=(*_KEYS, *rope_keys(10000.0)),
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

_YARN = dict(kind="yarn", factor=8.0, original_length=8192, attention_factor=1.2079441541679836)
_OLMO3 = _COMMON | dict(
    vocab_size=100278, max_sequence_length=65536, rope_scaling=_YARN,
    local_layers=dict(pattern=(1, 1, 1, 0), window=4096, rope_theta=500000.0),
)  # fmt: skip


def _read3(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    types = file["layer_types"] or whole_every(4, file)
    return read_ropes(file, read_windows(types, file["sliding_window"]), 500000.0)


def _write3(model: Mapping[str, Any]) -> dict[str, Any]:
    return _write(model) | write_rope(model) | write_ropes(model) | write_windows(model)


OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    keys=(
        *(*_KEYS, own("layer_types"), own("sliding_window", 4096), own("rope_scaling"), own("rope_parameters")),
        # transformers 5 gives the local layers of a file without rope_parameters this base, whatever rope_theta is.
        checked("rope_theta", 500000.0, lambda file: () if file["rope_parameters"] else (500000.0, 500000)),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    read=_read3,
    write=_write3,
    sizes={
        "olmo3_7b": size(_OLMO3, 32, 4096, 32, mlp_dim=11008),
        "olmo3_32b": size(_OLMO3, 64, 5120, 40, num_kv_heads=8, mlp_dim=27648),
    },
)
