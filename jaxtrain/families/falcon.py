"""Falcon and Falcon 2, by Almazrouei et al. 2023 and the config.json published with each model. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, checked, fixed, gelu_key, ignored, own, rope_keys, size, size_keys
from jaxtrain.formats.rows import Entry, Row, block_rows, copy, dims, in_layers, interleaved, output_row

_FIXED = dict(position="rotary", norm="layernorm", bias=False, norm_bias=True)
_ROWS = dict(vocab_size=65024, max_sequence_length=2048, tie_embeddings=True)
_COMMON = _FIXED | _ROWS | dict(rope_theta=10000.0, norm_epsilon=1e-5, activation="gelu_exact", block="parallel")
_LINEAR = {"attention/output": "self_attention.dense", "mlp/up": "mlp.dense_h_to_4h", "mlp/down": "mlp.dense_4h_to_h"}
_KEYS = dict(mlp_dim="ffn_hidden_size", norm_epsilon="layer_norm_epsilon")
_NEW, _NORMS = "new_decoder_architecture", "num_ln_in_parallel_attn"


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    groups = file["num_kv_heads"] if file[_NEW] or not file["multi_query"] else 1
    return dict(num_kv_heads=groups, block="parallel" if file[_NORMS] == 2 else "parallel_one_norm")


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    D, H, G, K, L, V = dims(model, "DHGKLV")
    two, fused, each = model["block"] == "parallel", "self_attention.query_key_value.weight", (G, H // G + 2, K)
    parts = dict(query=range(H // G), key=H // G, value=H // G + 1)
    qkv = [Entry(f"blocks/attention/{one}/kernel", fused, interleaved(each, at, (D,))) for one, at in parts.items()]
    norms = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"} if two else {"attention_norm": "input_layernorm"}
    return (
        Entry("embedding", "transformer.word_embeddings.weight", copy(V, D)),
        *in_layers([*qkv, *block_rows(model, _LINEAR | norms)], "transformer.h.{layer}.", L),
        *block_rows(model, {"output_norm": "transformer.ln_f"}, prefix=""),
        output_row(model, "lm_head.weight"),
    )


FAMILY = Family(
    name="falcon",
    architecture="FalconForCausalLM",
    keys=(
        *size_keys(size(_COMMON, 32, 4544, 71, mlp_dim=lambda file: 4 * int(file["hidden_size"])), _KEYS),
        gelu_key("activation", "gelu"),
        *(own("num_kv_heads", lambda file: file["num_attention_heads"]), own(_NEW, False), own("multi_query", True)),
        checked(_NORMS, lambda file: 1 + file[_NEW], lambda file: (1, 2)[: 1 + file[_NEW]]),
        *(*rope_keys(10000.0), fixed("parallel_attn", True), fixed("alibi", False), fixed("bias", False)),
        *ignored("attention_dropout", "hidden_dropout", "ff_factor", "apply_residual_connection_post_layernorm"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    read=_read,
    write=lambda model: {_NEW: True, _NORMS: 1 + (model["block"] == "parallel"), "num_kv_heads": model["num_kv_heads"]},
    sizes={
        "falcon_7b": size(_COMMON, 32, 4544, 71, num_kv_heads=1, block="parallel_one_norm"),
        "falcon_40b": size(_COMMON, 60, 8192, 128, num_kv_heads=8),
        "falcon_180b": size(_COMMON, 80, 14848, 232, num_kv_heads=8),
    },
)
