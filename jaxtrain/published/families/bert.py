"""BERT, and MiniLM, which has its architecture. No jax here.

Sources: the config.json published with each model; Devlin et al. 2018 (arXiv 1810.04805).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.entries import Entry, Row, Skipped, Tied, in_layers, prefixed, renamed
from jaxtrain.published.family import Family
from jaxtrain.published.heads import HEAD_KEYS, head_kind, read_head, write_head
from jaxtrain.published.keys import Fixed, Ignored, Mapped, Own, read_keys, write_keys
from jaxtrain.published.transforms import copy, linear, vector

ENCODER = dict(
    position="learned", norm="layernorm", block="post", embedding_norm=True, bias=True, causal=False,
)  # fmt: skip
_BERT = ENCODER | dict(
    vocab_size=30522, max_sequence_length=512, token_types=2, norm_epsilon=1e-12, activation="gelu_exact",
    tie_embeddings=True, dropout=0.1, head=dict(kind="masked_language_model", hidden="gelu_exact"),
)  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "bert_base": _BERT | dict(num_layers=12, embed_dim=768, num_heads=12),
    "bert_base_cased": _BERT | dict(num_layers=12, embed_dim=768, num_heads=12, vocab_size=28996),
    "bert_large": _BERT | dict(num_layers=24, embed_dim=1024, num_heads=16),
    "minilm_l6": _BERT
    | dict(num_layers=6, embed_dim=384, num_heads=12, head=dict(kind="embedding", pooling="mean", normalize=True)),
}

# Activations of an encoder -> ours; "gelu" means the error function here.
ACTIVATIONS: Mapping[object, object] = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}

KEYS = (
    Mapped("vocab_size", to="vocab_size", default=30522),
    Mapped("hidden_size", to="embed_dim", default=768),
    Mapped("num_hidden_layers", to="num_layers", default=12),
    Mapped("num_attention_heads", to="num_heads", default=12),
    Mapped("intermediate_size", to="mlp_dim", default=3072),
    Mapped("hidden_act", to="activation", default="gelu", values=ACTIVATIONS),
    Mapped("hidden_dropout_prob", to="dropout", default=0.1),
    Mapped("max_position_embeddings", to="max_sequence_length", default=512),
    Mapped("type_vocab_size", to="token_types", default=2),
    Mapped("layer_norm_eps", to="norm_epsilon", default=1e-12),
    Mapped("tie_word_embeddings", to="tie_embeddings", default=True),
    Own("classifier_dropout", default=None),
    Ignored("attention_probs_dropout_prob", reason="drops attention weights in training only"),
    Fixed("position_embedding_type", ("absolute",), reason="it adds positions to attention"),
    *HEAD_KEYS,
)


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="bert")
    check_token_types(ours)
    head = read_head(
        file, prefix="Bert", masked=ours["activation"], text="tanh", pooled="tanh", dropout=label_dropout(file)
    )
    return dict(kind="transformer") | ENCODER | ours | dict(head=head)


def check_token_types(ours: Mapping[str, Any]) -> None:
    """Raise where there is no kind of token, as in DistilBERT: transformers cannot run such a model of this family.

    Raises:
        ConfigError: type_vocab_size is 0.
    """
    if not ours["token_types"]:
        raise ConfigError(
            "config.json has type_vocab_size: 0, without which this family has no models; supported: 1 and more"
        )


def label_dropout(file: Mapping[str, Any]) -> float:
    """Returns the dropout rate before the layer that classifies."""
    rate = file["classifier_dropout"]
    return file["hidden_dropout_prob"] if rate is None else rate


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    said = dict(model_type="bert") | write_head(model, prefix="Bert") | write_keys(KEYS, model)
    return said | write_label_dropout(model)


def write_label_dropout(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the key of the dropout rate before the layer that classifies, where it differs from the others."""
    if head_kind(model) not in ("sequence", "token", "regression"):
        return {}
    rate = model["head"]["dropout"]
    return {} if rate == model["dropout"] else dict(classifier_dropout=rate)


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    written = "" if head_kind(model) == "embedding" else "bert."
    encoder = prefixed((*embeddings(model), *blocks(model), *pooler(model)), written=written, read=("bert.", ""))
    rows = (*encoder, *_head(model), *labels(model, "classifier"))
    words = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return renamed(rows, words, only="LayerNorm")


