"""Config files that cannot be read, names and paths that lead to no folder: one line."""

import re
from pathlib import Path

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.arguments import local_path
from jaxtrain.errors import ConfigError, UserError
from jaxtrain.run.directory import run_folder

WRONG_FILES = {
    "unknown key": ("train:\n  stepz: 1\n", "unknown key 'train.stepz' (mine.yaml:2); did you mean 'train.steps'?"),
    "wrong value": ("seed: 0\ntrain: {steps: a}\n", "train.steps is 'a' (mine.yaml:2); it takes int"),
    "group left empty": (
        "train:\nseed: 1\n",
        "train is null (mine.yaml:1); it takes keys of its own, such as train.steps",
    ),
    "duplicate in two spellings": (
        "train:\n  steps: 1\ntrain.steps: 2\n",
        "mine.yaml:3: key 'train.steps' is there twice (first on line 2); keep one",
    ),
    "tab": ("train:\n\tsteps: 1\n", "{path}:2: not valid YAML: found character '\\t' that cannot start any token"),
    "object of Python": (
        "name: !!python/object/apply:os.getcwd []\n",
        "{path}:1: not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.getcwd'",
    ),
    "list": ("- 1\n", "{path}: a config is a mapping of groups, this is a list"),
    "not UTF-8": (b"name: \xff\n", "{path}: not valid YAML: 'utf-8' codec can't decode byte 0xff in position 6"),
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


def test_dotted_keys_in_a_file(written):
    loaded = load_config(written("train.steps: 5\ntrain.prefetch: 3\n"))
    assert (loaded.config.train.steps, loaded.config.train.prefetch) == (5, 3)
    assert loaded.origins["train.prefetch"] == "mine.yaml:2"


def test_missing_config(tmp_path):
    with pytest.raises(ConfigError, match=r"^no config 'quickstrat', .* did you mean 'quickstart'\?$"):
        load_config("quickstrat")
    with pytest.raises(ConfigError, match="neither a shipped name nor a file nor a run"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["a/../../x", "/tmp/x", "a//b", "\x1b[31mred", "a\\b"])
def test_a_name_that_is_no_folder_below_runs(name):
    with pytest.raises(ConfigError, match=r"^name \(keyword\): .* is no folder below runs/; use letters"):
        load_config(keywords={"name": name})
    # What a config file or run.json is called gets there without the key.
    with pytest.raises(ConfigError):
        run_folder(None, name)


@pytest.mark.parametrize("name", ["a.b-c_d", "sweep/lr_0.1", "größe 2", ".hidden"])
def test_a_name_is_a_folder_below_runs(name):
    assert load_config(keywords={"name": name}).config.name == name
    assert run_folder(None, name) == Path("runs") / name


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("", "run directory '' is empty"),
        ("gs://b/run", "run directory gs://b/run is not a path on this machine"),
    ],
)
def test_a_path_that_no_file_can_have(path, line):
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        local_path(path, what="run directory")
    assert local_path("a/b:/c", what="run directory") == Path("a/b:/c")
