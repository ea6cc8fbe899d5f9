"""Config files that cannot be read as one, and names that lead to none: each mistake is one exact line."""

import pytest

from jaxtrain.config import load_config, shipped_configs
from jaxtrain.errors import ConfigError

WRONG_FILES = {
    "unknown key": ("train:\n  stepz: 1\n", "unknown key 'train.stepz' (mine.yaml:2); did you mean 'train.steps'?"),
    "wrong value": ("seed: 0\ntrain: {steps: a}\n", "train.steps is 'a' (mine.yaml:2); it takes int"),
    "unknown kind": (
        "model:\n  dropout: 0.1\n  kind: resnt\n",
        "model.kind is 'resnt' (mine.yaml:3), not one of transformer, encoder_decoder, vit, resnet, mlp, called; "
        "did you mean 'resnet'?",
    ),
    "sizes that do not fit": (
        "model:\n  embed_dim: 64\n  num_heads: 5\nseed: 1\n",
        "model (mine.yaml:3): embed_dim 64 is not a multiple of num_heads 5; set head_dim",
    ),
    "group left empty": (
        "train:\nseed: 1\n",
        "train is null (mine.yaml:1); it takes keys of its own, such as train.steps",
    ),
    "duplicate key": (
        "train:\n  steps: 1\n  steps: 2\n",
        "mine.yaml:3: key 'steps' is there twice (first on line 2); keep one",
    ),
    "duplicate in two spellings": (
        "train:\n  steps: 1\ntrain.steps: 2\n",
        "mine.yaml:3: key 'train.steps' is there twice (first on line 2); keep one",
    ),
    "syntax": ("train: [1, 2\n", "{path}:2: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    "tab": ("train:\n\tsteps: 1\n", "{path}:2: not valid YAML: found character '\\t' that cannot start any token"),
    "control character": (
        "name: \x00\n",
        "{path}: not valid YAML: unacceptable character #x0000: special characters are not allowed",
    ),
    "object of Python": (
        "name: !!python/object/apply:os.getcwd []\n",
        "{path}:1: not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.getcwd'",
    ),
    "tag that does not fit": ("seed: !!int x\n", "{path}: not valid YAML: a value does not fit its tag"),
    "list": ("- 1\n", "{path}: a config is a mapping of groups, this is a list"),
    "scalar": ("5\n", "{path}: a config is a mapping of groups, this is a int"),
    "not UTF-8": (b"name: \xff\n", "{path}: not UTF-8 text (byte 6)"),
}


@pytest.mark.parametrize(("content", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_wrong_file(written, content, message):
    path = written(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == message.replace("{path}", str(path))


@pytest.mark.parametrize("content", ["", "# only a comment\n", "train: {}\n"], ids=["empty", "comment", "empty group"])
def test_a_file_without_keys_gives_the_defaults(written, content):
    assert load_config(written(content)).config == load_config().config


def test_dotted_keys_in_a_file(written):
    loaded = load_config(written("train.steps: 5\ntrain.prefetch: 3\n"))
    assert (loaded.config.train.steps, loaded.config.train.prefetch) == (5, 3)
    assert loaded.origins["train.prefetch"] == "mine.yaml:2"


SHIPPED = ", ".join(shipped_configs())
MISSING = {
    "close to a shipped name": (
        "quickstrat",
        "no config 'quickstrat', neither a shipped name nor a file; did you mean 'quickstart'?",
    ),
    "like nothing": ("zzzzzzz", f"no config 'zzzzzzz', neither a shipped name nor a file; shipped: {SHIPPED}"),
    "path": ("no/zzzzzzz.yaml", f"no config 'no/zzzzzzz.yaml', neither a shipped name nor a file; shipped: {SHIPPED}"),
}


@pytest.mark.parametrize(("name", "message"), MISSING.values(), ids=MISSING)
def test_missing_config(name, message):
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    assert str(caught.value) == message


def test_folder_instead_of_a_config(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == (
        f"config {str(tmp_path)!r} is a folder without run.json; name a .yaml file, the directory of a run, or one of "
        f"{SHIPPED}"
    )
