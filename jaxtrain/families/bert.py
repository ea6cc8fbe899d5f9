"""BERT (and MiniLM, which has its architecture), RoBERTa, DistilBERT and ELECTRA: encoders with heads. No jax here.

Sources: the config.json published with each model; Devlin et al. 2018 (arXiv 1810.04805), Liu et al. 2019 (arXiv
1907.11692), Sanh et al. 2019 (arXiv 1910.01108), Clark et al. 2020 (arXiv 2003.10555).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError, reading_published
from jaxtrain.families.family import (
    HEAD_KEYS,
    Family,
    Key,
    fixed,
    head_kind,
    ignored,
    mapped,
    own,
    read_architecture,
    read_labels,
    read_text_head,
    size,
    size_keys,
    write_labels,
)
from jaxtrain.formats.hub import read_json
from jaxtrain.formats.rows import (
    Entry,
    Row,
    Skipped,
    Tied,
    biased,
    block_rows,
    copy,
    dims,
    in_layers,
    linear,
    normed,
    output_row,
    prefixed,
    renamed,
)

_FIXED = dict(position="learned", norm="layernorm", block="post", embedding_norm=True, bias=True, causal=False)
_MASKED = dict(
    activation="gelu_exact", tie_embeddings=True, dropout=0.1,
    head=dict(kind="masked_language_model", hidden="gelu_exact"),
)  # fmt: skip
_BERT = _FIXED | _MASKED | dict(vocab_size=30522, max_sequence_length=512, token_types=2, norm_epsilon=1e-12)
_ROBERTA = _BERT | dict(vocab_size=50265, position_offset=2, token_types=1, norm_epsilon=1e-5)
_ELECTRA = _BERT | dict(head=dict(kind="token", num_labels=1, hidden="gelu_exact"))
_DISCRIMINATOR = "ElectraForPreTraining"
# The code that reads DistilBERT has the epsilon written into it; config.json does not say it.
_DISTIL_FIXED = _FIXED | dict(norm_epsilon=1e-12)
_DISTIL_NAMES = dict(embed_dim="dim", num_layers="n_layers", num_heads="n_heads", mlp_dim="hidden_dim")
_ROWS = dict(vocab_size=30522, max_sequence_length=512, tie_embeddings=True)
_SENTENCE = dict(head=dict(kind="embedding", pooling="mean", normalize=True))
# "gelu" means the error function here.
_ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
# What follows the name of the family in an architecture -> kind of our head. The first of each kind is written.
_KINDS = {
    "Model": "embedding",
    "ForMaskedLM": "masked_language_model",
    "ForPreTraining": "masked_language_model",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
}


def _keys(width: int = 768, **sizes: int) -> tuple[Key, ...]:
    """The keys of BERT, RoBERTa and ELECTRA."""
    defaults = size(dict(norm_epsilon=1e-12, tie_embeddings=True), 12, width, width // 64, **sizes)
    return (
        *size_keys(defaults, dict(norm_epsilon="layer_norm_eps")),
        mapped("hidden_act", "activation", "gelu", _ACTIVATIONS),
        mapped("hidden_dropout_prob", "dropout", 0.1),
        Key("type_vocab_size", 2, "token_types", allowed=(1, 2, 3, 4)),
        own("classifier_dropout"),
        *ignored("attention_probs_dropout_prob"),
        fixed("position_embedding_type", "absolute"),
        *HEAD_KEYS,
    )


def read_head(
    file: Mapping[str, Any], prefix: str, *, masked: object, dropout: float, text: str = "tanh", pooled: Any = "tanh"
) -> dict[str, Any]:
    """Returns our head; `masked`, `text` and `pooled` are the activations of the layer before the last of its kinds."""
    found = read_architecture(file, *(prefix + suffix for suffix in reversed(_KINDS)))
    kind = _KINDS[found.removeprefix(prefix)]
    if kind == "masked_language_model":
        return dict(kind=kind, hidden=masked)
    if kind == "embedding":
        return dict(kind=kind, pooling="first", hidden=pooled)
    if kind == "token":
        return dict(kind=kind, num_labels=read_labels(file), dropout=dropout)
    return read_text_head(file, pooling="first", hidden=text, dropout=dropout)


def write_head(model: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the keys that say which head a model has, and the dropout before it, where it differs from the others."""
    kind = head_kind(model)
    written = "sequence" if kind == "regression" else kind
    # Another head reads back as this one, and is refused by its key.
    suffix = next((suffix for suffix, known in _KINDS.items() if known == written), "Model")
    said: dict[str, Any] = dict(architectures=[prefix + suffix])
    if written not in ("sequence", "token"):
        return said
    said |= write_labels(model)
    rate = model["head"]["dropout"]
    return said if rate == model["dropout"] or prefix == "DistilBert" else said | dict(classifier_dropout=rate)


