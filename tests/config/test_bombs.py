"""Configs and JSON that were made to exhaust time or memory are refused before they do, in one line."""

import os

import pytest

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.published.json_text import parse_json


def doubling(first: str, line: str) -> str:
    """Nine lines that each repeat the one before nine times: 9^9 values in a few hundred bytes."""
    return first + "".join(line.format(name=chr(98 + i), before=", ".join(["*" + chr(97 + i)] * 9)) for i in range(9))


TOO_MANY = "more than 3,000 values, an alias counted as what it repeats; a config has about a hundred"
# id: (content, what the line holds)
BOMBS = {
    "aliases": (doubling("a: &a [x, x, x]\n", "{name}: &{name} [{before}]\n"), TOO_MANY),
    "merged keys": (doubling("a: &a {k: 1}\n", "{name}: &{name}\n  <<: [{before}]\n"), TOO_MANY),
    "aliases as a key": (doubling("a: &a [x]\n", "{name}: &{name} [{before}]\n") + "? *j\n: 1\n", TOO_MANY),
    "list of lists as a key": ("? [[a, b], c]\n: 1\n", ":1: a key is a list or a mapping"),
    "20,000 keys": ("".join(f"k{i}: 1\n" for i in range(20_000)), TOO_MANY),
    "2,500 unknown keys": ("model:\n" + "".join(f"  k{i}: 1\n" for i in range(2_500)), "(and 2499 more)"),
    "list that holds itself": ("seed: &a [*a]\n", "nested more than 20 deep"),
    "mapping that holds itself": ("model: &a\n  head: *a\n", "nested more than 20 deep"),
    "a key of 1,000 characters": ("? " + "a" * 1000 + "\n: 1\n", ":1: a key has 1000 characters"),
    "a key of 500 parts": ("a" + ".a" * 90 + ": {b: 1}\n", "nested more than 20 deep"),
    "300 KB": ("#" * 300_000, "has more than 256 KiB, so it is no config; name a .yaml file"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "held"), BOMBS.values(), ids=BOMBS)
def test_a_config_made_to_exhaust(written, content, held):
    with pytest.raises(ConfigError) as caught:
        load_config(written(content))
    assert held in str(caught.value)
    assert len(str(caught.value)) < 400


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
