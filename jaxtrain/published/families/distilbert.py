"""DistilBERT: half the layers of BERT, without token types and pooling layer. No jax here.

Sources: the config.json published with each model; Sanh et al. 2019 (arXiv 1910.01108).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.published.entries import Row, biased, in_layers, normed, prefixed
from jaxtrain.published.families import bert
from jaxtrain.published.family import Family
from jaxtrain.published.heads import HEAD_KEYS, head_kind, read_head, write_head
from jaxtrain.published.keys import Fixed, Ignored, Mapped, Own, read_keys, write_keys
from jaxtrain.published.transforms import linear

# The code that reads these files has the epsilon written into it; config.json does not say it.
_EPSILON = 1e-12
_DISTILBERT = bert.ENCODER | dict(
    vocab_size=30522, max_sequence_length=512, norm_epsilon=_EPSILON, activation="gelu_exact", tie_embeddings=True,
    dropout=0.1, head=dict(kind="masked_language_model", hidden="gelu_exact"),
)  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "distilbert_base": _DISTILBERT | dict(num_layers=6, embed_dim=768, num_heads=12),
}

KEYS = (
    Mapped("vocab_size", to="vocab_size", default=30522),
    Mapped("dim", to="embed_dim", default=768),
    Mapped("n_layers", to="num_layers", default=6),
    Mapped("n_heads", to="num_heads", default=12),
    Mapped("hidden_dim", to="mlp_dim", default=3072),
    Mapped("activation", to="activation", default="gelu", values=bert.ACTIVATIONS),
    Mapped("dropout", to="dropout", default=0.1),
    Mapped("max_position_embeddings", to="max_sequence_length", default=512),
    Mapped("tie_word_embeddings", to="tie_embeddings", default=True),
    Own("seq_classif_dropout", default=0.2),
    Ignored("attention_dropout", reason="drops attention weights in training only"),
    Ignored("qa_dropout", reason="is of a head that answers questions"),
    Ignored("sinusoidal_pos_embds", reason="says how the positions were made, which are in the file"),
    Fixed("tie_weights_", (True,), reason="it gives the head an output layer of its own"),
    *HEAD_KEYS,
)


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="distilbert")
    head = read_head(
        file,
        prefix="DistilBert",
        masked=ours["activation"],
        text="relu",
        pooled=None,
        dropout=file["seq_classif_dropout"],
    )
    if head["kind"] == "token":
        head |= dict(dropout=file["dropout"])
    return dict(kind="transformer", norm_epsilon=_EPSILON, token_types=0) | bert.ENCODER | ours | dict(head=head)


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    said = dict(model_type="distilbert") | write_head(model, prefix="DistilBert") | write_keys(KEYS, model)
    text = head_kind(model) in ("sequence", "regression")
    return said | (dict(seq_classif_dropout=model["head"]["dropout"]) if text else {})


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    kind = head_kind(model)
    written = "" if kind == "embedding" else "distilbert."
    rows = prefixed((*bert.embeddings(model), *_blocks(model)), written=written, read=("distilbert.", ""))
    match kind:
        case "masked_language_model":
            # The output layer holds the bias under one name only.
            bias = "vocab_projector.bias"
            names = ("vocab_transform", "vocab_layer_norm", bias, bias, "vocab_projector.weight")
            return (*rows, *bert.masked_head(model, *names))
        case "sequence" | "regression":
            hidden = bert.square(model, "head/hidden", "pre_classifier") if model["head"]["hidden"] else ()
            return (*rows, *hidden, *bert.labels(model, "classifier"))
        case _:
            return (*rows, *bert.labels(model, "classifier"))


def _blocks(model: Mapping[str, Any]) -> tuple[Row, ...]:
    D, H, K, F, L = (int(model[key]) for key in ("embed_dim", "num_heads", "head_dim", "mlp_dim", "num_layers"))
    rows = [
        *biased("blocks/attention/output", "attention.out_lin", linear((H, K), (D,)), (D,)),
        *normed("blocks/attention_norm", "sa_layer_norm", D),
        *biased("blocks/mlp/up", "ffn.lin1", linear((D,), (F,)), (F,)),
        *biased("blocks/mlp/down", "ffn.lin2", linear((F,), (D,)), (D,)),
        *normed("blocks/mlp_norm", "output_layer_norm", D),
    ]
    for ours, theirs in (("query", "q_lin"), ("key", "k_lin"), ("value", "v_lin")):
        rows += biased(f"blocks/attention/{ours}", f"attention.{theirs}", linear((D,), (H, K)), (H, K))
    return in_layers(rows, "transformer.layer.{layer}.", L)


FAMILY = Family(
    name="distilbert",
    model_type="distilbert",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
