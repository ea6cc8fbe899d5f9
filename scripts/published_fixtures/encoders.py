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
    arrays = base(fixture, model, generator)
    labels = generator.integers(4, VOCABULARY, (2, fixture.length))
    is_label = (np.arange(fixture.length) % 3 == 1) & (arrays["attention_mask"] == 1)
    return arrays | {"labels": np.where(is_label, labels, IGNORED)}


def of_tokens(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make the logits of a model with 3 labels per token."""
    arrays = base(fixture, model, generator)
    labels = generator.integers(0, 3, (2, fixture.length))
    return arrays | {"labels": np.where(arrays["attention_mask"] == 1, labels, IGNORED)}


def of_sequences(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make the logits of a model with 3 labels per sequence."""
    return base(fixture, model, generator) | {"labels": generator.integers(0, 3, 2)}


def of_replaced(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make the number per token, as logits of one label, of a model that says which tokens were replaced."""
    arrays = base(fixture, model, generator)
    return arrays | {"logits": arrays["logits"][..., None], "labels": np.zeros_like(arrays["tokens"])}


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
# What a fixture's name ends in -> what the name of its class ends in, and what is expected.
_KINDS = {
    "base": ("Model", base), "mlm": ("ForMaskedLM", masked), "sequence": ("ForSequenceClassification", of_sequences),
    "token": ("ForTokenClassification", of_tokens), "discriminator": ("ForPreTraining", of_replaced),
}  # fmt: skip


def encoder(name: str, config: Any, **more: Any) -> Fixture:
    """Return the fixture of an encoder, whose kind of head its name ends in."""
    suffix, expect = _KINDS[name.rpartition("_")[2]]
    return Fixture(name, getattr(tf, type(config).__name__.removesuffix("Config") + suffix), config, expect, **more)


FIXTURES = (
    encoder(
        "bert_mlm", tf.BertConfig(**_BERT),
        gradients=("bert.encoder.layer.0.intermediate.dense.weight", "bert.embeddings.word_embeddings.weight",
                   "cls.predictions.bias", "bert.embeddings.token_type_embeddings.weight"),
        matters=_TANH, special=_BERT_DIP,
    ),
    encoder(
        "bert_base", tf.BertConfig(**_BERT),
        matters=_TANH, special=_BERT_DIP,
    ),
    encoder(
        "bert_sequence", tf.BertConfig(**_BERT, **_LABELS),
        gradients=("bert.pooler.dense.weight", "classifier.bias"),
    ),
    encoder(
        "bert_token", tf.BertConfig(**_BERT, **_LABELS),
        gradients=("bert.encoder.layer.1.attention.self.query.weight", "classifier.weight"),
    ),
    encoder(
        "roberta_mlm", tf.RobertaConfig(**_ROBERTA),
        gradients=("roberta.embeddings.position_embeddings.weight", "lm_head.bias"), matters=_TANH, special=_BERT_DIP,
    ),
    encoder(
        "roberta_sequence", tf.RobertaConfig(**_ROBERTA, **_LABELS),
        gradients=("classifier.dense.weight",),
    ),
    encoder(
        "distilbert_mlm", tf.DistilBertConfig(**_DISTILBERT),
        gradients=("distilbert.transformer.layer.0.ffn.lin1.weight", "vocab_projector.bias"),
        matters=({"activation": "gelu_new"},), special=_DISTILBERT_DIP,
    ),
    encoder(
        "distilbert_sequence", tf.DistilBertConfig(**_DISTILBERT, **_LABELS),
        gradients=("pre_classifier.weight",),
    ),
    encoder(
        "electra_mlm", tf.ElectraConfig(**_ELECTRA),
        gradients=("electra.embeddings_project.weight", "electra.embeddings.word_embeddings.weight",
                   "generator_predictions.dense.bias", "generator_lm_head.bias"),
        matters=(*_TANH, {"layer_norm_eps": 0.1}), special=_BERT_DIP,
    ),
    encoder(
        "electra_sequence", tf.ElectraConfig(**{**_ELECTRA, "hidden_act": "relu"}, **_LABELS),
        gradients=("classifier.dense.weight", "electra.embeddings_project.bias"),
    ),
    encoder(
        "electra_token", tf.ElectraConfig(**{**_BERT, "embedding_size": 16}, **_LABELS),
        gradients=("classifier.weight",),
    ),
    encoder(
        "electra_discriminator", tf.ElectraConfig(**{**_ELECTRA, "hidden_act": "relu"}),
        matters=({"hidden_act": "gelu"},),
    ),
    encoder(
        "modernbert_mlm", tf.ModernBertConfig(**_MODERNBERT, rope_parameters=_THETAS), old=as_first_published,
        gradients=("model.embeddings.norm.weight", "model.layers.1.attn_norm.weight", "model.layers.0.attn.Wqkv.weight",
                   "model.layers.2.mlp.Wi.weight", "decoder.bias"),
        matters=({"hidden_activation": "gelu_new"}, {"local_attention": 8}, {"local_attention": 4},
                 {"layer_types": _LAYERS["full"]}, {"layer_types": _LAYERS["sliding"]}, {"norm_eps": 0.1},
                 *({"rope_parameters": {**_THETAS, kind: {"rope_type": "default", "rope_theta": 100.0}}}
                   for kind in _THETAS)),
    ),
    encoder(
        "modernbert_sequence", tf.ModernBertConfig(**_MODERNBERT, classifier_pooling="mean", **_LABELS),
        gradients=("head.dense.weight", "head.norm.weight", "classifier.bias"),
        matters=({"classifier_pooling": "cls"}, {"classifier_activation": "relu"}),
    ),
    encoder(
        "modernbert_token", tf.ModernBertConfig(**_MODERNBERT, **_LABELS, global_attn_every_n_layers=2),
        gradients=("head.norm.weight", "classifier.weight"), matters=({"layer_types": _LAYERS["thirds"]},),
    ),
)  # fmt: skip
