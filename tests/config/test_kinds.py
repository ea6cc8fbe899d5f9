"""Which rows, tasks, heads and models belong together: one line for each that does not, before any data is read."""

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.kinds import check_kinds, row_form
from jaxtrain.errors import ConfigError

# id: (overrides, what is refused)
TOLD = {
    "a task of other data": (["task=classification"], "set task=language_modeling"),
    "fp8 over kernels in 4 bits": (
        ["precision.policy=fp8", "finetune.base=nf4", "finetune.lora.rank=2"],
        "precision.policy=fp8 does not go with finetune.base; use precision.policy=bf16",
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_train_bench_and_plan_refuse_and_config_remarks(cli, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # rows beside it train in runs/quickstart too
    overrides, said = TOLD[name]
    with pytest.raises(ConfigError, match=said):
        check_kinds(load_config("quickstart", overrides=overrides).config)
    planned = cli("plan", "quickstart", "--on", "h100", "--analytic", *overrides)
    line = planned.err.splitlines()[-1]  # after remarks on keys that gave way
    assert planned.code == 2
    assert said in line
    for words in (["train", "quickstart"], ["bench", "quickstart", "--skip", "start"]):
        answer = cli(*words, *overrides)
        assert (answer.code, answer.err.splitlines()[-1]) == (2, line)
    shown = cli("config", "quickstart", *overrides)
    assert shown.code == 0
    assert f"train would refuse this: {line.removeprefix('jaxtrain: ')}" in shown.err


def test_a_model_that_sees_ahead_is_for_a_task_of_ones_own(cli):
    config = load_config("quickstart", overrides=["model.causal=false"]).config
    with pytest.raises(ConfigError, match=r"model\.causal=false would let"):
        check_kinds(config)
    check_kinds(config, own_task=True)
    planned = cli("plan", "quickstart", "--on", "h100", "--analytic", "model.causal=false")
    assert planned.code == 0
    trained = cli("train", "quickstart", "model.causal=false")
    assert (trained.code, trained.err.count("\n")) == (2, 1)


def test_options_of_a_loss_that_is_not_there_are_refused():
    config = load_config("digits_mlp", overrides=["loss.z_loss=1e-4"]).config
    with pytest.raises(ConfigError, match=r"loss.z_loss=0.0001 is for task=language_modeling, but task=class"):
        check_kinds(config)
    check_kinds(config, own_task=True)  # which may read them


MASKED = ["task=masked_language_modeling", "data.corruption.kind=mask", "model.causal=false"]
LABELLED = [
    "task=classification",
    "data.kind=labelled_text",
    "data.builtin=null",
    "model.causal=false",
    "model.head.kind=sequence",
]

# id: (overrides, form of the rows)
TAKEN = {
    "next token": ([], "tokens"),
    "masks": (MASKED, "masked tokens"),
    "pairs": (
        ["task=sequence_to_sequence", "data.kind=text_pairs", "data.builtin=null", "model.kind=encoder_decoder"],
        "pairs of texts",
    ),
    "labels": (LABELLED, "labelled text"),
    "tags": (
        ["task=token_classification", "data.kind=tagged_text", "model.causal=false", "model.head.kind=token"],
        "tagged text",
    ),
    "preferences": (["task=dpo", "data.kind=chat"], "pairs of answers"),
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
    "labels without a head": (
        ["task=classification", "data.kind=labelled_text", "data.builtin=null", "model.causal=false"],
        "task=classification takes model.head.kind=sequence, but it is language_model",
    ),
    "preferences for the next token": (
        ["data.kind=chat", "data.pairs=true"],
        "task=language_modeling, but data.kind=chat gives pairs of answers; set task=dpo or reward",
    ),
    "texts for an mlp": (
        ["task=classification", "data.kind=labelled_text", "data.builtin=null", "model.kind=mlp"],
        "does not take the labelled text of data.kind=labelled_text; use model.kind=transformer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not(name):
    overrides, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said) as caught:
        check_kinds(load_config("quickstart", overrides=overrides).config)
    assert "\n" not in str(caught.value)
