"""GPT-NeoX and Pythia. No jax here.

Sources: Black et al. 2022, Biderman et al. 2023, and the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, fixed, gelu_key, ignored, mapped, own, rope_keys, size, size_keys
from jaxtrain.formats.rows import (
    Entry,
    Row,
    Skipped,
    block_rows,
    copy,
    dims,
    in_layers,
    interleaved,
    output_row,
)

_FIXED = dict(position="rotary", norm="layernorm", bias=True)
_COMMON = _FIXED | dict(
    vocab_size=50304, max_sequence_length=2048, rope_theta=10000.0, rotary_fraction=0.25, block="parallel",
    norm_epsilon=1e-5, activation="gelu_exact", tie_embeddings=False,
)  # fmt: skip


_NAMES = {
    "attention/output": "attention.dense", "mlp_norm": "post_attention_layernorm", "mlp/up": "mlp.dense_h_to_4h",
    "mlp/down": "mlp.dense_4h_to_h",
}  # fmt: skip


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    D, H, K, L, V = dims(model, "DHKLV")
    fused, name = [], "attention.query_key_value"
    for at, ours in enumerate(("query", "key", "value")):
        kernel, bias = interleaved((H, 3, K), at, (D,)), interleaved((H, 3, K), at)
        fused.append(Entry(f"blocks/attention/{ours}/kernel", f"{name}.weight", kernel))
        fused.append(Entry(f"blocks/attention/{ours}/bias", f"{name}.bias", bias))
    rows = [
        *block_rows(model, {"attention_norm": "input_layernorm"}, beside=True),
        *fused,
        *block_rows(model, _NAMES, beside=True),
    ]
    return (
        Entry("embedding", "gpt_neox.embed_in.weight", copy(V, D)),
        *in_layers(rows, "gpt_neox.layers.{layer}.", L),
        *block_rows(model, {"output_norm": "gpt_neox.final_layer_norm"}, prefix="", beside=True),
        output_row(model, ("embed_out.weight", "lm_head.weight")),
        Skipped(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
    )


FAMILY = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    keys=(
        *size_keys(size(_COMMON, 44, 6144, 64, vocab_size=50432), dict(norm_epsilon="layer_norm_eps")),
        gelu_key("hidden_act", "gelu", "gelu_new"),
        mapped("use_parallel_residual", "block", True, {True: "parallel", False: "pre"}),
        own("partial_rotary_factor", 0.25, "rotary_pct"),
        *rope_keys(10000.0, "rotary_emb_base"),
        fixed("attention_bias", True),
        *ignored("attention_dropout", "hidden_dropout", "classifier_dropout"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    write=lambda model: dict(rotary_pct=model["rotary_fraction"], rotary_emb_base=model["rope_theta"]),
    sizes={
        "pythia_70m": size(_COMMON, 6, 512, 8),
        "pythia_160m": size(_COMMON, 12, 768, 12),
        "pythia_410m": size(_COMMON, 24, 1024, 16),
        "pythia_1b": size(_COMMON, 16, 2048, 8),
        "pythia_1.4b": size(_COMMON, 24, 2048, 16),
        "pythia_2.8b": size(_COMMON, 32, 2560, 32),
        "pythia_6.9b": size(_COMMON, 32, 4096, 32, vocab_size=50432),
        "pythia_12b": size(_COMMON, 36, 5120, 40, vocab_size=50688),
        "gpt_neox_20b": size(_COMMON, 44, 6144, 64, vocab_size=50432, activation="gelu"),
    },
)
