"""A published encoder with another head: what is read, what is drawn, and what is said of it."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain import load_pretrained
from jaxtrain.config import load_config
from jaxtrain.config.fits import check_fits, fresh_notes, fresh_parts
from jaxtrain.families.bert import BERT as FAMILY

PUBLISHED = Path(__file__).parent / "published"


def test_a_model_without_a_head_gives_what_it_pools():
    pretrained, wanted = load_pretrained(PUBLISHED / "bert_base"), dict(np.load(PUBLISHED / "bert_base/expected.npz"))
    names = {"tokens": "tokens", "segments": "attention_mask", "token_types": "token_type_ids"}
    inputs = {ours: wanted[theirs].astype(np.int32) for ours, theirs in names.items()}
    apply = jax.jit(lambda params, x: pretrained.model.apply(params, {}, x, key=None, train=False)[0])
    found = apply(pretrained.params, inputs)
    # float32 here and there; tanh of sums of 16 products.
    np.testing.assert_allclose(found, wanted["pooled"], rtol=0, atol=1e-4)


# folder, keys of the model, the patterns that are drawn
HEADS = {
    "the head of the file": ("bert_sequence", {}, []),
    "labels on what the model pools": (
        "bert_base",
        {"head": {"kind": "sequence", "hidden": "tanh", "num_labels": 5}},
        ["head/output/*"],
    ),
    "other labels": ("bert_sequence", {"head.num_labels": 7}, ["head/output/*"]),
    "labels that only the data knows": ("bert_base", {"head": {"kind": "sequence", "pooling": "mean"}}, ["head/*"]),
    "other classes of images": ("vit_classification", {"num_classes": 4}, ["head/*"]),
}


@pytest.mark.parametrize(("folder", "keys", "patterns"), HEADS.values(), ids=HEADS)
def test_another_head_is_drawn_and_the_rest_is_read(folder, keys, patterns):
    path = str(PUBLISHED / folder)
    config = load_config({"model": {"from": path, **keys}}).config
    check_fits(config.model)
    assert fresh_parts(config.model) == patterns
    notes = fresh_notes(config.model)
    assert len(notes) == bool(patterns)
    assert all(f"{', '.join(patterns)} newly initialized: {path} has another head" in note for note in notes)


# architectures, further keys of config.json, kind of our head
ARCHITECTURES = {
    "pretraining": ("BertForPreTraining", {}, "masked_language_model"),
    "one label": ("BertForSequenceClassification", {"num_labels": 1}, "regression"),
    "numbers": ("BertForSequenceClassification", {"num_labels": 3, "problem_type": "regression"}, "regression"),
}


@pytest.mark.parametrize(("architecture", "keys", "kind"), ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_the_architecture_decides_the_head(architecture, keys, kind):
    config = json.loads((PUBLISHED / "bert_base/config.json").read_text())
    given = {**config, **keys, "architectures": None if architecture is None else [architecture]}
    assert FAMILY.from_published(given)["head"]["kind"] == kind
