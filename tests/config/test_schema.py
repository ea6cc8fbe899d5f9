"""The schema: frozen, documented, small, free of jax, and every number has a least and a largest value."""

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import TypeAdapter, ValidationError

from jaxtrain.config import Config, load_config, shipped_configs
from jaxtrain.config.base import Group
from jaxtrain.config.errors import members, walk
from jaxtrain.config.load import nearest_key
from jaxtrain.config.model import RESNET_SIZES, TRANSFORMER_SIZES, ResNetConfig, TransformerConfig
from jaxtrain.errors import ConfigError


def groups(group: type[Group], seen: dict[str, type[Group]]) -> dict[str, type[Group]]:
    """Every class of the tree, by name."""
    seen[group.__name__] = group
    for field in group.model_fields.values():
        inner = field.annotation if get_origin(field.annotation) is not tuple else get_args(field.annotation)[0]
        for member in members(inner).values():
            groups(member, seen)
    return seen


ALL = groups(Config, {})


def test_every_key_has_one_line_of_doc():
    # One of each level: a kind, a kind's nested group, a group inside a list.
    assert {"MLPConfig", "RopeScaling", "Component", "LoraConfig", "LionConfig"} <= set(ALL)
    docs = {f"{group}.{key}": doc.description for group, kind in ALL.items() for key, doc in kind.model_fields.items()}
    # What `jaxtrain config` prints in a column.
    # A kind is described by the class that it names.
    wrong = [key for key, doc in docs.items() if not key.endswith(".kind") or doc]
    wrong = [key for key in wrong if not (doc := docs[key]) or not doc.endswith(".") or "\n" in doc or len(doc) >= 120]
    assert not wrong


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


def test_frozen():
    for group in (load_config().config, load_config().config.optimizer.schedule):
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


def test_shipped_configs_load_and_stay_small():
    for name in shipped_configs():
        loaded = load_config(name, weights=False)
        beside, of_model = keys_of(loaded.config)
        assert beside < MOST_KEYS, name
        assert of_model < MOST_OF_A_MODEL, name
        assert loaded.notes == (), name


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


def test_nearest():
    right = {"steps": "train.steps", "optimiser.learning_rate": "optimizer.learning_rate", "xyzzy": None}
    assert {wrong: nearest_key(wrong) for wrong in right} == right


def test_loading_imports_no_jax():
    heavy = "{'jax', 'flax', 'numpy'}"
    program = (
        f"import sys, jaxtrain.config as c; c.load_config('quickstart'); print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


# Beyond what any bound may be; 1e39 is beyond float32, in which steps compute.
EXTREMES = {int: (-(10**18), 10**18), float: (-1e39, 1e39)}
# Fields whose types have no bounds -> why.
ELSEWHERE = {
    "Config.compiler_options": "the options of a compiler, which knows their range",
}


def numbers(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The types int and float inside a type, each with its bounds."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from numbers(get_args(annotation)[0], (*get_args(annotation)[1:], *metadata))
    elif origin in (Union, types.UnionType, tuple, list, dict):
        for inner in get_args(annotation):
            yield from numbers(inner)
    elif annotation in EXTREMES:
        yield Annotated[(annotation, *metadata)] if metadata else annotation


FIELDS = {
    f"{name}.{key}": (field.annotation, tuple(field.metadata))
    for name, group in ALL.items()
    for key, field in group.model_fields.items()
}


def unbounded(annotation: Any, metadata: tuple[Any, ...]) -> list[Any]:
    taken = []
    for number in numbers(annotation, metadata):
        kind = get_args(number)[0] if get_origin(number) is Annotated else number
        for extreme in EXTREMES[kind]:
            try:
                TypeAdapter(number).validate_python(extreme)
                taken.append(extreme)
            except ValidationError:
                pass
    return taken


def test_every_number_has_both_bounds():
    found = {name: taken for name, field in FIELDS.items() if (taken := unbounded(*field))}
    assert sorted(found) == sorted(ELSEWHERE), found


# Words of a command line -> how the line begins.
SENSELESS = {
    "train.steps=1" + "0" * 23: f"train.steps is 1{'0' * 23} (command line); it takes int, less than or equal to 10000",
    "optimizer.learning_rate=1e39": "optimizer.learning_rate is 1e+39 (command line); it takes number, less than",
    "model={kind: resnet, stage_blocks: [1, 0]}": "model.stage_blocks is 0 (command line); it takes list of int",
}


@pytest.mark.parametrize(("word", "line"), SENSELESS.items(), ids=SENSELESS.values())
def test_senseless_value(word, line):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[word])
    assert str(caught.value).startswith(line)
