"""What of a config does not belong together, told before any data is read; keys that do nothing are told too."""

import json

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


_PROMPT = ("evaluation.sample_prompt",)
# id: (overrides, the keys that are told)
IDLE = {
    "names under dots": (["remat.names=[query]"], ["remat.names"]),
    "a schedule without a pipeline": (["parallel.schedule=gpipe"], ["parallel.schedule"]),
    "a pipeline": (["parallel.schedule=gpipe", "parallel.pipe=2"], []),
    "a loss scale of fp32": (["precision.loss_scale.initial=4"], ["precision.loss_scale.initial"]),
    "a loss scale of fp16": (["precision.loss_scale.initial=4", "precision.policy=fp16"], []),
    "an end of what has none": (
        ["optimizer.schedule.kind=constant", "optimizer.schedule.final_fraction=0.5"],
        ["optimizer.schedule.final_fraction"],
    ),
    "rotation of learned positions": (
        ["model.position=learned", "model.rope_theta=500000", "model.rope_scaling.factor=2"],
        ["model.rope_theta", "model.rope_scaling.factor"],
    ),
    "buckets of rotary positions": (
        ["model.relative_buckets=16", "model.position_offset=2"],
        [
            "model.relative_buckets",
            "model.position_offset",
        ],
    ),
    "logits of what has none": (
        [
            "model.head={kind: sequence, num_labels: 2, pooling: last}",
            *("model.tie_embeddings=true", "model.logits_scale=2", "model.logits_softcap=30"),
        ],
        ["model.tie_embeddings", "model.logits_scale", "model.logits_softcap"],
    ),
    "a window over everything": (["model.sliding_window=4096"], ["model.sliding_window"]),
    "a local window over everything": (
        ["model.local_layers.pattern=[1,0]", "model.local_layers.window=4096"],
        ["model.local_layers.window"],
    ),
    "what the position reads": (["model.position=relative", "model.relative_buckets=16"], []),
    "a profile after the last step": (
        ["train.steps=20", "profile={start_step: 20, num_steps: 2}"],
        ["profile.start_step", "profile.num_steps"],
    ),
    "a profile of the last step": (["train.steps=20", "profile.start_step=19"], []),
    "a whole group": (
        ["optimizer.schedule={kind: inverse_sqrt, warmup_steps: 2, decay_steps: 3, final_fraction: 0}"],
        ["optimizer.schedule.decay_steps", "optimizer.schedule.final_fraction"],
    ),
    "an end": (["optimizer.schedule.final_fraction=0.5"], []),
    "chunks without a pipeline": (["parallel.chunks=4"], ["parallel.chunks"]),
    "scales of what is no nf4": (["finetune.double_quantization=false"], ["finetune.double_quantization"]),
    "scales of nf4": (
        ["finetune={double_quantization: false, base: nf4, lora: {rank: 2}}"],
        [],
    ),
    "pictures of tokens": (
        ["data={kind: synthetic, num_classes: 5, image_size: 8, num_columns: 3, num_channels: 1, vocab_size: 300}"],
        ["data.num_classes", "data.image_size", "data.num_columns", "data.num_channels"],
    ),
    "columns of images": (
        ["data={kind: synthetic, task: images, num_classes: 5, image_size: 8, num_columns: 3, vocab_size: 300}"],
        ["data.num_columns", "data.vocab_size"],
    ),
    "a sample without a tokenizer": (["data={kind: synthetic}", "evaluation.sample_prompt=hello"], [*_PROMPT]),
    "a sample of classes": (
        ["model.kind=mlp", "data={kind: digits}", "task=classification", "evaluation.sample_prompt=hello"],
        [*_PROMPT],
    ),
    "a shipped prompt beside other data": (["data={kind: synthetic}"], []),
    "limits of no watchdog": (["watchdog={enabled: false, step_seconds: 5}"], ["watchdog.step_seconds"]),
    "limits of a watchdog": (["watchdog={step_seconds: 5}"], []),
    "no watchdog with its defaults": (["watchdog={enabled: false, step_seconds: 300}"], []),
    "a roll back that is a skip": (
        ["spikes={action: skip, roll_back_steps: 5, skip_batches: 2, max_roll_backs: 1}"],
        ["spikes.roll_back_steps", "spikes.skip_batches", "spikes.max_roll_backs"],
    ),
    "a roll back": (["spikes={action: roll_back, roll_back_steps: 5}", "checkpoint.every=5"], []),
    "no checks": (["checks={}"], ["checks"]),
    "checks": (["checks={replay_every: 5}"], []),
    "two texts": (["data.path=x.txt", "data.builtin=python_source"], ["data.builtin"]),
    "a vocabulary of bytes": (
        ["data.tokenizer.kind=byte", "data.tokenizer.vocab_size=300"],
        ["data.tokenizer.vocab_size"],
    ),
    "bytes in place of the shipped vocabulary": (["data.tokenizer.kind=byte"], []),
    "at its default": (["parallel.schedule=1f1b", "profile.num_steps=3"], []),
}


