"""The loader: which layer wins, where each key was set, every mistake as one line; secrets are not written down."""

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.secrets import REDACTED, redacted, redacted_words
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.terminal import print_remark


@pytest.mark.parametrize(
    ("overrides", "keywords", "steps", "origin"),
    [
        pytest.param([], {}, 1, "mine.yaml:3", id="file"),
        pytest.param(["train.steps=2"], {}, 2, "command line", id="command line over file"),
        pytest.param(["train.steps=2", "train.steps=3"], {}, 3, "command line", id="later over earlier"),
        pytest.param(["train.steps=2"], {"train.steps": 4}, 4, "keyword", id="keyword over command line"),
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


@pytest.mark.parametrize(
    ("override", "value"),
    [
        pytest.param("optimizer.learning_rate=1e-3", 1e-3, id="exponent without a point"),
        pytest.param("optimizer.clip_norm=null", None, id="null"),
        pytest.param("--train.steps=5", 5, id="leading dashes"),
        pytest.param("optimizer.freeze=[embedding, 'blocks/*']", ("embedding", "blocks/*"), id="list"),
        pytest.param("name=2024-01-01", "2024-01-01", id="date is text"),
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
        ["optimizer.b1 (mine.yaml:4) is replaced by optimizer.kind (command line)"],
    ),
    "keys after the new kind stay": (
        ["optimizer.kind=lion", "optimizer.b1=0.7"],
        {"optimizer.b1": 0.7, "optimizer.b2": 0.99},
        [],
    ),
    "a size drops what it sets": (
        ["model.size=gpt2"],
        {"model.num_layers": 12, "model.dropout": 0.5, "model.norm": "layernorm"},
        ["model.num_layers (mine.yaml:7) is replaced by model.size (command line)"],
    ),
    "keys after the size stay": (
        ["model.size=gpt2", "model.num_layers=3"],
        {"model.num_layers": 3, "model.embed_dim": 768},
        ["model.num_layers (mine.yaml:7) is replaced by model.size (command line)"],
    ),
}


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


# Override -> how the line begins.
WRONG_VALUES = {
    "train.stepz=1": "unknown key 'train.stepz' (command line); did you mean 'train.steps'?",
    "trian.steps=1": "unknown key 'trian.steps' (command line); did you mean 'train.steps'?",
    "mesh.data=2": "unknown key 'mesh.data' (command line); did you mean 'parallel.data'?",
    "lr=1": "unknown key 'lr' (command line); did you mean 'optimizer.learning_rate'?",
    "train.tensor=2": "unknown key 'train.tensor' (command line); did you mean 'parallel.tensor'?",
    "optimizer.momentum=1": "unknown key 'optimizer.momentum' (command line); optimizer.kind=adamw does not have it",
    "train.steps=-1": "train.steps is -1 (command line); it takes int, greater than 0",
    "optimizer.kind=adam": "optimizer.kind is 'adam' (command line), not one of sgd, adamw, muon",
    "model.size=gpt2_xxl": "model.size (command line): no published size 'gpt2_xxl'; the nearest are gpt2_xl, ",
    "remat.policy=names": "remat (command line): remat.policy=names needs remat.names, none",
    "loss.block=3": "loss (command line): loss.block=3 has no effect with loss.logits=auto",
    "train=5": "train is 5 (command line); it takes nested keys, such as train.steps",
    "data.kind=jsonl": "key 'data.path' is missing; data (command line) needs it",
    "data={kind: mixture, components: [{source: {kind: text}, wieght: 1}]}": "unknown key 'data.components.0.wieght'",
    "train.steps": "cannot read 'train.steps' (command line); write key=value, as in train.steps=100",
    "train.steps={": "cannot read the value '{' (command line, train.steps); quote it, as in 'key=\"text\"'",
    "train={steps: 1, steps: 2}": "command line, train:1: key 'steps' is given twice (first on line 1); keep one",
}


@pytest.mark.parametrize(("override", "message"), WRONG_VALUES.items(), ids=WRONG_VALUES)
def test_wrong_override(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# What stands after the equals sign, and the prompt that it is; None: refused, since nothing says what is meant.
PROMPTS = {
    "Part #3: the end": "Part #3: the end",
    "# a heading": "# a heading",
    "12 #": "12 #",
    "C# and a#b": "C# and a#b",
    "'it is #1'": "it is #1",
    '"a \\" #b"': 'a " #b',
    "'a' #b": None,
    "[a, b] # c": None,
    "[a #b]": None,
}


@pytest.mark.parametrize("text", PROMPTS)
def test_a_value_on_the_command_line_has_no_comment(text):
    overrides = [f"evaluation.sample_prompt={text}"]
    if PROMPTS[text] is None:
        with pytest.raises(ConfigError, match="cannot read the value"):
            load_config(overrides=overrides)
    else:
        assert load_config(overrides=overrides).config.evaluation.sample_prompt == PROMPTS[text]


def test_the_later_of_steps_and_epochs_counts(written):
    path = written("train: {steps: 50, global_batch_size: 8}\n")
    loaded = load_config(path, overrides=["train.epochs=2"])
    assert (loaded.config.train.epochs, loaded.config.train.steps) == (2, 1000)
    assert loaded.notes == ("train.steps (mine.yaml:1) is replaced by train.epochs (command line)",)
    again = load_config(path, overrides=["train.epochs=2"], keywords={"train.steps": 7}).config.train
    assert (again.epochs, again.steps) == (None, 7)
    assert load_config(path, overrides=["train.epochs=null"]).config.train.steps == 50
    for both in (
        dict(overrides=["train.steps=5", "train.epochs=2"]),
        dict(keywords={"train": {"steps": 5, "epochs": 2}}),
    ):
        with pytest.raises(
            ConfigError, match=r"^train \((command line|keyword)\): steps and epochs are both set; leave one"
        ):
            load_config(path, **both)


TOKEN = "hf_" + "a1B2" * 8
# id: (settings, what is written)
SETTINGS = {
    "key": ({"args": {"api_key": "abc"}}, {"args": {"api_key": REDACTED}}),
    "token": ({"token": "abc", "auth_token": "abc"}, {"token": REDACTED, "auth_token": REDACTED}),
    "address": ({"path": "s3://me:pw@host/a"}, {"path": f"s3://{REDACTED}@host/a"}),
    "user of an address": ({"path": "https://abc@host/a@b"}, {"path": f"https://{REDACTED}@host/a@b"}),
    "signed address": ({"url": "https://h/a?x=1&X-Amz-Signature=abc=="}, {"url": f"https://h/a?x={REDACTED}&X-Amz-Signature={REDACTED}"}),
    "query of one value": ({"url": "https://h/a?abc"}, {"url": f"https://h/a?{REDACTED}"}),
    "query without its host": ({"text": "url: /a?pwd=abc (404)"}, {"text": f"url: /a?pwd={REDACTED} (404)"}),
    "patterns": ({"path": ["s3://b/a-?.csv", "a-?/b=c&d=e"]}, {"path": ["s3://b/a-?.csv", "a-?/b=c&d=e"]}),
    "no address": ({"text": "a@b.c, R&D=5, why?"}, {"text": "a@b.c, R&D=5, why?"}),
    "token of a service": ({"names": [f"a {TOKEN}"]}, {"names": [f"a {REDACTED}"]}),
    "other names": ({"db": {"pwd": "abc"}, "private_key": "a b"}, {"db": {"pwd": REDACTED}, "private_key": REDACTED}),
    "header": ({"text": "authorization: Bearer abc.d"}, {"text": f"authorization: Bearer {REDACTED}"}),
    "special tokens": ({"token": "<pad>", "mask_token": "[MASK]"}, {"token": "<pad>", "mask_token": "[MASK]"}),
    "group": ({"credentials": {"user": "u", "pass": "p"}}, {"credentials": {"user": REDACTED, "pass": REDACTED}}),
}  # fmt: skip


def test_settings():
    for given, kept in SETTINGS.values():
        assert redacted(given) == kept


def test_command_line():
    words = ["jaxtrain", "train", "model.args.api_key=abc", "--token", "abc", "train.steps=5", "data.path=a://u:p@h/x"]
    kept = ["jaxtrain", "train", f"model.args.api_key={REDACTED}", "--token", REDACTED, "train.steps=5"]
    assert redacted_words(words) == [*kept, f"data.path=a://{REDACTED}@h/x"]
    assert redacted_words(["config", "https://h/a?pwd=abc", "--to=a://b@h/x"]) == [
        "config",
        f"https://h/a?pwd={REDACTED}",
        f"--to=a://{REDACTED}@h/x",
    ]
    groups = ["data.args={path: x, 'api_key': \"a b\", token: <pad>, password: 5 6}", "a.credentials={pass: x}"]
    shown = [f"data.args={{path: x, 'api_key': {REDACTED}, token: <pad>, password: {REDACTED}}}"]
    assert redacted_words(groups) == [*shown, f"a.credentials={REDACTED}"]


def test_a_secret_of_a_run_is_asked_for_again():
    saved = {"data": {"call": "a:b", "args": {"api_key": REDACTED}}}
    line = r"^data\.args\.api_key looked like a secret, so the run did not save it; give it again: data\.args"
    with pytest.raises(ConfigError, match=line):
        load_config(saved)
    assert load_config(saved, overrides=["data.args.api_key=x"]).config.data.args == {"api_key": "x"}


def test_remarks_show_no_password(capsys):
    print_remark(f"jaxtrain: rows raised ValueError: s3://me:pw@host/a, {TOKEN}")
    assert capsys.readouterr().err == f"jaxtrain: rows raised ValueError: s3://{REDACTED}@host/a, {REDACTED}\n"
