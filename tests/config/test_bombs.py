"""A file that is no config, and JSON of others that was made to exhaust time or memory, are refused in one line."""

import os

import pytest

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.published.json_text import parse_json


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
        ("[Infinity]", "it holds Infinity, which JSON does not have"),
        ("[" * 65 + "]" * 65, "it is nested more than 64 deep"),
        ("[" * 100_000, "it is nested more than 64 deep"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "it is nested more than 64 deep"),
    ],
    ids=["twice", "NaN", "infinity", "65 deep", "100,000 deep", "objects"],
)
def test_json_of_others(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
    assert parse_json('{"a": [[{"b": 1e3}]]}') == {"a": [[{"b": 1000.0}]]}


def test_a_huge_number_in_json():
    with pytest.raises(ValueError, match="digits"):
        parse_json("9" * 5000)
