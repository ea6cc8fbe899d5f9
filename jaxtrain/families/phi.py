"""Phi-1.5 and Phi-2, by Li et al. 2023 and the config.json published with each model. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, decoder_keys, fixed, gelu_key, ignored, rope_keys, size
from jaxtrain.formats.rows import Entry, Row, Skipped, block_rows, copy, dims, in_layers, output_row

_FIXED = dict(position="rotary", norm="layernorm", bias=True, block="parallel_one_norm", output_bias=True)
_ROWS = dict(vocab_size=51200, max_sequence_length=2048, tie_embeddings=False)
_COMMON = _FIXED | _ROWS | dict(activation="gelu", norm_epsilon=1e-5, rope_theta=10000.0)
_GELU = gelu_key("hidden_act", "gelu_new", "gelu_new")
_KEYS = dict(norm_epsilon="layer_norm_eps")
_NAMES = {
    "attention_norm": "input_layernorm", "attention/query": "self_attn.q_proj", "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj", "attention/output": "self_attn.dense", "mlp/up": "mlp.fc1",
    "mlp/down": "mlp.fc2",
}  # fmt: skip


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    D, L, V = dims(model, "DLV")
    return (
        Entry("embedding", "model.embed_tokens.weight", copy(V, D)),
        *in_layers(block_rows(model, _NAMES), "model.layers.{layer}.", L),
        *block_rows(model, {"output_norm": "model.final_layernorm"}, prefix=""),
        output_row(model, "lm_head.weight"),
        Entry("output_bias", "lm_head.bias", copy(V)),
        Skipped(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    )


FAMILY = Family(
    name="phi",
    architecture="PhiForCausalLM",
    keys=(
        *decoder_keys(size(_COMMON, 24, 2048, 32), activation=_GELU, names=_KEYS, write_head_dim=False),
        *rope_keys(10000.0, fraction=0.5),
        fixed("qk_layernorm", False),
        *ignored("embd_pdrop", "resid_pdrop"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    sizes={
        "phi1.5_1.3b": size(_COMMON, 24, 2048, 32, rotary_fraction=0.5),
        "phi2_2.7b": size(_COMMON, 32, 2560, 32, rotary_fraction=0.4),
    },
)
