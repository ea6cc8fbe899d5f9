"""RoBERTa: the encoder of BERT, with other positions and other names of its heads. No jax here.

Sources: the config.json published with each model; Liu et al. 2019 (arXiv 1907.11692).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.published.entries import Row, Skipped, prefixed
from jaxtrain.published.families import bert
from jaxtrain.published.family import Family
from jaxtrain.published.heads import HEAD_KEYS, head_kind, read_head, write_head
from jaxtrain.published.keys import Fixed, Ignored, Mapped, Own, read_keys, write_keys

_ROBERTA = bert.ENCODER | dict(
    vocab_size=50265, max_sequence_length=512, position_offset=2, token_types=1, norm_epsilon=1e-5,
    activation="gelu_exact", tie_embeddings=True, dropout=0.1,
    head=dict(kind="masked_language_model", hidden="gelu_exact"),
)  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "roberta_base": _ROBERTA | dict(num_layers=12, embed_dim=768, num_heads=12),
    "roberta_large": _ROBERTA | dict(num_layers=24, embed_dim=1024, num_heads=16),
}

KEYS = (
    Mapped("vocab_size", to="vocab_size", default=50265),
    Mapped("hidden_size", to="embed_dim", default=768),
    Mapped("num_hidden_layers", to="num_layers", default=12),
    Mapped("num_attention_heads", to="num_heads", default=12),
    Mapped("intermediate_size", to="mlp_dim", default=3072),
    Mapped("hidden_act", to="activation", default="gelu", values=bert.ACTIVATIONS),
    Mapped("hidden_dropout_prob", to="dropout", default=0.1),
    Mapped("type_vocab_size", to="token_types", default=2),
    Mapped("layer_norm_eps", to="norm_epsilon", default=1e-12),
    Mapped("tie_word_embeddings", to="tie_embeddings", default=True),
    Own("max_position_embeddings", default=512),
    Own("pad_token_id", default=1),
    Own("classifier_dropout", default=None),
    Ignored("attention_probs_dropout_prob", reason="drops attention weights in training only"),
    Fixed("position_embedding_type", ("absolute",), reason="it adds positions to attention"),
    *HEAD_KEYS,
)


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="roberta")
    bert.check_token_types(ours)
    # Positions are counted from the id of padding on, which has the row of its own id.
    offset = file["pad_token_id"] + 1
    positions = dict(position_offset=offset, max_sequence_length=file["max_position_embeddings"] - offset)
    # The head of the masked language model has its own activation, whatever hidden_act is.
    dropout = bert.label_dropout(file)
    head = read_head(file, prefix="Roberta", masked="gelu_exact", text="tanh", pooled="tanh", dropout=dropout)
    return dict(kind="transformer") | bert.ENCODER | ours | positions | dict(head=head)


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    offset = int(model["position_offset"])
    positions = dict(max_position_embeddings=model["max_sequence_length"] + offset, pad_token_id=offset - 1)
    said = dict(model_type="roberta") | write_head(model, prefix="Roberta") | write_keys(KEYS, model)
    return said | positions | bert.write_label_dropout(model)


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    kind = head_kind(model)
    encoder: tuple[Row, ...] = (*bert.embeddings(model), *bert.blocks(model))
    if kind == "embedding":
        encoder = (*encoder, *bert.pooler(model))
    else:
        encoder = (*encoder, Skipped(r"pooler\.dense\.(weight|bias)", "the head has a layer of its own"))
    rows = prefixed(encoder, written="" if kind == "embedding" else "roberta.", read=("roberta.", ""))
    match kind:
        case "masked_language_model":
            names = ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder.bias")
            return (*rows, *bert.masked_head(model, *names, "lm_head.decoder.weight"))
        case "sequence" | "regression":
            hidden = bert.square(model, "head/hidden", "classifier.dense") if model["head"]["hidden"] else ()
            return (*rows, *hidden, *bert.labels(model, "classifier.out_proj"))
        case _:
            return (*rows, *bert.labels(model, "classifier"))


FAMILY = Family(
    name="roberta",
    model_type="roberta",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
