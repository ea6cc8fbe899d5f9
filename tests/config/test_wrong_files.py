"""Config files that cannot be read, names and paths that lead to no folder: one line."""

import pytest

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.run.directory import run_folder

WRONG_FILES = {
    "wrong value": ("seed: 0\ntrain: {steps: a}\n", "train.steps is 'a' (mine.yaml:2); it takes int"),
    "group left empty": (
        "train:\nseed: 1\n",
        "train is null (mine.yaml:1); it takes nested keys, such as train.steps",
    ),
    "duplicate in two spellings": (
        "train:\n  steps: 1\ntrain.steps: 2\n",
        "mine.yaml:3: key 'train.steps' is given twice (first on line 2); keep one",
    ),
    "tab": ("train:\n\tsteps: 1\n", "{path}:2: not valid YAML: found character '\\t' that cannot start any token"),
    "object of Python": (
        "name: !!python/object/apply:os.getcwd []\n",
        "{path}:1: not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.getcwd'",
    ),
}


@pytest.mark.parametrize(("content", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_wrong_file(written, content, message):
    path = written(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(message.replace("{path}", str(path)))


@pytest.mark.parametrize("content", ["", "# only a comment\n", "train: {}\n"], ids=["empty", "comment", "empty group"])
def test_a_file_without_keys_gives_the_defaults(written, content):
    assert load_config(written(content)).config == load_config().config


def test_missing_config(tmp_path):
    with pytest.raises(ConfigError, match=r"^no config 'quickstrat': .* did you mean 'quickstart'\?$"):
        load_config("quickstrat")
    with pytest.raises(ConfigError, match="it is not a shipped name, a file or a run"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["a/../../x", "/tmp/x", "a//b", "\x1b[31mred", "a\\b"])
def test_a_name_that_is_no_folder_below_runs(name):
    with pytest.raises(ConfigError, match=r"^name \(keyword\): .* is not a folder below runs/; use letters"):
        load_config(keywords={"name": name})
    # What a config file or run.json is called gets there without the key.
    with pytest.raises(ConfigError):
        run_folder(None, name)
