"""The schema: frozen, documented, small, free of jax, and every number has a least and a largest value."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest

from jaxtrain.config import Config, load_config, shipped_configs
from jaxtrain.config.base import Group
from jaxtrain.config.errors import members, walk
from jaxtrain.config.load import nearest_key
from jaxtrain.config.model import RESNET_SIZES, TRANSFORMER_SIZES, ResNetConfig, TransformerConfig


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
    assert {wrong: nearest_key(wrong, Config()) for wrong in right} == right


def test_loading_imports_no_jax():
    heavy = "{'jax', 'flax', 'numpy'}"
    program = (
        f"import sys, jaxtrain.config as c; c.load_config('quickstart'); print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_shipped_configs_load_and_stay_small():
    """The design keeps a run under about 100 keys beside those of a model, and 12 of what goes wrong."""
    for name in shipped_configs():
        loaded = load_config(name, weights=False)
        of_model = [key.path.startswith("model.") for key in walk(Config, loaded.config)]
        assert (len(of_model) - sum(of_model) < 112, sum(of_model) < 60, loaded.notes) == (True, True, ()), name


def unbounded(node: Any, path: str = "") -> Iterator[str]:
    """Places of a JSON schema whose number has no least or no largest value."""
    if isinstance(node, list):
        for item in node:
            yield from unbounded(item, path)
    elif isinstance(node, dict):
        ends = [any(key in node for key in (f"exclusive{end.title()}", end)) for end in ("minimum", "maximum")]
        if node.get("type") in ("integer", "number") and not {"enum", "const"} & set(node) and not all(ends):
            yield path
        for key, inner in node.items():
            yield from unbounded(inner, key if path in ("properties", "$defs") or key == "properties" else path or key)


def test_every_number_has_both_bounds():
    # The options of a compiler, which knows their range.
    assert set(unbounded(Config.model_json_schema())) == {"compiler_options"}
