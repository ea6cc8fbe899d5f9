"""The loader: which layer wins, where each key was set, and every mistake as one exact line."""

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.keys import walk
from jaxtrain.config.other_names import _OTHER_NAMES
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError


def test_every_other_name_leads_to_a_key_of_some_config():
    """A key that is renamed here and not in the table would be suggested and then be unknown."""
    known = {key.path for kind in ("adamw", "muon") for key in walk(Config, {"optimizer": {"kind": kind}})}
    meant = [meant.partition("=")[0] for meant in _OTHER_NAMES if " " not in meant]
    assert [key for key in meant if key not in known] == []
    names = [name for names in _OTHER_NAMES.values() for name in names]
    assert len(names) == len(set(names))
    assert [name for name in names if name in known] == []


@pytest.mark.parametrize(
    ("overrides", "keywords", "steps", "origin"),
    [
        pytest.param([], {}, 1, "mine.yaml:3", id="file"),
        pytest.param(["train.steps=2"], {}, 2, "command line", id="command line over file"),
        pytest.param(["train.steps=2", "train.steps=3"], {}, 3, "command line", id="later over earlier"),
        pytest.param(["train.steps=2"], {"train.steps": 4}, 4, "keyword", id="keyword over command line"),
        pytest.param([], {"train": {"steps": 5}}, 5, "keyword", id="nested keyword"),
        pytest.param(["train={steps: 6}"], {}, 6, "command line", id="group on the command line"),
    ],
)
def test_precedence(written, overrides, keywords, steps, origin):
    path = written("seed: 7\ntrain:\n  steps: 1\n  global_batch_size: 8\n")
    loaded = load_config(path, overrides=overrides, keywords=keywords)
    assert (loaded.config.train.steps, loaded.origins["train.steps"]) == (steps, origin)
    # What no later layer names stays as the file has it.
    assert (loaded.config.train.global_batch_size, loaded.origins["train.global_batch_size"]) == (8, "mine.yaml:4")
    assert (loaded.config.seed, loaded.origins["seed"]) == (7, "mine.yaml:1")
    assert "checkpoint.every" not in loaded.origins


def test_name_is_the_key_else_the_file(written):
    assert load_config(written("seed: 1\n", "first.yaml")).name == "first"
    assert load_config(written("name: second\n", "first.yaml")).name == "second"
    assert load_config().name == "run"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        pytest.param("optimizer.learning_rate=1e-3", 1e-3, id="exponent without a point"),
        pytest.param("optimizer.learning_rate=1", 1.0, id="int for a number"),
        pytest.param("optimizer.learning_rate=.5", 0.5, id="leading point"),
        pytest.param("optimizer.clip_norm=null", None, id="null"),
        pytest.param("--train.steps=5", 5, id="leading dashes"),
        pytest.param("train.steps=1_000", 1000, id="digits in groups"),
        pytest.param("optimizer.freeze=[embedding, 'blocks/*']", ("embedding", "blocks/*"), id="list"),
        pytest.param("data.path=a=b", "a=b", id="equals sign in the value"),
        pytest.param("name=2024-01-01", "2024-01-01", id="date is text"),
        pytest.param("name=010", "010", id="no octal"),
        pytest.param("name=12:30", "12:30", id="no sexagesimal"),
    ],
)
def test_values(override, value):
    loaded = load_config(overrides=[override])
    found = loaded.config
    for part in override.removeprefix("--").partition("=")[0].split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


# overrides, keywords, kept (key -> value), notes
SWITCHES = {
    "another kind drops what it does not have": (
        ["optimizer.kind=sgd"],
        {"optimizer.learning_rate": 0.5},
        ["optimizer.b1 (mine.yaml:4) gave way to optimizer.kind (command line)"],
    ),
    "the same kind drops nothing": (["optimizer.kind=adamw"], {"optimizer.b1": 0.8}, []),
    "keys after the new kind stay": (
        ["optimizer.kind=lion", "optimizer.b1=0.7"],
        {"optimizer.b1": 0.7, "optimizer.b2": 0.99},
        [],
    ),
    "a size drops what it sets": (
        ["model.size=gpt2"],
        {"model.num_layers": 12, "model.dropout": 0.5, "model.norm": "layernorm"},
        ["model.num_layers (mine.yaml:7) gave way to model.size (command line)"],
    ),
    "keys after the size stay": (
        ["model.size=gpt2", "model.num_layers=3"],
        {"model.num_layers": 3, "model.embed_dim": 768},
        ["model.num_layers (mine.yaml:7) gave way to model.size (command line)"],
    ),
    "another kind of model": (
        ["model.kind=mlp"],
        {"model.dropout": 0.5},
        ["model.num_layers (mine.yaml:7) gave way to model.kind (command line)"],
    ),
}


