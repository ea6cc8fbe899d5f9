"""GPT-NeoX and Pythia. No jax here.

Sources: Black et al. 2022, Biderman et al. 2023, and the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.published.decoder import GELU_TANH, NO_DROPOUT
from jaxtrain.published.entries import Entry, Row, Skipped, Tied, biased, in_layers, normed
from jaxtrain.published.family import Family
from jaxtrain.published.keys import Fixed, Ignored, Mapped, Own, read_keys, write_keys
from jaxtrain.published.rope import read_fraction, read_rope, rope_keys, write_rope
from jaxtrain.published.transforms import copy, interleaved, linear

_COMMON = dict(
    vocab_size=50304, max_sequence_length=2048, position="rotary", rope_theta=10000.0, rotary_fraction=0.25,
    block="parallel", norm="layernorm", norm_epsilon=1e-5, activation="gelu_exact", bias=True, tie_embeddings=False,
)  # fmt: skip


def _row(layers: int, width: int, heads: int, **more: object) -> dict[str, Any]:
    return _COMMON | dict(num_layers=layers, embed_dim=width, num_heads=heads) | more


SIZES: dict[str, dict[str, Any]] = {
    "pythia_70m": _row(6, 512, 8),
    "pythia_160m": _row(12, 768, 12),
    "pythia_410m": _row(24, 1024, 16),
    "pythia_1b": _row(16, 2048, 8),
    "pythia_1.4b": _row(24, 2048, 16),
    "pythia_2.8b": _row(32, 2560, 32),
    "pythia_6.9b": _row(32, 4096, 32, vocab_size=50432),
    "pythia_12b": _row(36, 5120, 40, vocab_size=50688),
    "gpt_neox_20b": _row(44, 6144, 64, vocab_size=50432, activation="gelu"),
}

_ACTIVATIONS = {"gelu": "gelu_exact", "relu": "relu"} | {name: "gelu" for name in ("gelu_new", "gelu_fast", *GELU_TANH)}

KEYS = (
    Mapped("vocab_size", to="vocab_size", default=50432),
    Mapped("hidden_size", to="embed_dim", default=6144),
    Mapped("intermediate_size", to="mlp_dim", default=24576),
    Mapped("num_hidden_layers", to="num_layers", default=44),
    Mapped("num_attention_heads", to="num_heads", default=64),
    Mapped("max_position_embeddings", to="max_sequence_length", default=2048),
    Mapped("layer_norm_eps", to="norm_epsilon", default=1e-5),
    Mapped("hidden_act", to="activation", default="gelu", values=_ACTIVATIONS),
    Mapped("tie_word_embeddings", to="tie_embeddings", default=False),
    Own("use_parallel_residual", default=True),
    Own("rotary_pct", default=0.25, other_names=("partial_rotary_factor",)),
    Own("rope_theta", default=10000.0, other_names=("rotary_emb_base",)),
    *rope_keys(10000.0)[1:],
    Fixed("attention_bias", (True,), reason="it leaves attention without biases, which its published models have"),
    *(Ignored(name, reason=NO_DROPOUT) for name in ("attention_dropout", "hidden_dropout", "classifier_dropout")),
)


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="gpt_neox")
    fixed: dict[str, Any] = dict(kind="transformer", position="rotary", norm="layernorm", bias=True)
    fixed["block"] = "parallel" if file["use_parallel_residual"] else "pre"
    fixed["rotary_fraction"] = read_fraction(file, "rotary_pct")
    return fixed | ours | read_rope(file, family="gpt_neox")


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    more = dict(
        architectures=["GPTNeoXForCausalLM"],
        model_type="gpt_neox",
        use_parallel_residual=model["block"] == "parallel",
        rotary_pct=model["rotary_fraction"],
        rotary_emb_base=model["rope_theta"],
    )
    return more | write_keys(KEYS, model) | write_rope(model)


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    D, H, F, L, V = (int(model[key]) for key in ("embed_dim", "num_heads", "mlp_dim", "num_layers", "vocab_size"))
    K = D // H

    fused, name = [], "attention.query_key_value"
    for at, ours in enumerate(("query", "key", "value")):
        kernel, bias = interleaved((H, 3, K), at, (D,)), interleaved((H, 3, K), at)
        fused.append(Entry(f"blocks/attention/{ours}/kernel", f"{name}.weight", kernel))
        fused.append(Entry(f"blocks/attention/{ours}/bias", f"{name}.bias", bias))
    rows = [
        *normed("blocks/attention_norm", "input_layernorm", D),
        *fused,
        *biased("blocks/attention/output", "attention.dense", linear((H, K), (D,)), (D,)),
        *normed("blocks/mlp_norm", "post_attention_layernorm", D),
        *biased("blocks/mlp/up", "mlp.dense_h_to_4h", linear((D,), (F,)), (F,)),
        *biased("blocks/mlp/down", "mlp.dense_4h_to_h", linear((F,), (D,)), (D,)),
    ]
    output = (
        Tied(("embed_out.weight", "lm_head.weight"), "embedding", copy(V, D))
        if model["tie_embeddings"]
        else Entry("output", ("embed_out.weight", "lm_head.weight"), linear((D,), (V,)))
    )
    return (
        Entry("embedding", "gpt_neox.embed_in.weight", copy(V, D)),
        *in_layers(rows, "gpt_neox.layers.{layer}.", L),
        *normed("output_norm", "gpt_neox.final_layer_norm", D),
        output,
        Skipped(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)", "mask and frequencies"),
    )


FAMILY = Family(
    name="gpt_neox",
    model_type="gpt_neox",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
