"""StarCoder2. No jax here.

Sources: Lozhkov et al. 2024, and the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.published.decoder import GELU_TANH, NO_DROPOUT, no_tokens, split_width
from jaxtrain.published.entries import Entry, Row, Skipped, Tied
from jaxtrain.published.families.llama import attention_blocks, in_decoder
from jaxtrain.published.family import Family
from jaxtrain.published.keys import Fixed, Ignored, Mapped, read_keys, write_keys
from jaxtrain.published.rope import read_rope, rope_keys, write_rope
from jaxtrain.published.transforms import copy, linear

_COMMON = dict(
    vocab_size=49152, max_sequence_length=16384, position="rotary", sliding_window=4096, norm="layernorm",
    norm_epsilon=1e-5, activation="gelu", bias=True, tie_embeddings=True,
)  # fmt: skip


def _row(layers: int, width: int, heads: int, **more: object) -> dict[str, Any]:
    return _COMMON | dict(num_layers=layers, embed_dim=width, num_heads=heads) | more


# The published count of the largest size, 15,957,889,024, holds an output layer beside the embedding.
SIZES: dict[str, dict[str, Any]] = {
    "starcoder2_3b": _row(30, 3072, 24, num_kv_heads=2, mlp_dim=12288, rope_theta=999999.4420358813),
    "starcoder2_7b": _row(32, 4608, 36, num_kv_heads=4, mlp_dim=18432, rope_theta=1000000.0),
    "starcoder2_15b": _row(40, 6144, 48, num_kv_heads=4, mlp_dim=24576, rope_theta=100000.0, tie_embeddings=False),
}

_ACTIVATIONS = {name: "gelu" for name in GELU_TANH} | {"gelu": "gelu_exact", "relu": "relu"}

KEYS = (
    Mapped("vocab_size", to="vocab_size", default=49152),
    Mapped("hidden_size", to="embed_dim", default=3072),
    Mapped("intermediate_size", to="mlp_dim", default=12288),
    Mapped("num_hidden_layers", to="num_layers", default=30),
    Mapped("num_attention_heads", to="num_heads", default=24),
    Mapped("num_key_value_heads", to="num_kv_heads", default=2),
    Mapped("head_dim", to="head_dim", default=split_width),
    Mapped("hidden_act", to="activation", default="gelu_pytorch_tanh", values=_ACTIVATIONS),
    Mapped("max_position_embeddings", to="max_sequence_length", default=4096),
    Mapped("norm_epsilon", to="norm_epsilon", default=1e-5),
    Mapped("sliding_window", to="sliding_window", default=None),
    Mapped("tie_word_embeddings", to="tie_embeddings", default=True),
    *rope_keys(10000.0),
    Fixed("use_bias", (True,), reason="it leaves the linear layers without biases, but not the norms"),
    Fixed("norm_type", ("layer_norm",), reason="it asks for another norm"),
    Fixed("mlp_type", ("default",), reason="it asks for a gated MLP"),
    Fixed("scale_attn_weights", (True,), reason="it leaves the products of attention unscaled"),
    Ignored("layer_norm_epsilon", reason="transformers reads norm_epsilon"),
    *(Ignored(name, reason=NO_DROPOUT) for name in ("attention_dropout", "residual_dropout", "embedding_dropout")),
    *(Ignored(name, reason="transformers computes the softmax in float32 whatever it says")
      for name in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")),
)  # fmt: skip


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="starcoder2")
    return (
        dict(kind="transformer", position="rotary", norm="layernorm", bias=True)
        | ours
        | read_rope(file, family="starcoder2")
    )


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    more = dict(architectures=["Starcoder2ForCausalLM"], model_type="starcoder2", use_bias=True)
    written = write_keys(KEYS, model)
    # transformers divides the width by the heads, and asks for no key of it.
    if written["head_dim"] == written["hidden_size"] // written["num_attention_heads"]:
        del written["head_dim"]
    return more | written | write_rope(model) | no_tokens(model, bos_token_id=50256, eos_token_id=50256)


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    D, F, V = (int(model[key]) for key in ("embed_dim", "mlp_dim", "vocab_size"))
    rows = [
        *attention_blocks(model),
        Entry("blocks/attention_norm/bias", "input_layernorm.bias", copy(D)),
        Entry("blocks/mlp_norm/bias", "post_attention_layernorm.bias", copy(D)),
        Entry("blocks/mlp/up/kernel", "mlp.c_fc.weight", linear((D,), (F,))),
        Entry("blocks/mlp/up/bias", "mlp.c_fc.bias", copy(F)),
        Entry("blocks/mlp/down/kernel", "mlp.c_proj.weight", linear((F,), (D,))),
        Entry("blocks/mlp/down/bias", "mlp.c_proj.bias", copy(D)),
    ]
    output: Row = Entry("output", "lm_head.weight", linear((D,), (V,)))
    if model["tie_embeddings"]:
        output = Tied("lm_head.weight", "embedding", copy(V, D))
    return (
        *in_decoder(rows, model),
        Entry("embedding", "model.embed_tokens.weight", copy(V, D)),
        Entry("output_norm/scale", "model.norm.weight", copy(D)),
        Entry("output_norm/bias", "model.norm.bias", copy(D)),
        output,
        Skipped(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "follows from rope_theta"),
    )


FAMILY = Family(
    name="starcoder2",
    model_type="starcoder2",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