def test_another_kind_drops_a_word_that_it_does_not_know():
    loaded = load_config(
        "quickstart", overrides=["data.kind=labelled_text", "data.path=reviews.csv", "task=classification"]
    )
    assert loaded.config.data.builtin is None
    assert any(note.startswith("data.builtin") and "gave way to data.kind" in note for note in loaded.notes)


def test_a_wrong_word_beside_another_kind_is_refused_in_either_order():
    words = ["data.builtin=python_docstring", "data.kind=text_pairs"]
    for overrides in (words, words[::-1]):
        with pytest.raises(ConfigError, match="python_docstrings"):
            load_config("quickstart", overrides=overrides)


def lookup(config, path):
    for part in path.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(("overrides", "kept", "notes"), SWITCHES.values(), ids=SWITCHES)
def test_a_new_kind_or_size_replaces_older_keys(written, overrides, kept, notes):
    path = written("""optimizer:
  kind: adamw
  learning_rate: 0.5
  b1: 0.8
model:
  dropout: 0.5
  num_layers: 2
""")
    loaded = load_config(path, overrides=overrides)
    assert {key: lookup(loaded.config, key) for key in kept} == kept
    assert list(loaded.notes) == notes
    gone = {note.partition(" ")[0] for note in notes} - set(kept)
    assert not gone & set(loaded.origins)


def test_a_size_fills_only_unset_keys(written):
    loaded = load_config(written("model:\n  num_layers: 3\n  size: gpt2\n"))
    assert (loaded.config.model.num_layers, loaded.config.model.embed_dim) == (3, 768)
    assert loaded.origins["model.num_layers"] == "mine.yaml:2"
    assert loaded.origins["model.embed_dim"] == "size gpt2"
    assert loaded.notes == ()


def test_a_scalar_over_a_group_forgets_where_its_keys_were_set(written):
    path = written("model:\n  rope_scaling:\n    factor: 8.0\n")
    loaded = load_config(path, overrides=["model.rope_scaling=null"])
    assert loaded.config.model.rope_scaling is None
    assert {key: where for key, where in loaded.origins.items() if "rope" in key} == {
        "model.rope_scaling": "command line"
    }


GPT_SIZES = "gpt2_xl, gpt2_large, gpt2, gpt2_medium, gpt_neox_20b, gpt3_13b, and 72 others"
MIXTURE = "data={kind: mixture, components: [%s]}"

