"""A config that names functions: what it takes, how it is written, and one line for each mistake. No jax is needed."""

import sys

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.kinds import called_parts, check_kinds
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.runtime.call import call_function

MINE = """
model: {call: mine.models:build, args: {width: 64, scales: {'layers.0': 0.5}}}
task: {call: mine.losses:focal, args: {gamma: 2.0}}
data: {call: mine.rows:read}
optimizer: {call: mine.optim:make, clip_norm: null}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes modules of a package `mine_TEST` into the current directory; they are forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    folder = tmp_path / "mine_test"
    folder.mkdir()
    (folder / "__init__.py").touch()

    def write(text, module="parts"):
        path = folder / f"{module}.py"
        path.write_text(text)
        return path

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("mine_test"):
            del sys.modules[name]


def test_the_four_groups_take_a_function(written):
    config = load_config(written(MINE)).config
    assert {name: group.call for name, group in called_parts(config).items()} == {
        "model": "mine.models:build",
        "task": "mine.losses:focal",
        "data": "mine.rows:read",
        "optimizer": "mine.optim:make",
    }
    # The names of arguments are the function's own: a dot in them is no path.
    assert config.model.args == {"width": 64, "scales": {"layers.0": 0.5}}
    assert config.optimizer.clip_norm is None
    check_kinds(config)


OVERRIDES = [
    ("model.args.width=128", "model.args.width", 128),
    ("model.args.depth=2", "model.args.depth", 2),
    ("task.call=mine.losses:other", "task.args", {}),
    ("task=classification", "task", "classification"),
    ("model.kind=mlp", "model.kind", "mlp"),
]


@pytest.mark.parametrize(("word", "path", "wanted"), OVERRIDES)
def test_overrides(written, word, path, wanted):
    value = load_config(written(MINE), overrides=[word]).config
    for part in path.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert value == wanted


def test_a_function_takes_the_place_of_a_shipped_kind_and_says_what_gave_way():
    loaded = load_config("digits_mlp", overrides=["model.call=mine:build", "optimizer.call=mine:make"])
    assert loaded.config.model.kind == loaded.config.optimizer.kind == "called"
    assert loaded.config.optimizer.learning_rate is not None  # both kinds have it
    assert any(note.startswith("model.hidden_dims") and "is replaced by model.kind" in note for note in loaded.notes)


WRONG_CONFIGS = {
    "task.call=mine.losses.focal": "task.call (command line): 'mine.losses.focal' names no function; write",
    "task={args: {gamma: 2}}": "key 'task.call' is missing; task (command line) needs it",
    "model={call: a:b, args: {width: .nan}}": "model.args (command line): Out of range float values",
    "model.args.width=3": "unknown key 'model.args' (command line); model.kind=transformer does not have it",
}


@pytest.mark.parametrize(("override", "message"), WRONG_CONFIGS.items(), ids=WRONG_CONFIGS)
def test_wrong_config(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override])
    assert str(caught.value).startswith(message)


PARTS = """
import functools

def build(width, input_shape, depth=2, num_outputs=None):
    return width, input_shape, depth, num_outputs

def anything(**kwargs):
    return kwargs

def broken(width):
    return 1 // width

"""


def test_a_function_gets_what_its_signature_names(package):
    package(PARTS)
    offered = {"input_shape": (8,), "vocab_size": 7, "num_outputs": None}
    given = call_function("model", "mine_test.parts:build", {"width": 4}, offered=offered)
    assert given == (4, (8,), 2, None)
    # What the config says comes first, and what only the data knows is given to names, never to **kwargs.
    given = call_function("model", "mine_test.parts:build", {"width": 4, "input_shape": [2]}, offered=offered)
    assert given == (4, [2], 2, None)
    assert call_function("model", "mine_test.parts:anything", {"width": 4}, offered=offered) == {"width": 4}


# What is called below mine_test, its arguments, and what is wrong.
WRONG_CALLS = [
    (
        "prats:build",
        {},
        "mine_test or on Python's path; did you mean 'parts'?",
    ),
    ("parts:build", {"widht": 3}, "build has no such parameter, it takes width, input_shape, depth, num_outputs; did"),
    ("parts:build", {}, "build needs width; set model.args.width"),
    ("imports:build", {}, "importing mine_test.imports raised ModuleNotFoundError: No module named 'no_such_thing'"),
    ("script:build", {}, "importing mine_test.script raised SystemExit: 3 (mine_test/script.py:3)"),
]


@pytest.mark.parametrize(("call", "arguments", "message"), WRONG_CALLS)
def test_wrong_call(package, call, arguments, message):
    package(PARTS)
    package("import no_such_thing\n", "imports")
    package("import sys\n\nsys.exit(3)\n", "script")
    with pytest.raises(ConfigError) as caught:
        call_function("model", f"mine_test.{call}", arguments)
    assert str(caught.value).startswith("model.")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_of_ours_inside_keeps_its_type_and_says_where(package):
    package("from jaxtrain.errors import DataError\n\ndef read():\n    raise DataError('no rows')\n")
    with pytest.raises(DataError, match=r"^data.call=mine_test.parts:read: read: no rows \(mine_test/parts.py:4\)"):
        call_function("data", "mine_test.parts:read", {})
