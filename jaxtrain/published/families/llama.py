"""Llama 2, 3, 3.1 and 3.2, and SmolLM2. No jax here.

Sources: the config.json published with each model (the base models).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.entries import Entry, Row, Skipped, Tied, in_layers
from jaxtrain.published.family import Family
from jaxtrain.published.heads import HEAD_KEYS, head_kind, read_labels, write_head
from jaxtrain.published.keys import Fixed, Mapped, Own, read_keys, write_keys
from jaxtrain.published.rope import read_rope, rope_keys, write_rope
from jaxtrain.published.transforms import copy, linear, vector

_COMMON = dict(
    position="rotary", norm="rmsnorm", norm_epsilon=1e-5, activation="swiglu", bias=False, tie_embeddings=False,
)  # fmt: skip
_LLAMA2 = _COMMON | dict(vocab_size=32000, max_sequence_length=4096, rope_theta=10000.0)
_LLAMA3 = _COMMON | dict(vocab_size=128256, max_sequence_length=8192, rope_theta=500000.0, num_kv_heads=8)
_ROPE31 = dict(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
_LLAMA31 = _LLAMA3 | dict(max_sequence_length=131072, rope_scaling=_ROPE31)
_LLAMA32 = _LLAMA31 | dict(tie_embeddings=True, rope_scaling=_ROPE31 | dict(factor=32.0))
_SMOLLM2 = _COMMON | dict(vocab_size=49152, max_sequence_length=8192, rope_theta=100000.0, tie_embeddings=True)


def _row(family: Mapping[str, Any], layers: int, width: int, heads: int, **more: object) -> dict[str, Any]:
    return {**family} | dict(num_layers=layers, embed_dim=width, num_heads=heads) | more


SIZES: dict[str, dict[str, Any]] = {
    "llama2_7b": _row(_LLAMA2, 32, 4096, 32, mlp_dim=11008),
    "llama2_13b": _row(_LLAMA2, 40, 5120, 40, mlp_dim=13824),
    "llama2_70b": _row(_LLAMA2, 80, 8192, 64, mlp_dim=28672, num_kv_heads=8),
    "llama3_8b": _row(_LLAMA3, 32, 4096, 32, mlp_dim=14336),
    "llama3_70b": _row(_LLAMA3, 80, 8192, 64, mlp_dim=28672),
    "llama3.1_8b": _row(_LLAMA31, 32, 4096, 32, mlp_dim=14336),
    "llama3.1_70b": _row(_LLAMA31, 80, 8192, 64, mlp_dim=28672),
    "llama3.1_405b": _row(_LLAMA31, 126, 16384, 128, mlp_dim=53248),
    "llama3.2_1b": _row(_LLAMA32, 16, 2048, 32, mlp_dim=8192),
    "llama3.2_3b": _row(_LLAMA32, 28, 3072, 24, mlp_dim=8192),
    "smollm2_135m": _row(_SMOLLM2, 30, 576, 9, mlp_dim=1536, num_kv_heads=3),
    "smollm2_360m": _row(_SMOLLM2, 32, 960, 15, mlp_dim=2560, num_kv_heads=5),
    "smollm2_1.7b": _row(_SMOLLM2, 24, 2048, 32, mlp_dim=8192, rope_theta=130000.0),
}

_LABELLED = "LlamaForSequenceClassification"

KEYS = (
    Mapped("vocab_size", to="vocab_size", default=32000),
    Mapped("hidden_size", to="embed_dim", default=4096),
    Mapped("intermediate_size", to="mlp_dim", default=11008),
    Mapped("num_hidden_layers", to="num_layers", default=32),
    Mapped("num_attention_heads", to="num_heads", default=32),
    Mapped("num_key_value_heads", to="num_kv_heads", default=lambda file: file["num_attention_heads"]),
    Mapped("head_dim", to="head_dim", default=lambda file: file["hidden_size"] // file["num_attention_heads"]),
    Mapped("hidden_act", to="activation", default="silu", values={"silu": "swiglu", "swish": "swiglu"}),
    Mapped("max_position_embeddings", to="max_sequence_length", default=2048),
    Mapped("rms_norm_eps", to="norm_epsilon", default=1e-6),
    Mapped("tie_word_embeddings", to="tie_embeddings", default=False),
    Own("attention_bias", default=False),
    Own("mlp_bias", default=False),
    *rope_keys(10000.0),
    *HEAD_KEYS,
    Fixed("attention_dropout", (0.0, 0), reason="it drops attention weights in training"),
    Fixed("pretraining_tp", (1,), reason="it splits linear layers into slices"),
    Fixed("rope_interleaved", (False,), reason="it rotates neighbouring numbers instead of halves"),
    Fixed("is_llama_config", (True,), reason="it names another architecture"),
)  # fmt: skip


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="llama")
    if not isinstance(file["attention_bias"], bool):
        raise ConfigError(f"config.json has attention_bias: {file['attention_bias']}; it takes true or false")
    if file["attention_bias"] != file["mlp_bias"]:
        raise ConfigError(
            f"config.json has attention_bias: {file['attention_bias']} and mlp_bias: {file['mlp_bias']}, which the "
            "family llama supports only when they are equal"
        )
    fixed = dict(kind="transformer", position="rotary", norm="rmsnorm", bias=file["attention_bias"])
    return fixed | ours | read_rope(file, family="llama") | _read_head(file)


def _read_head(file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the head: labels of a text, read at its last token, where the architecture says so."""
    if list(file["architectures"] or ()) != [_LABELLED]:
        return {}
    kind = "regression" if file["problem_type"] == "regression" or read_labels(file) == 1 else "sequence"
    return {"head": dict(kind=kind, num_labels=read_labels(file), pooling="last", bias=False)}


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    biases: dict[str, Any] = dict(attention_bias=model["bias"], mlp_bias=model["bias"])
    if head_kind(model) in ("sequence", "regression"):
        biases |= write_head(model, prefix="Llama")
    return (
        dict(architectures=["LlamaForCausalLM"], model_type="llama")
        | write_keys(KEYS, model)
        | biases
        | write_rope(model)
    )


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    return (*decoder_blocks(model), *ends(model))