# Overrides and the whole message.
WRONG_VALUES = {
    "unknown key": (
        "nonsense=1",
        "unknown key 'nonsense' (command line); 'jaxtrain config NAME' lists the keys",
    ),
    "misspelt key": ("train.stepz=1", "unknown key 'train.stepz' (command line); did you mean 'train.steps'?"),
    "misspelt group": ("trian.steps=1", "unknown key 'trian' (command line); did you mean 'train'?"),
    **{
        wrong: (f"{wrong}=1", f"unknown key '{wrong}' (command line); did you mean '{right}'?")
        for wrong, right in {
            "lr": "optimizer.learning_rate",
            "optimizer.lr": "optimizer.learning_rate",
            "learning_rate": "optimizer.learning_rate",
            "batch_size": "train.global_batch_size",
            "train.batch-size": "train.global_batch_size",
            "max_steps": "train.steps",
            "num_steps": "train.steps",
            "gradient_accumulation_steps": "train.accumulation_steps",
            "warmup_steps": "optimizer.schedule.warmup_steps",
            "optimizer.warmup_steps": "optimizer.schedule.warmup_steps",
            "weight_decay": "optimizer.weight_decay",
            "max_grad_norm": "optimizer.clip_norm",
            "max_length": "model.max_sequence_length",
            "seq_len": "data.sequence_length",
            "num_workers": "train.workers",
            "model.hidden_size": "model.embed_dim",
            "mixed_precision": "precision.policy",
            "save_steps": "checkpoint.every",
            "tp": "parallel.tensor",
        }.items()
    },
    **{
        wrong: (f"{wrong}=1", f"unknown key '{wrong}' (command line); {hint}")
        for wrong, hint in {
            "fp16": "set precision.policy=fp16",
            "bf16": "set precision.policy=bf16",
            "precision.bf16": "set precision.policy=bf16",
            "gradient_checkpointing": "set remat.policy=full",
            "model.gradient_checkpointing": "set remat.policy=full",
            "epochs": "a run counts steps: set train.steps to epochs x training rows / train.global_batch_size",
            "train.num_epochs": "a run counts steps: set train.steps to epochs x training rows / "
            "train.global_batch_size",
            "output_dir": "the directory of a run is an option: --run-dir DIR (run_dir= in Python)",
        }.items()
    },
    "bare leaf": ("steps=1", "unknown key 'steps' (command line); did you mean 'train.steps'?"),
    "leaf of another group": (
        "train.tensor=2",
        "unknown key 'train.tensor' (command line); did you mean 'parallel.tensor'?",
    ),
    "key of another kind": (
        "optimizer.momentum=0.9",
        "unknown key 'optimizer.momentum' (command line); optimizer.kind=adamw does not have it, "
        "optimizer.kind=sgd does",
    ),
    "key below a value": ("train.steps.more=1", "train.steps is {'more': 1} (command line); it takes int"),
    "wrong type": ("train.steps=many", "train.steps is 'many' (command line); it takes int"),
    "fraction for int": ("train.steps=1.5", "train.steps is 1.5 (command line); it takes int"),
    "bool for int": ("train.steps=true", "train.steps is true (command line); it takes int"),
    "null for int": ("train.steps=", "train.steps is null (command line); it takes int"),
    "int for bool": ("logging.tensorboard=1", "logging.tensorboard is 1 (command line); it takes true | false"),
    "int for text": ("name=5", "name is 5 (command line); it takes text | null"),
    "name of a tag": (
        'logging.tags={"a: b": x}',
        "a name in logging.tags is 'a: b' (command line); a name there is 1 to 60 letters, digits, '_' and '-'",
    ),
    "number for a tag": (
        "logging.tags.run=3",
        "logging.tags.run is 3 (command line); it takes text: quote it, as in logging.tags.run='\"3\"'",
    ),
    "point in the name of a tag": (
        "logging.tags.a.b=c",
        "logging.tags.a is {'b': 'c'} (command line); it takes text; a point in a name is read as a group, write '_'",
    ),
    "list for a tag": ("logging.tags.a=[1]", "logging.tags.a is [1] (command line); it takes text"),
    "long tag": (
        f"logging.tags.a={'b' * 501}",
        f"logging.tags.a is '{'b' * 199}... (command line); it takes text of at most 500 characters",
    ),
    "number for tags": ("logging.tags=3", "logging.tags is 3 (command line); it takes map of text"),
    "text for list": ("optimizer.freeze=a", "optimizer.freeze is 'a' (command line); it takes list of text, as in [a]"),
    "octal-looking": ("train.steps=010", "train.steps is '010' (command line); it takes int"),
    "negative": ("train.steps=-1", "train.steps is -1 (command line); it takes int, greater than 0"),
    "negative seed": ("seed=-1", "seed is -1 (command line); it takes int, greater than or equal to 0"),
    "too large": ("model.dropout=1", "model.dropout is 1 (command line); it takes number, less than 1"),
    "nan": (
        "optimizer.learning_rate=.nan",
        "optimizer.learning_rate is nan (command line); it takes number, a finite number",
    ),
    "infinity": (
        "optimizer.learning_rate=.inf",
        "optimizer.learning_rate is inf (command line); it takes number, a finite number",
    ),
    "degree zero": ("parallel.data=0", "parallel.data is 0 (command line); it takes int | auto, greater than 0"),
    "degree word": ("parallel.fsdp=all", "parallel.fsdp is 'all' (command line); it takes int | auto"),
    "unknown kind": (
        "optimizer.kind=adam",
        "optimizer.kind is 'adam' (command line), not one of sgd, adamw, muon, lion, adafactor, called; did you mean "
        "'adamw'?",
    ),
    "kind of a wrong type": (
        "optimizer.kind=[1]",
        "optimizer.kind is [1] (command line), not one of sgd, adamw, muon, lion, adafactor, called",
    ),
    "unknown choice": (
        "task=translation",
        "task is 'translation' (command line), not one of language_modeling, masked_language_modeling, "
        "sequence_to_sequence, classification, token_classification, regression, dpo, reward",
    ),
    "choice in a nested group": (
        "optimizer.schedule.kind=cosin",
        "optimizer.schedule.kind is 'cosin' (command line), not one of constant, linear, cosine, wsd, inverse_sqrt; "
        "did you mean 'cosine'?",
    ),
    "unknown size": (
        "model.size=gpt2_xxl",
        f"model.size is 'gpt2_xxl' (command line), not one of {GPT_SIZES}; did you mean 'gpt2_xl'?",
    ),
    "size of a wrong type": ("model.size=[1]", "model.size is [1] (command line); it takes text | null"),
    "heads that do not divide": (
        "model.num_heads=5",
        "model (command line): embed_dim 384 is not a multiple of num_heads 5; set head_dim",
    ),
    "group given a scalar": ("train=5", "train is 5 (command line); it takes keys of its own, such as train.steps"),
    "group given null": ("train=", "train is null (command line); it takes keys of its own, such as train.steps"),
    "union given a scalar": (
        "model=transformer",
        "model is 'transformer' (command line); it takes keys of its own, such as model.kind",
    ),
    "nested group given a scalar": (
        "data.tokenizer=byte",
        "data.tokenizer is 'byte' (command line); it takes keys of its own, such as data.tokenizer.kind",
    ),
    "missing required key": ("data.kind=jsonl", "key 'data.path' is missing; data (command line) needs it"),
    "required key misspelt": (
        "model.rope_scaling.factr=8",
        "unknown key 'model.rope_scaling.factr' (command line); did you mean 'model.rope_scaling.factor'? (and 1 more)",
    ),
    "missing in an empty group": (
        "model.rope_scaling={}",
        "key 'model.rope_scaling.factor' is missing; model.rope_scaling (command line) needs it",
    ),
    "value in a list": (
        MIXTURE % "{source: {kind: text}, weight: 0}",
        "data.components.0.weight is 0 (command line); it takes number, greater than 0",
    ),
    "key in a list": (
        MIXTURE % "{source: {kind: text}, wieght: 1}",
        "unknown key 'data.components.0.wieght' (command line); did you mean 'data.components.0.weight'?",
    ),
    "kind missing in a list": (
        MIXTURE % "{source: {path: a}}",
        "key 'data.components.0.source.kind' is missing; data.components.0.source (command line) needs it",
    ),
    "empty list": (
        MIXTURE % "",
        "data.components is [] (command line); it takes list of Component, at least 1 of them",
    ),
    "two mistakes": ("train={steps: a, prefetch: b}", "train.steps is 'a' (command line); it takes int (and 1 more)"),
    "no equals sign": (
        "train.steps",
        "cannot read 'train.steps' (command line); write key=value, as in train.steps=100",
    ),
    "no key": ("=5", "cannot read '=5' (command line); write key=value, as in train.steps=100"),
    "empty part": (
        "train..steps=5",
        "cannot read 'train..steps=5' (command line); write key=value, as in train.steps=100",
    ),
    "open bracket": (
        "train.steps={",
        "cannot read the value '{' (command line, train.steps); quote it, as in 'key=\"text\"'",
    ),
    "tag that does not fit": (
        "train.steps=!!int x",
        "cannot read the value '!!int x' (command line, train.steps); quote it, as in 'key=\"text\"'",
    ),
    "duplicate on the command line": (
        "train={steps: 1, steps: 2}",
        "command line, train:1: key 'steps' is there twice (first on line 1); keep one",
    ),
}


@pytest.mark.parametrize(("override", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_wrong_override(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override])
    assert str(caught.value) == message


# Content and the whole message; {path} is the file.
