"""Config files that cannot be read, names and paths that lead to no folder: one line."""

import re

import pytest

from jaxtrain.cli import main
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
    "an anchor in itself": ("model:\n  x: &x [1, *x]\n", "mine.yaml: holds more than 100,000 values"),
    "aliases of aliases": (
        "a: &a0 {x: 1, y: 2}\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 9}]\n" for n in range(1, 12)),
        "mine.yaml: holds more than 100,000 values",
    ),
    "deep": (f"train: {'{a: ' * 2000}{'}' * 2000}", "{path}: not valid YAML: maximum recursion depth"),
    "NUL": ("name: \0", "{path}: not valid YAML: unacceptable character"),
    "a value for a group": ("finetune: {lora: 8}", "finetune.lora is 8 (mine.yaml:1); it takes nested keys"),
    "a list for a word": ("model:\n  size: {a: [1]}\n", "model.size is {'a': [1]} (mine.yaml:2); it takes text"),
    "true for a number": (
        "model: {rope_layers: [1, true]}",
        "model.rope_layers is 'true' (mine.yaml:1), not one of 0, 1",
    ),
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


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b"], ids=["long", "deep", "NUL"])
@pytest.mark.parametrize("command", ["config", "report", "serve", "train"])
def test_what_no_path_can_be_is_one_line(command, name, capsys):
    assert main([command, name]) == 2
    assert re.fullmatch(r"jaxtrain: .*(too long for a path|holds a NUL).*\n", capsys.readouterr().err)


def test_a_record_of_a_run_that_is_nested_deeply_is_one_line(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"config": ' + '{"a":' * 10**5 + "1" + "}" * 10**5 + "}")
    for command in ("config", "train", "serve", "report"):
        assert main([command, str(tmp_path)]) == 2
        assert "run.json holds no config" in capsys.readouterr().err


def test_a_key_that_is_nested_deeply_is_one_line(capsys):
    assert main(["config", "quickstart", f"model.{'a.' * 3000}b=1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


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
