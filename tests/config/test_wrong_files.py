"""Config files that cannot be read, JSON made to exhaust memory, names and paths that lead to no folder: one line."""

import os
import re
from pathlib import Path

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.local_path import local_path
from jaxtrain.errors import ConfigError, UserError
from jaxtrain.published.json_text import parse_json
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
    "not UTF-8": (b"name: \xff\n", "{path}: not UTF-8 text (byte 6)"),
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


def test_missing_config():
    with pytest.raises(ConfigError, match=r"^no config 'quickstrat', .* did you mean 'quickstart'\?$"):
        load_config("quickstrat")


def test_a_gigabyte_and_a_pipe(tmp_path):
    large, pipe = tmp_path / "large.yaml", tmp_path / "pipe.yaml"
    with large.open("wb") as file:
        file.truncate(1 << 30)
    os.mkfifo(pipe)  # nobody writes into it: a reader would wait for ever
    for path, line in ((large, "has more than 256 KiB"), (pipe, "is a pipe or a device")):
        with pytest.raises(ConfigError, match=line):
            load_config(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 2}', "key 'a' is there twice"),
        ('{"a": NaN}', "it holds NaN, which JSON does not have"),
        ("[" * 65 + "]" * 65, "it is nested more than 64 deep"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "it is nested more than 64 deep"),
        ("9" * 5000, "digits"),
    ],
    ids=["twice", "NaN", "65 deep", "5,000 objects", "a huge number"],
)
def test_json_of_others(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
    assert parse_json('{"a": [[{"b": 1e3}]]}') == {"a": [[{"b": 1000.0}]]}


# A name, and what is wrong with it.
NAMES = {
    "a/../../x": "leads out of its folder below runs/",
    "/tmp/x": "is a path of its own",
    "a//b": "is empty, or has an empty part",
    "a ": "begins or ends with a space",
    "\x1b[31mred": "holds characters that are not shown",
    "a\\b": "holds a backslash",
    "é" * 101: "has more than 200 bytes",
}


@pytest.mark.parametrize(("name", "reason"), NAMES.items(), ids=NAMES.values())
def test_a_name_that_is_no_folder_below_runs(name, reason):
    with pytest.raises(ConfigError) as caught:
        load_config(keywords={"name": name})
    assert str(caught.value).startswith("name (keyword): ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
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
        ("a\0b", "run directory 'a\\x00b' holds a NUL character"),
        ("b" * 300, f"run directory {'b' * 60!r} has 300 characters"),
        ("gs://b/run", "run directory gs://b/run is not a path on this machine"),
        ("file:///tmp/a", "run directory file:///tmp/a is an address; write it as a path: /tmp/a"),
    ],
    ids=["empty", "NUL", "long name", "an address", "an address of a file"],
)
def test_a_path_that_no_file_can_have(path, line):
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        local_path(path, what="run directory")
    assert local_path("a/b:/c", what="run directory") == Path("a/b:/c")


# Words -> exit code, what the address is.
COMMANDS = {
    "train quickstart --run-dir gs://b/run": (2, "run directory gs://b/run"),
    "train s3://b/a.yaml": (2, "config s3://b/a.yaml"),
    "train tabular_mlp data.path=ftp://b/t.csv --run-dir run": (3, "data.path ftp://b/t.csv"),
    "ckpt ls gs://b/run": (2, "run directory gs://b/run"),
    "data prepare quickstart -o gs://b/t": (2, "--output gs://b/t"),
}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_refuses_an_address_and_leaves_nothing(cli, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    code, address = COMMANDS[words]
    answer = cli(*words.split())
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.splitlines()[-1].startswith(f"jaxtrain: {address} is not a path on this machine; use a local")
    assert [path for path in tmp_path.iterdir() if path.name != "run"] == []