def embeddings(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the rows of the embeddings and their norm."""
    D, V, P, T = (int(model[key]) for key in ("embed_dim", "vocab_size", "max_sequence_length", "token_types"))
    positions = P + int(model["position_offset"])
    return (
        Entry("embedding", "embeddings.word_embeddings.weight", copy(V, D)),
        Entry("positions", "embeddings.position_embeddings.weight", copy(positions, D)),
        *([Entry("token_types", "embeddings.token_type_embeddings.weight", copy(T, D))] if T else []),
        Entry("embedding_norm/scale", "embeddings.LayerNorm.weight", copy(D)),
        Entry("embedding_norm/bias", "embeddings.LayerNorm.bias", copy(D)),
        Skipped(r"embeddings\.(position_ids|token_type_ids)", "they count from 0, or are all 0"),
    )


def blocks(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the rows of the blocks."""
    D, H, K, F, L = (int(model[key]) for key in ("embed_dim", "num_heads", "head_dim", "mlp_dim", "num_layers"))
    rows = [
        Entry("blocks/attention/output/kernel", "attention.output.dense.weight", linear((H, K), (D,))),
        Entry("blocks/attention/output/bias", "attention.output.dense.bias", copy(D)),
        Entry("blocks/attention_norm/scale", "attention.output.LayerNorm.weight", copy(D)),
        Entry("blocks/attention_norm/bias", "attention.output.LayerNorm.bias", copy(D)),
        Entry("blocks/mlp/up/kernel", "intermediate.dense.weight", linear((D,), (F,))),
        Entry("blocks/mlp/up/bias", "intermediate.dense.bias", copy(F)),
        Entry("blocks/mlp/down/kernel", "output.dense.weight", linear((F,), (D,))),
        Entry("blocks/mlp/down/bias", "output.dense.bias", copy(D)),
        Entry("blocks/mlp_norm/scale", "output.LayerNorm.weight", copy(D)),
        Entry("blocks/mlp_norm/bias", "output.LayerNorm.bias", copy(D)),
    ]
    for name in ("query", "key", "value"):
        rows += [
            Entry(f"blocks/attention/{name}/kernel", f"attention.self.{name}.weight", linear((D,), (H, K))),
            Entry(f"blocks/attention/{name}/bias", f"attention.self.{name}.bias", vector(H, K)),
        ]
    return in_layers(rows, "encoder.layer.{layer}.", L)


def pooler(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the rows of the layer over the first token, which is a part of the model without a head."""
    if head_kind(model) in ("sequence", "regression", "embedding") and model["head"]["hidden"]:
        return square(model, "head/hidden", "pooler.dense")
    return (Skipped(r"pooler\.dense\.(weight|bias)", "the head has no such layer"),)


def square(model: Mapping[str, Any], path: str, name: str) -> tuple[Row, ...]:
    """Returns the rows of a square layer of the head."""
    D = int(model["embed_dim"])
    return (
        Entry(f"{path}/kernel", f"{name}.weight", linear((D,), (D,))),
        Entry(f"{path}/bias", f"{name}.bias", copy(D)),
    )


def _head(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """The head of the masked language model."""
    skipped = Skipped(r"cls\.seq_relationship\.(weight|bias)", "it tells whether two texts follow each other")
    if head_kind(model) != "masked_language_model":
        return (skipped,)
    norm, dense = "cls.predictions.transform.LayerNorm", "cls.predictions.transform.dense"
    names = ("cls.predictions.bias", "cls.predictions.decoder.bias")
    return (*masked_head(model, dense, norm, *names, "cls.predictions.decoder.weight"), skipped)


def masked_head(
    model: Mapping[str, Any], dense: str, norm: str, bias: str, repeated_bias: str, output: str
) -> tuple[Row, ...]:
    """Returns the rows of the head of a masked language model.

    Args:
        model: Our model group.
        dense, norm: Names of its square layer and its norm.
        bias: Name of the bias of the output layer.
        repeated_bias: Name under which some files hold that bias again.
        output: Name of the output layer, which is the embedding where the two are tied.
    """
    D, V = (int(model[key]) for key in ("embed_dim", "vocab_size"))
    return (
        *square(model, "head/dense", dense),
        Entry("head/norm/scale", f"{norm}.weight", copy(D)),
        Entry("head/norm/bias", f"{norm}.bias", copy(D)),
        Entry("head/bias", bias, copy(V)),
        *([] if repeated_bias == bias else [Tied(repeated_bias, "head/bias", copy(V), instead="one bias")]),
        Tied(output, "embedding", copy(V, D))
        if model["tie_embeddings"]
        else Entry("output", output, linear((D,), (V,))),
    )


def labels(model: Mapping[str, Any], name: str) -> tuple[Row, ...]:
    """Returns the rows of the layer that classifies, where the head has one.

    Args:
        model: Our model group.
        name: Name of the layer.
    """
    if head_kind(model) not in ("sequence", "token", "regression"):
        return ()
    D, C = int(model["embed_dim"]), int(model["head"]["num_labels"])
    return (
        Entry("head/output/kernel", f"{name}.weight", linear((D,), (C,))),
        Entry("head/output/bias", f"{name}.bias", copy(C)),
    )


FAMILY = Family(
    name="bert",
    model_type="bert",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