@pytest.mark.parametrize("name", IDLE)
def test_keys_without_effect_are_told(name):
    overrides, keys = IDLE[name]
    notes = [note for note in load_config("quickstart", overrides=overrides).notes if "gave way" not in note]
    assert [note.partition(" (command line) has no effect: ")[0] for note in notes] == keys


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param("quickstart", [], id="quickstart"),
        pytest.param(None, ["data={kind: synthetic, task: images}"], id="synthetic"),
        pytest.param(None, ["watchdog={enabled: false}", "spikes={}", "checks={replay_every: 2}"], id="groups"),
    ],
)
def test_a_whole_config_tells_nothing_of_its_defaults(name, overrides):
    whole = load_config(name, overrides=overrides).config.model_dump(mode="json")
    assert load_config(whole).notes == ()


# id: (the file or a mapping, overrides): the path came to a kind that was there before
PATHS = {
    "no kind": ("", ["data.tokenizer.path=x.json"]),
    "the kind of the file": ("data: {tokenizer: {kind: bpe}}", ["data.tokenizer.path=x.json"]),
    "the kind of a mapping": ({"data": {"tokenizer": {"kind": "bpe"}}}, ["data.tokenizer.path=x.json"]),
    "a group without a kind": ("", ["data.tokenizer={path: x.json}"]),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_tokenizer_that_is_not_read_is_refused(written, name):
    given, overrides = PATHS[name]
    with pytest.raises(ConfigError, match=r"set data\.tokenizer\.kind=file, or leave the path out$") as caught:
        load_config(written(given) if isinstance(given, str) else given, overrides=overrides)
    assert "data.tokenizer.path=x.json (command line) is not read, since data.tokenizer.kind is b" in str(caught.value)
    assert "\n" not in str(caught.value)


_FILE = {"data": {"tokenizer": {"kind": "file", "path": "x.json"}}}
# id: (the file or a mapping, overrides, where the path is set that the note tells; None: no note)
CHOSEN = {
    "both in the file": ("data: {tokenizer: {kind: bpe, path: x.json}}", [], "mine.yaml:1"),
    "both on the command line": ("", ["data.tokenizer={kind: byte, path: x.json}"], "command line"),
    "as a sweep writes it": ("", ["data.tokenizer.path=x.json", "data.tokenizer.kind=byte"], "command line"),
    "beside the kind of the file": (
        "data: {tokenizer: {kind: bpe}}",
        ["data.tokenizer.kind=byte", "data.tokenizer.path=x.json"],
        "command line",
    ),
    "both in a mapping": ({"data": {"tokenizer": {"kind": "byte", "path": "x.json"}}}, [], "keyword"),
    "a kind of its own": ("data: {tokenizer: {kind: file, path: x.json}}", ["data.tokenizer.kind=byte"], None),
    "a kind of its own over a mapping": (_FILE, ["data.tokenizer.kind=byte"], "keyword"),
    "what reads it": ("", ["data.tokenizer={kind: file, path: x.json}"], None),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_tokenizer_beside_a_kind_that_was_chosen_is_told(written, name):
    given, overrides, where = CHOSEN[name]
    notes = load_config(written(given) if isinstance(given, str) else given, overrides=overrides).notes
    told = [note for note in notes if note.startswith("data.tokenizer.path")]
    assert [note.partition(" has no effect: ")[0] for note in told] == (
        [] if where is None else [f"data.tokenizer.path ({where})"]
    )


def test_a_run_with_a_tokenizer_that_was_not_read_still_loads(tmp_path):
    config = load_config("quickstart").config.model_dump(mode="json")
    config["data"]["tokenizer"] |= {"kind": "byte", "path": "x.json"}
    (tmp_path / "run.json").write_text(json.dumps({"name": "old", "config": config}))
    loaded = load_config(tmp_path)
    assert loaded.config.model_dump()["data"]["tokenizer"]["path"] == "x.json"
    assert any(note.startswith("data.tokenizer.path (") and note.endswith("file does") for note in loaded.notes)


def test_remat_of_a_model_without_blocks_is_told():
    assert load_config("digits_mlp", overrides=["remat.policy=full"]).notes == (
        "remat.policy (command line) has no effect: model.kind=mlp has no blocks, its activations are all kept",
    )
    assert load_config("digits_mlp").notes == ()


def test_data_from_python_is_checked_by_what_it_gives():
    config = load_config({"task": "classification", "model": {"kind": "mlp"}}).config  # whose own data is text
    check_kinds(config, unit="examples")
    with pytest.raises(ConfigError, match=r"task=classification, but data\.kind=text gives tokens"):
        check_kinds(config, unit="tokens")
    with pytest.raises(ConfigError, match="task=language_modeling, but the data given gives examples"):
        check_kinds(load_config({}).config, unit="examples")
