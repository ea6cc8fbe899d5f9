"""The schema: frozen, documented, small, and free of jax."""

import subprocess
import sys
from typing import get_args, get_origin

import pytest
from pydantic import ValidationError

from jaxtrain.config import Config, load_config, shipped_configs
from jaxtrain.config.base import Group
from jaxtrain.config.keys import members, nearest, walk
from jaxtrain.config.models import ResNetConfig, TransformerConfig
from jaxtrain.config.optimizers import AdamWConfig
from jaxtrain.config.sizes import RESNET_SIZES, TRANSFORMER_SIZES


def groups(group: type[Group], seen: dict[str, type[Group]]) -> dict[str, type[Group]]:
    """Every class of the tree, by name."""
    seen[group.__name__] = group
    for field in group.model_fields.values():
        inner = field.annotation if get_origin(field.annotation) is not tuple else get_args(field.annotation)[0]
        for member in members(inner).values():
            groups(member, seen)
    return seen


ALL = groups(Config, {})


def test_the_walk_reaches_every_kind():
    # One of each level: a kind, a kind's nested group, a group inside a list.
    assert {"MLPConfig", "RopeScaling", "Component", "LossScaleConfig", "LionConfig"} <= set(ALL)


@pytest.mark.parametrize("group", ALL.values(), ids=ALL)
def test_every_key_has_one_line_of_doc(group):
    for key, field in group.model_fields.items():
        doc = field.description
        assert doc, key
        assert doc.endswith("."), key
        assert "\n" not in doc, key
        # What `jaxtrain config` prints in a column.
        assert len(doc) < 120, key


def test_defaults_are_valid():
    # validate_default is on, so building a group checks its defaults.
    for group in ALL.values():
        required = {
            "path": "x",
            "factor": 8.0,
            "original_length": 8192,
            "short_factors": [1.0],
            "long_factors": [2.0],
            "pattern": [1, 0],
            "window": 4,
            "source": {"kind": "text"},
            "components": [{"source": {"kind": "text"}}],
            "call": "module:function",
            "match": ["head/*"],
            "mean": [0.0],
            "deviation": [1.0],
        }
        asked = {key: required[key] for key, field in group.model_fields.items() if field.is_required()}
        group.model_validate(asked)


@pytest.mark.parametrize("path", ["", "train", "optimizer.schedule"])
def test_frozen(path):
    group = load_config().config
    for part in filter(None, path.split(".")):
        group = getattr(group, part)
    key = next(iter(type(group).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(group, key, getattr(group, key))


def keys_of(config):
    """The number of keys beside the model, and of the model."""
    paths = [key.path for key in walk(Config, config)]
    of_model = sum(path.startswith("model.") for path in paths)
    return len(paths) - of_model, of_model


# The design keeps a run under about 100 keys beside what published families of transformers differ in: a family is a
# row of values, so that the transformer has a key for each difference. Twelve more are of what goes wrong: the groups
# `spikes`, `checks`, `watchdog` and `notices` (null unless asked for), what saves and bad records may cost.
MOST_KEYS, MOST_OF_A_MODEL = 112, 48


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_load_and_stay_small(name):
    loaded = load_config(name, weights=False)
    beside, of_model = keys_of(loaded.config)
    assert beside < MOST_KEYS
    assert of_model < MOST_OF_A_MODEL
    assert loaded.notes == ()


def test_the_largest_kinds_stay_small():
    beside, of_model = keys_of(load_config(overrides=["model.size=llama3.1_8b"]).config)
    assert beside < MOST_KEYS
    assert of_model < MOST_OF_A_MODEL


@pytest.mark.parametrize(
    ("group", "sizes"),
    [(TransformerConfig, TRANSFORMER_SIZES), (ResNetConfig, RESNET_SIZES)],
    ids=["transformer", "resnet"],
)
def test_every_size_is_a_valid_config(group, sizes):
    for size, row in sizes.items():
        config = group(size=size)
        for key, value in row.items():
            found = getattr(config, key)
            found = {name: getattr(found, name) for name in value} if isinstance(found, Group) else found
            assert found == (tuple(value) if isinstance(value, list) else value), (size, key)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("steps", "train.steps"),
        ("train.stepz", "train.steps"),
        ("learning_rate", "optimizer.learning_rate"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
        ("precison", "precision"),
        ("warmup", "optimizer.schedule.warmup_steps"),
        ("xyzzy", None),
    ],
)
def test_nearest(wrong, right):
    assert nearest(wrong, {}) == right


def test_walk_gives_type_and_default():
    keys = {key.path: key for key in walk(Config, load_config(overrides=["data={kind: jsonl, path: a}"]).config)}
    assert (keys["train.steps"].type, keys["train.steps"].default) == ("int", 1000)
    assert keys["parallel.data"].type == "int | auto"
    assert keys["optimizer.freeze"].type == "list of text"
    assert keys["optimizer.clip_norm"].type == "number | null"
    assert keys["logging.report"].type == "true | false"
    assert keys["data.path"].default == "(required)"


def test_groups_take_python_values():
    assert AdamWConfig(freeze=("a",)).freeze == ("a",)
    with pytest.raises(ValidationError):
        AdamWConfig(learning_rate="1e-3")


def test_loading_imports_no_jax():
    heavy = "{'jax', 'flax', 'numpy'}"
    program = (
        f"import sys, jaxtrain.config as c; c.load_config('quickstart'); print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
