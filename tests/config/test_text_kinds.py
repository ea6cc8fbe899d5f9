"""Which rows of text, tasks, heads and models belong together: one line for each that does not."""

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.kinds import check_kinds, row_form
from jaxtrain.errors import ConfigError

MASKED = ["task=masked_language_modeling", "data.corruption.kind=mask", "model.causal=false"]
LABELLED = [
    "task=classification",
    "data.kind=labelled_text",
    "data.builtin=null",
    "model.causal=false",
    "model.head.kind=sequence",
]
SPANS = ["task=sequence_to_sequence", "data.corruption.kind=spans", "model.kind=encoder_decoder"]

# id: (overrides, form of the rows)
TAKEN = {
    "next token": ([], "tokens"),
    "masks": (MASKED, "masked tokens"),
    "masks of tokens of shards": ([*MASKED, "data.kind=tokens", "data.path=x"], "masked tokens"),
    "masks with a head": ([*MASKED, "model.head.kind=masked_language_model"], "masked tokens"),
    "spans": (SPANS, "pairs of texts"),
    "pairs": (
        ["task=sequence_to_sequence", "data.kind=text_pairs", "data.builtin=null", "model.kind=encoder_decoder"],
        "pairs of texts",
    ),
    "labels": (LABELLED, "labelled text"),
    "labels for a decoder": ([*LABELLED, "model.causal=true", "model.head.pooling=last"], "labelled text"),
    "numbers": ([*LABELLED, "task=regression", "model.head.kind=regression"], "labelled text"),
    "tags": (
        ["task=token_classification", "data.kind=tagged_text", "model.causal=false", "model.head.kind=token"],
        "tagged text",
    ),
    "chats": (["data.kind=chat"], "tokens"),
    "preferences": (["task=dpo", "data.kind=chat"], "pairs of answers"),
    "images for a vit": (
        ["task=classification", "data.kind=digits", "model.kind=vit", "model.patch_size=2"],
        "examples",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_belongs_together(name):
    overrides, form = TAKEN[name]
    config = load_config("quickstart", overrides=overrides).config
    assert row_form(config) == form
    check_kinds(config)


# id: (overrides, what is said)
REFUSED = {
    "masks without masked rows": (
        ["task=masked_language_modeling", "model.causal=false"],
        "set data.corruption.kind=mask or task=language_modeling",
    ),
    "masks for one who sees half": ([*MASKED, "model.causal=true"], "set model.causal=false"),
    "masked rows for the next token": (
        ["data.corruption.kind=mask"],
        "gives masked tokens; set task=masked_language_modeling",
    ),
    "spans for a transformer": (
        ["task=sequence_to_sequence", "data.corruption.kind=spans"],
        "does not take the pairs of texts of data.kind=text; use model.kind=encoder_decoder",
    ),
    "labels without a head": (
        ["task=classification", "data.kind=labelled_text", "data.builtin=null", "model.causal=false"],
        "task=classification takes model.head.kind=sequence, but it is language_model",
    ),
    "labels for tags": (
        [*LABELLED, "task=token_classification"],
        "gives labelled text; set task=classification or reg",
    ),
    "preferences for the next token": (
        ["data.kind=chat", "data.pairs=true"],
        "task=language_modeling, but data.kind=chat gives pairs of answers; set task=dpo or reward",
    ),
    "chats as preferences": (
        ["task=dpo", "data.kind=chat", "data.pairs=false"],
        "task=dpo, but data.kind=chat gives tokens; set task=language_modeling",
    ),
    "another start": ([*SPANS, "model.start_token=1"], "set data.corruption.decoder_start=1"),
    "texts for an mlp": (
        ["task=classification", "data.kind=labelled_text", "data.builtin=null", "model.kind=mlp"],
        "does not take the labelled text of data.kind=labelled_text; use model.kind=transformer",
    ),
    "an option of another loss": ([*LABELLED, "loss.z_loss=1e-4"], "loss.z_loss=0.0001 is for task=language_modeling"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not(name):
    overrides, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said) as caught:
        check_kinds(load_config("quickstart", overrides=overrides).config)
    assert "\n" not in str(caught.value)


def test_options_of_the_loss_are_those_of_every_task_of_tokens():
    for overrides in (MASKED, SPANS):
        check_kinds(load_config("quickstart", overrides=[*overrides, "loss.z_loss=1e-4"]).config)


def test_a_corruption_of_one_component_is_refused():
    component = "{source: {kind: text, corruption: {kind: mask}}}"
    with pytest.raises(ConfigError, match=r"corruption of a component has no effect; set data\.corruption"):
        load_config("quickstart", overrides=["data.kind=mixture", f"data.components=[{component}]"])
