"""What of a config does not belong together, told before any data is read; keys that do nothing are told too."""

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.kinds import check_kinds
from jaxtrain.errors import ConfigError

# id: (overrides, what `load_config` says)
WHERE = {
    "no names": (["remat.policy=names"], r"remat \(command line\): remat.policy=names needs remat.names; known: query"),
    "offload under dots": (
        ["remat.offload=[block_input]"],
        r"remat \(command line\): remat.offload=\['block_input'\] does not work under remat.policy=dots",
    ),
    "text for offload": (["remat.offload=block_input"], r"takes list of text, as in \[block_input\]"),
    "a head that sees one token": (
        ["model.head.kind=sequence"],
        r"head.pooling=first with causal: true gives what the first token alone says.*set head.pooling: last",
    ),
    "masks that the model cannot look behind": (
        ["model.head.kind=masked_language_model"],
        r"a masked_language_model head with causal: true sees nothing after a masked token; set causal: false",
    ),
    "a ramp of no width": (
        ["model.rope_scaling={factor: 8, low_frequency_factor: 4}"],
        r"low_frequency_factor 4.0 is not between 0 and high_frequency_factor 4.0; Llama 3.1 has 1 and 4",
    ),
    "yarn without a base": (
        ["model.rope_scaling={kind: yarn, factor: 8, original_length: 64}", "model.rope_theta=1"],
        r"rope_theta 1.0 is not above 1, which yarn takes",
    ),
    "block of whatever": (["loss.block=3"], r"loss \(command line\): loss.block=3 has no effect with loss.logits=auto"),
}


@pytest.mark.parametrize("name", WHERE)
def test_told_with_where_it_was_set(name):
    overrides, said = WHERE[name]
    with pytest.raises(ConfigError, match=said):
        load_config("quickstart", overrides=overrides)


# id: (overrides, what is refused)
REFUSED = {
    "a task of other data": (["task=classification"], "set task=language_modeling"),
    "a model of other data": (["model.kind=mlp"], "use model.kind=transformer"),
    "fp8 over kernels in 4 bits": (
        ["precision.policy=fp8", "finetune.base=nf4", "finetune.lora.rank=2"],
        "finetune.base=nf4 stores them in 4 bits; use precision.policy=bf16, or leave finetune.base out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_train_bench_and_plan_refuse_and_config_remarks(cli, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # rows beside it train in runs/quickstart too
    overrides, said = REFUSED[name]
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
    assert "model.causal=false takes a task of your own (task.call, or Python)" in planned.err
    trained = cli("train", "quickstart", "model.causal=false")
    assert (trained.code, trained.err.count("\n")) == (2, 1)


def test_options_of_a_loss_that_is_not_there_are_refused():
    config = load_config("digits_mlp", overrides=["loss.z_loss=1e-4"]).config
    with pytest.raises(ConfigError, match=r"loss.z_loss=0.0001 is for task=language_modeling, but task=class"):
        check_kinds(config)
    check_kinds(config, own_task=True)  # which may read them


@pytest.mark.parametrize("words", [["data.tokenizer.path=x.json"], ["data.tokenizer={kind: byte, path: x.json}"]])
def test_a_tokenizer_that_is_not_read_is_refused(words):
    with pytest.raises(ConfigError, match=r"x\.json is not read with kind=b.*set kind=file, or leave the path out$"):
        load_config("quickstart", overrides=words)


def test_data_from_python_is_checked_by_what_it_gives():
    config = load_config({"task": "classification", "model": {"kind": "mlp"}}).config  # whose own data is text
    check_kinds(config, unit="examples")
    with pytest.raises(ConfigError, match=r"task=classification, but data\.kind=text gives tokens"):
        check_kinds(config, unit="tokens")
    with pytest.raises(ConfigError, match="task=language_modeling, but the data given gives examples"):
        check_kinds(load_config({}).config, unit="examples")