def ends(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the rows of the embedding, the last norm and the output layer or the head."""
    D, V = (int(model[key]) for key in ("embed_dim", "vocab_size"))
    output: Row = Entry("output", "lm_head.weight", linear((D,), (V,)))
    if head_kind(model) != "language_model":
        output = Entry("head/output/kernel", "score.weight", linear((D,), (int(model["head"]["num_labels"]),)))
    elif model["tie_embeddings"]:
        output = Tied("lm_head.weight", "embedding", copy(V, D))
    return (
        Entry("embedding", "model.embed_tokens.weight", copy(V, D)),
        Entry("output_norm/scale", "model.norm.weight", copy(D)),
        output,
        Skipped(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "follows from rope_theta"),
    )


def decoder_blocks(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the rows of the blocks: norms, attention and MLP, with biases where the model has them."""
    return in_decoder([*attention_blocks(model), *mlp_blocks(model)], model)


def in_decoder(rows: Iterable[Entry], model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns rows of one block stacked over the layers of a decoder."""
    return in_layers(rows, "model.layers.{layer}.", int(model["num_layers"]))


def attention_blocks(model: Mapping[str, Any]) -> list[Entry]:
    """Returns the rows of the norms and of attention, of one block."""
    D, H, G, K = (int(model[key]) for key in ("embed_dim", "num_heads", "num_kv_heads", "head_dim"))
    rows = [
        Entry("blocks/attention_norm/scale", "input_layernorm.weight", copy(D)),
        Entry("blocks/attention/query/kernel", "self_attn.q_proj.weight", linear((D,), (H, K))),
        Entry("blocks/attention/key/kernel", "self_attn.k_proj.weight", linear((D,), (G, K))),
        Entry("blocks/attention/value/kernel", "self_attn.v_proj.weight", linear((D,), (G, K))),
        Entry("blocks/attention/output/kernel", "self_attn.o_proj.weight", linear((H, K), (D,))),
        Entry("blocks/mlp_norm/scale", "post_attention_layernorm.weight", copy(D)),
    ]
    if model["qk_norm"]:
        rows += [
            Entry("blocks/attention/query_norm/scale", "self_attn.q_norm.weight", copy(K)),
            Entry("blocks/attention/key_norm/scale", "self_attn.k_norm.weight", copy(K)),
        ]
    if model["bias"]:
        rows += [
            Entry("blocks/attention/query/bias", "self_attn.q_proj.bias", vector(H, K)),
            Entry("blocks/attention/key/bias", "self_attn.k_proj.bias", vector(G, K)),
            Entry("blocks/attention/value/bias", "self_attn.v_proj.bias", vector(G, K)),
        ]
    if model["bias"] is True:
        rows.append(Entry("blocks/attention/output/bias", "self_attn.o_proj.bias", copy(D)))
    return rows


def mlp_blocks(model: Mapping[str, Any]) -> list[Entry]:
    """Returns the rows of the MLP, of one block."""
    D, F = int(model["embed_dim"]), int(model["mlp_dim"])
    rows = [
        Entry("blocks/mlp/gate/kernel", "mlp.gate_proj.weight", linear((D,), (F,))),
        Entry("blocks/mlp/up/kernel", "mlp.up_proj.weight", linear((D,), (F,))),
        Entry("blocks/mlp/down/kernel", "mlp.down_proj.weight", linear((F,), (D,))),
    ]
    if model["bias"] is True:
        rows += [
            Entry("blocks/mlp/gate/bias", "mlp.gate_proj.bias", copy(F)),
            Entry("blocks/mlp/up/bias", "mlp.up_proj.bias", copy(F)),
            Entry("blocks/mlp/down/bias", "mlp.down_proj.bias", copy(D)),
        ]
    return rows


FAMILY = Family(
    name="llama",
    model_type="llama",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