def _label_dropout(file: Mapping[str, Any]) -> float:
    """The rate before the layer that classifies."""
    rate = file["classifier_dropout"]
    return file["hidden_dropout_prob"] if rate is None else rate


def _read_bert(ours: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    return dict(head=read_head(file, "Bert", masked=ours["activation"], dropout=_label_dropout(file)))


def _read_roberta(ours: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    # Positions are counted from the id of padding on, which has the row of its own id.
    offset = file["pad_token_id"] + 1
    # The head of the masked language model has its own activation, whatever hidden_act is.
    head = read_head(file, "Roberta", masked="gelu_exact", dropout=_label_dropout(file))
    return dict(position_offset=offset, max_sequence_length=file["max_position_embeddings"] - offset, head=head)


def _read_distilbert(ours: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    rate = file["seq_classif_dropout"]
    head = read_head(file, "DistilBert", masked=ours["activation"], text="relu", pooled=None, dropout=rate)
    return dict(token_types=0, head=head | (dict(dropout=file["dropout"]) if head["kind"] == "token" else {}))


def _write_roberta(model: Mapping[str, Any]) -> dict[str, Any]:
    offset = int(model["position_offset"])
    positions = dict(max_position_embeddings=model["max_sequence_length"] + offset, pad_token_id=offset - 1)
    return positions | write_head(model, "Roberta")


def _write_distilbert(model: Mapping[str, Any]) -> dict[str, Any]:
    text = head_kind(model) in ("sequence", "regression")
    return write_head(model, "DistilBert") | (dict(seq_classif_dropout=model["head"]["dropout"]) if text else {})


def _table_width(model: Mapping[str, Any]) -> int:
    """The width of the embeddings."""
    return int(model["embedding_width"] or model["embed_dim"])


def _embeddings(model: Mapping[str, Any]) -> tuple[Row, ...]:
    (V, P), D, T = dims(model, "VP"), _table_width(model), int(model["token_types"])
    return (
        Entry("embedding", "embeddings.word_embeddings.weight", copy(V, D)),
        Entry("positions", "embeddings.position_embeddings.weight", copy(P + int(model["position_offset"]), D)),
        *([Entry("token_types", "embeddings.token_type_embeddings.weight", copy(T, D))] if T else []),
        *normed("embedding_norm", "embeddings.LayerNorm", D),
        Skipped(r"embeddings\.(position_ids|token_type_ids)"),
    )


# Ours -> the names of BERT and RoBERTa, and of DistilBERT.
_BLOCK = {
    "attention/query": "attention.self.query", "attention/key": "attention.self.key",
    "attention/value": "attention.self.value", "attention/output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm", "mlp/up": "intermediate.dense", "mlp/down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}  # fmt: skip
_DISTIL_BLOCK = {
    "attention/query": "attention.q_lin", "attention/key": "attention.k_lin", "attention/value": "attention.v_lin",
    "attention/output": "attention.out_lin", "attention_norm": "sa_layer_norm", "mlp/up": "ffn.lin1",
    "mlp/down": "ffn.lin2", "mlp_norm": "output_layer_norm",
}  # fmt: skip
_NO_POOLER = Skipped(r"pooler\.dense\.(weight|bias)")


def _encoder(
    model: Mapping[str, Any],
    prefix: str,
    *pooler: Row,
    project: Iterable[Row] = (),
    blocks: str = "encoder.layer.{layer}.",
) -> tuple[Row, ...]:
    """The rows of the encoder, whose names have the prefix where the model has a head."""
    names = _BLOCK if blocks.startswith("encoder") else _DISTIL_BLOCK
    layers = in_layers(block_rows(model, names, beside=True), blocks, model["num_layers"])
    rows = (*_embeddings(model), *project, *layers, *pooler)
    return prefixed(rows, written="" if head_kind(model) == "embedding" else prefix, read=(prefix, ""))


def _square(model: Mapping[str, Any], path: str, name: str, outputs: int | None = None) -> list[Entry]:
    """The rows of a layer of the head, which is square if `outputs` are not others."""
    (D,), outputs = dims(model, "D"), outputs or int(model["embed_dim"])
    return biased(path, name, linear((D,), (outputs,)), (outputs,))


def _pooler(model: Mapping[str, Any]) -> list[Entry] | list[Skipped]:
    """The layer over the first token, which is a part of the model without a head."""
    if head_kind(model) in ("sequence", "regression", "embedding") and model["head"]["hidden"]:
        return _square(model, "head/hidden", "pooler.dense")
    return [_NO_POOLER]


def _masked_head(model: Mapping[str, Any], names: tuple[str, ...], repeated_bias: str | None = None) -> list[Row]:
    """The head of a masked language model: names of its square layer, norm, bias and output layer."""
    (V,), width = dims(model, "V"), _table_width(model)
    dense, norm, bias, output = names
    return [
        *_square(model, "head/dense", dense, width),
        *normed("head/norm", norm, width),
        Entry("head/bias", bias, copy(V)),
        *([Tied(repeated_bias, "head/bias", copy(V))] if repeated_bias else []),
        output_row({**model, "embed_dim": width}, output),
    ]


def label_rows(model: Mapping[str, Any], name: str) -> list[Entry]:
    """The layer that classifies, where the head has one."""
    if head_kind(model) not in ("sequence", "token", "regression"):
        return []
    D, C = int(model["embed_dim"]), int(model["head"]["num_labels"])
    return biased("head/output", name, linear((D,), (C,)), (C,))


def _bert_tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    kind = head_kind(model)
    rows = [
        *_encoder(model, "bert.", *_pooler(model)),
        Skipped(r"cls\.seq_relationship\.(weight|bias)"),
        *label_rows(model, "classifier"),
    ]
    if kind == "masked_language_model":
        head = "cls.predictions"
        names = (f"{head}.transform.dense", f"{head}.transform.LayerNorm", f"{head}.bias", f"{head}.decoder.weight")
        rows += _masked_head(model, names, f"{head}.decoder.bias")
    return renamed(rows, {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"})


def _roberta_tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    kind = head_kind(model)
    rows = _encoder(model, "roberta.", *(_pooler(model) if kind == "embedding" else [_NO_POOLER]))
    if kind == "masked_language_model":
        names = ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder.weight")
        return (*rows, *_masked_head(model, names, "lm_head.decoder.bias"))
    if kind not in ("sequence", "regression"):
        return (*rows, *label_rows(model, "classifier"))
    hidden = _square(model, "head/hidden", "classifier.dense") if model["head"]["hidden"] else ()
    return (*rows, *hidden, *label_rows(model, "classifier.out_proj"))


def _distilbert_tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    kind = head_kind(model)
    rows = _encoder(model, "distilbert.", blocks="transformer.layer.{layer}.")
    if kind == "masked_language_model":
        names = ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias", "vocab_projector.weight")
        return (*rows, *_masked_head(model, names))
    text = kind in ("sequence", "regression") and model["head"]["hidden"]
    hidden = _square(model, "head/hidden", "pre_classifier") if text else ()
    return (*rows, *hidden, *label_rows(model, "classifier"))


def _read_electra(ours: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    width = file["embedding_size"]
    if list(file["architectures"] or ()) == [_DISCRIMINATOR]:  # one number per token: whether it was replaced
        head: dict[str, Any] = dict(kind="token", num_labels=1, hidden=ours["activation"])
    else:  # whatever hidden_act is
        rate = _label_dropout(file)
        head = read_head(file, "Electra", masked="gelu_exact", text="gelu_exact", pooled=None, dropout=rate)
    return dict(embedding_width=None if width == file["hidden_size"] else width, head=head)


def _write_electra(model: Mapping[str, Any]) -> dict[str, Any]:
    said = dict(embedding_size=_table_width(model)) | write_head(model, "Electra")
    is_discriminator = head_kind(model) == "token" and model["head"]["hidden"]
    return said | dict(architectures=[_DISCRIMINATOR]) if is_discriminator else said


def _electra_tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    kind, D, E = head_kind(model), int(model["embed_dim"]), _table_width(model)
    project = [] if D == E else biased("embedding_projection", "embeddings_project", linear((E,), (D,)), (D,))
    rows = _encoder(model, "electra.", project=project)
    if kind == "masked_language_model":
        head = "generator_predictions"
        names = (f"{head}.dense", f"{head}.LayerNorm", "generator_lm_head.bias", "generator_lm_head.weight")
        return (*rows, *_masked_head(model, names))
    if not model["head"]["hidden"]:
        return (*rows, *label_rows(model, "classifier"))
    head = "discriminator_predictions" if kind == "token" else "classifier"
    output = "dense_prediction" if kind == "token" else "out_proj"
    return (*rows, *_square(model, "head/hidden", f"{head}.dense"), *label_rows(model, f"{head}.{output}"))


BERT = Family(
    name="bert",
    architecture="BertModel",
    keys=_keys(vocab_size=30522, max_sequence_length=512),
    tensors=_bert_tensors,
    fixed=_FIXED,
    read=_read_bert,
    write=lambda model: write_head(model, "Bert"),
    sizes={
        "bert_base": size(_BERT, 12, 768, 12),
        "bert_base_cased": size(_BERT, 12, 768, 12, vocab_size=28996),
        "bert_large": size(_BERT, 24, 1024, 16),
        "minilm_l6": size(_BERT, 6, 384, 12, **_SENTENCE),
    },
)
ROBERTA = Family(
    name="roberta",
    architecture="RobertaModel",
    keys=(*_keys(vocab_size=50265), own("max_position_embeddings", 512), own("pad_token_id", 1)),
    tensors=_roberta_tensors,
    fixed=_FIXED,
    read=_read_roberta,
    write=_write_roberta,
    sizes={"roberta_base": size(_ROBERTA, 12, 768, 12), "roberta_large": size(_ROBERTA, 24, 1024, 16)},
)
DISTILBERT = Family(
    name="distilbert",
    architecture="DistilBertModel",
    keys=(
        *size_keys(size(_ROWS, 6, 768, 12), _DISTIL_NAMES),
        mapped("activation", "activation", "gelu", _ACTIVATIONS),
        mapped("dropout", "dropout", 0.1),
        own("seq_classif_dropout", 0.2),
        *ignored("attention_dropout", "qa_dropout", "sinusoidal_pos_embds"),
        fixed("tie_weights_", True),
        *HEAD_KEYS,
    ),
    tensors=_distilbert_tensors,
    fixed=_DISTIL_FIXED,
    read=_read_distilbert,
    write=_write_distilbert,
    sizes={"distilbert_base": size(_DISTIL_FIXED | _MASKED | _ROWS, 6, 768, 12)},
)
ELECTRA = Family(
    name="electra",
    architecture="ElectraModel",
    keys=(
        *_keys(256, vocab_size=30522, max_sequence_length=512),
        own("embedding_size", 128),
        Key("tie_word_embeddings", True, "tie_embeddings", allowed=(True,)),
        *ignored("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"),
    ),
    tensors=_electra_tensors,
    fixed=_FIXED,
    read=_read_electra,
    write=_write_electra,
    sizes={
        "electra_small": size(_ELECTRA, 12, 256, 4, embedding_width=128),
        "electra_base": size(_ELECTRA, 12, 768, 12),
        "electra_large": size(_ELECTRA, 24, 1024, 16),
    },
)


def read_sentence_head(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the keys of our head for a folder of sentence-transformers, which says the pooling in modules.json.

    Its config.json gives the encoder alone (`settings`), whose own pooling is not the one that the embeddings were
    trained with. None: the model has a head, or the folder says no pooling.

    Raises:
        ConfigError: It asks for a module or a pooling that is not known.
    """
    file = folder / "modules.json"
    if (settings.get("head") or {}).get("kind") != "embedding" or not file.is_file():
        return None
    with reading_published(file):
        modules = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in read_json(file, kind=list)]
    kinds = [kind for kind, _ in modules]
    known = kinds in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
    said = read_json(folder / modules[1][1] / "config.json") if known else {}
    chosen = [key for key, value in said.items() if key.startswith("pooling_mode") and value]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise ConfigError(
            f"{file} has the modules {kinds} {chosen}; known: Transformer, Pooling (mean, cls), Normalize: or serve it "
            "with model.head.kind=embedding model.head.pooling=mean"
        )
    return dict(kind="embedding", pooling=_POOLINGS[chosen[0]], hidden="none", normalize="Normalize" in kinds)


_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
