"""OPT, by Zhang et al. 2022 and the config.json published with each model. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, checked, fixed, gelu_key, ignored, size, size_keys
from jaxtrain.formats.rows import Entry, Row, block_rows, copy, dims, in_layers, output_row, prefixed

# The epsilon is that of torch; config.json does not say it.
_FIXED = dict(position="learned", position_offset=2, norm="layernorm", norm_epsilon=1e-5, bias=True)
_ROWS = dict(vocab_size=50272, max_sequence_length=2048, tie_embeddings=True)
_COMMON = _FIXED | _ROWS | dict(activation="relu")
_NAMES = {
    "attention/key": "self_attn.k_proj", "attention/value": "self_attn.v_proj", "attention/query": "self_attn.q_proj",
    "attention/output": "self_attn.out_proj", "attention_norm": "self_attn_layer_norm", "mlp/up": "fc1",
    "mlp/down": "fc2", "mlp_norm": "final_layer_norm",
}  # fmt: skip


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    D, L, V, P = dims(model, "DLVP")
    body: tuple[Row, ...] = (
        Entry("embedding", "decoder.embed_tokens.weight", copy(V, D)),
        Entry("positions", "decoder.embed_positions.weight", copy(P + 2, D)),
        *block_rows(model, {"output_norm": "decoder.final_layer_norm"}, prefix="", beside=True),
        *in_layers(block_rows(model, _NAMES, beside=True), "decoder.layers.{layer}.", L),
    )
    return (*prefixed(body, written="model.", read=("model.", "")), output_row(model, "lm_head.weight"))


FAMILY = Family(
    name="opt",
    architecture="OPTForCausalLM",
    keys=(
        *size_keys(size(_ROWS, 12, 768, 12), dict(mlp_dim="ffn_dim")),
        gelu_key("activation_function", "relu", "gelu_new"),
        checked("word_embed_proj_dim", lambda file: file["hidden_size"], lambda file: (file["hidden_size"],)),
        *(fixed(name, True) for name in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine")),
        fixed("_remove_final_layer_norm", False),
        *ignored("dropout", "activation_dropout", "attention_dropout", "layerdrop", "init_std"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    # A rate of training whose default is not 0, and which a program that trains the model further would take over.
    write=lambda _: dict(dropout=0.0),
    sizes={
        "opt_125m": size(_COMMON, 12, 768, 12),
        "opt_1.3b": size(_COMMON, 24, 2048, 32),
        "opt_2.7b": size(_COMMON, 32, 2560, 32),
        "opt_6.7b": size(_COMMON, 32, 4096, 32),
        "opt_13b": size(_COMMON, 40, 5120, 40),
        "opt_30b": size(_COMMON, 48, 7168, 56),
        "opt_66b": size(_COMMON, 64, 9216, 72),
    },
)
