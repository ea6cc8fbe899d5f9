"""Fixtures of the encoders: BERT, RoBERTa, DistilBERT, ELECTRA and ModernBERT, with their heads."""

# pyright: reportMissingImports=false
from typing import Any

import numpy as np
import transformers as tf
from published_fixtures.fixture import IGNORED, Arrays, Fixture, near_the_dip, outputs_of, padded

VOCABULARY = 40


def inputs(fixture: Fixture, generator: np.random.Generator) -> Arrays:
    """Draw tokens with padding and, for a model of two segments, their kinds."""
    arrays = padded(generator, fixture.length, VOCABULARY, fixture.config.pad_token_id)
    if getattr(fixture.config, "type_vocab_size", 1) > 1:
        kinds = np.zeros_like(arrays["tokens"])
        kinds[0, 7:], kinds[1, 3:8] = 1, 1
        arrays["token_type_ids"] = kinds
    return arrays


def base(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make the hidden states of a model without a head, and what it pools from them."""
    arrays = inputs(fixture, generator)
    return arrays | outputs_of(model, arrays)


def masked(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make the logits of a masked language model, where every third token is a label."""
    arrays = inputs(fixture, generator)
    labels = np.where(
        np.arange(fixture.length) % 3 == 1, generator.integers(4, VOCABULARY, (2, fixture.length)), IGNORED
    )
    arrays["labels"] = np.where(arrays["attention_mask"] == 1, labels, IGNORED)
    return arrays | outputs_of(model, arrays)


def of_tokens(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make the logits of a model with 3 labels per token."""
    arrays = inputs(fixture, generator)
    labels = generator.integers(0, 3, (2, fixture.length))
    arrays["labels"] = np.where(arrays["attention_mask"] == 1, labels, IGNORED)
    return arrays | outputs_of(model, arrays)


def of_sequences(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make the logits of a model with 3 labels per sequence."""
    arrays = inputs(fixture, generator) | {"labels": generator.integers(0, 3, 2)}
    return arrays | outputs_of(model, arrays)


def of_replaced(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make the number per token, as logits of one label, of a model that says which tokens were replaced."""
    arrays = inputs(fixture, generator)
    logits = outputs_of(model, arrays)["logits"][..., None]
    return arrays | {"logits": logits, "labels": np.zeros_like(arrays["tokens"])}


def as_first_published(config: dict[str, Any]) -> dict[str, Any]:
    """Write the layers and thetas of a ModernBERT as its published files have them."""
    old = {name: value for name, value in config.items() if name not in ("rope_parameters", "layer_types", "dtype")}
    thetas = {kind: rope["rope_theta"] for kind, rope in config["rope_parameters"].items()}
    old |= {"global_rope_theta": thetas["full_attention"], "local_rope_theta": thetas["sliding_attention"]}
    return old | {"torch_dtype": config["dtype"], "global_attn_every_n_layers": 3, "transformers_version": "4.47.0"}


_BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 16, "type_vocab_size": 2,
}  # fmt: skip
_ROBERTA = {**_BERT, "max_position_embeddings": 18, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
_DISTILBERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 16,
}  # fmt: skip
_ELECTRA = {**_BERT, "embedding_size": 12}
_LABELS = {"id2label": {0: "no", 1: "maybe", 2: "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
_MODERNBERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 4,
    "num_attention_heads": 2, "max_position_embeddings": 32, "local_attention": 6, "bos_token_id": 1, "cls_token_id": 1,
    "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_THETAS = {
    "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
_LAYERS = {
    "sliding": ["sliding_attention"] * 4, "full": ["full_attention"] * 4,
    "thirds": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
_TANH = ({"hidden_act": "gelu_new"},)
_BERT_DIP = near_the_dip("intermediate.dense", "1.output.dense") | near_the_dip("intermediate.dense", "0.output.dense")
_DISTILBERT_DIP = near_the_dip("ffn.lin1", "ffn.lin2")

FIXTURES = (
    Fixture(
        "bert_mlm", tf.BertForMaskedLM, tf.BertConfig(**_BERT), masked, special=_BERT_DIP, matters=_TANH,
        gradients=("bert.encoder.layer.0.intermediate.dense.weight", "bert.embeddings.word_embeddings.weight",
                   "cls.predictions.bias", "bert.embeddings.token_type_embeddings.weight"),
    ),
    Fixture(
        "bert_base", tf.BertModel, tf.BertConfig(**_BERT), base, special=_BERT_DIP, matters=_TANH,
    ),
    Fixture(
        "bert_sequence", tf.BertForSequenceClassification, tf.BertConfig(**_BERT, **_LABELS), of_sequences,
        gradients=("bert.pooler.dense.weight", "classifier.bias"),
    ),
    Fixture(
        "bert_token", tf.BertForTokenClassification, tf.BertConfig(**_BERT, **_LABELS), of_tokens,
        gradients=("bert.encoder.layer.1.attention.self.query.weight", "classifier.weight"),
    ),
    Fixture(
        "roberta_mlm", tf.RobertaForMaskedLM, tf.RobertaConfig(**_ROBERTA), masked, special=_BERT_DIP, matters=_TANH,
        gradients=("roberta.embeddings.position_embeddings.weight", "lm_head.bias"),
    ),
    Fixture(
        "roberta_sequence", tf.RobertaForSequenceClassification, tf.RobertaConfig(**_ROBERTA, **_LABELS), of_sequences,
        gradients=("classifier.dense.weight",),
    ),
    Fixture(
        "distilbert_mlm", tf.DistilBertForMaskedLM, tf.DistilBertConfig(**_DISTILBERT), masked,
        gradients=("distilbert.transformer.layer.0.ffn.lin1.weight", "vocab_projector.bias"),
        special=_DISTILBERT_DIP, matters=({"activation": "gelu_new"},),
    ),
    Fixture(
        "distilbert_sequence", tf.DistilBertForSequenceClassification, tf.DistilBertConfig(**_DISTILBERT, **_LABELS),
        of_sequences, gradients=("pre_classifier.weight",),
    ),
    Fixture(
        "electra_mlm", tf.ElectraForMaskedLM, tf.ElectraConfig(**_ELECTRA), masked, special=_BERT_DIP,
        gradients=("electra.embeddings_project.weight", "electra.embeddings.word_embeddings.weight",
                   "generator_predictions.dense.bias", "generator_lm_head.bias"),
        matters=(*_TANH, {"layer_norm_eps": 0.1}),
    ),
    Fixture(
        "electra_sequence", tf.ElectraForSequenceClassification,
        tf.ElectraConfig(**{**_ELECTRA, "hidden_act": "relu"}, **_LABELS), of_sequences,
        gradients=("classifier.dense.weight", "electra.embeddings_project.bias"),
    ),
    Fixture(
        "electra_token", tf.ElectraForTokenClassification,
        tf.ElectraConfig(**{**_BERT, "embedding_size": 16}, **_LABELS), of_tokens, gradients=("classifier.weight",),
    ),
    Fixture(
        "electra_discriminator", tf.ElectraForPreTraining, tf.ElectraConfig(**{**_ELECTRA, "hidden_act": "relu"}),
        of_replaced, matters=({"hidden_act": "gelu"},),
    ),
    Fixture(
        "modernbert_mlm", tf.ModernBertForMaskedLM, tf.ModernBertConfig(**_MODERNBERT, rope_parameters=_THETAS), masked,
        old=as_first_published,
        gradients=("model.embeddings.norm.weight", "model.layers.1.attn_norm.weight", "model.layers.0.attn.Wqkv.weight",
                   "model.layers.2.mlp.Wi.weight", "decoder.bias"),
        matters=({"hidden_activation": "gelu_new"}, {"local_attention": 8}, {"local_attention": 4},
                 {"layer_types": _LAYERS["full"]}, {"layer_types": _LAYERS["sliding"]}, {"norm_eps": 0.1},
                 *({"rope_parameters": {**_THETAS, kind: {"rope_type": "default", "rope_theta": 100.0}}}
                   for kind in _THETAS)),
    ),
    Fixture(
        "modernbert_sequence", tf.ModernBertForSequenceClassification,
        tf.ModernBertConfig(**_MODERNBERT, classifier_pooling="mean", **_LABELS), of_sequences,
        gradients=("head.dense.weight", "head.norm.weight", "classifier.bias"),
        matters=({"classifier_pooling": "cls"}, {"classifier_activation": "relu"}),
    ),
    Fixture(
        "modernbert_token", tf.ModernBertForTokenClassification,
        tf.ModernBertConfig(**_MODERNBERT, **_LABELS, global_attn_every_n_layers=2), of_tokens,
        gradients=("head.norm.weight", "classifier.weight"), matters=({"layer_types": _LAYERS["thirds"]},),
    ),
)  # fmt: skip
