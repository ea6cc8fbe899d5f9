"""Every number of the schema has a least and a largest value, and what no machine trains is refused in one line."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import TypeAdapter, ValidationError

from jaxtrain.config import Config, load_config
from jaxtrain.config.base import Group
from jaxtrain.config.keys import members
from jaxtrain.errors import ConfigError

# Beyond what any bound may be; 1e39 is beyond float32, in which steps compute.
EXTREMES = {int: (-(10**18), 10**18), float: (-1e39, 1e39)}
# Fields whose types have no bounds -> why.
ELSEWHERE = {
    "Config.compiler_options": "the options of a compiler, which knows their range",
    "LossConfig.beta": "check_preference says what it may be; in EXTREMES_OF_GROUPS below",
    "LossConfig.label_smoothing": "check_preference says what it may be; in EXTREMES_OF_GROUPS below",
}
EXTREMES_OF_GROUPS = ["loss.beta=-1e39", "loss.beta=1e39", "loss.label_smoothing=-1", "loss.label_smoothing=0.5"]


def all_groups(group: type[Group], seen: dict[str, type[Group]]) -> dict[str, type[Group]]:
    seen[group.__name__] = group
    for field in group.model_fields.values():
        inner = field.annotation if get_origin(field.annotation) is not tuple else get_args(field.annotation)[0]
        for member in members(inner).values():
            all_groups(member, seen)
    return seen


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
    for name, group in all_groups(Config, {}).items()
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


@pytest.mark.parametrize("word", EXTREMES_OF_GROUPS)
def test_bounds_that_a_group_checks(word):
    with pytest.raises(ConfigError, match=f"^{word.partition('=')[0].rpartition('.')[0]}"):
        load_config(overrides=["task=dpo", word])


INT = "it takes int, less than or equal to"
# id: (words of a command line, the line)
SENSELESS = {
    "steps": ("train.steps=1" + "0" * 23, f"train.steps is 1{'0' * 23} (command line); {INT} 1000000000"),
    "steps as a float": ("train.steps=1e23", "train.steps is 1e+23 (command line); it takes int"),
    "layers": ("model.num_layers=1" + "0" * 23, f"model.num_layers is 1{'0' * 23} (command line); {INT} 10000"),
    "rows of a batch": (
        "train.global_batch_size=1000000000000",
        f"train.global_batch_size is 1000000000000 (command line); {INT} 16777216",
    ),
    "BPE vocabulary": (
        "data.tokenizer={kind: bpe, vocab_size: 999999999}",
        f"data.tokenizer.vocab_size is 999999999 (command line); {INT} 1000000",
    ),
    "learning rate beyond float32": (
        "optimizer.learning_rate=1e39",
        "optimizer.learning_rate is 1e+39 (command line); it takes number, less than or equal to 1000000",
    ),
    "learning rate below float32": (
        "optimizer.learning_rate=1e-300",
        "optimizer.learning_rate (command line): 1e-300 would be 0 in float32; use at least 1.2e-38",
    ),
    "decay that rounds to 1": (
        "optimizer.b2=0.99999999999",
        "optimizer.b2 (command line): 0.99999999999 would be 1 in float32; use at most 0.9999999",
    ),
    "sizes whose product no memory holds": (
        "model={num_layers: 10000, embed_dim: 1048576, num_heads: 1024, mlp_dim: 1048576, vocab_size: 16777216}",
        "model (command line): the sizes make a model of 6.6e+16 parameters; lower num_layers, embed_dim, mlp_dim or "
        "experts (at most 1e+15 are taken)",
    ),
    "stages": (
        "model={kind: resnet, stage_blocks: [1, 1, 1, 1, 1, 1, 1, 1, 1]}",
        "model.stage_blocks is [1, 1, 1, 1, 1, 1, 1, 1, 1] (command line); it takes list of int, at most 8 of them",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("word", "line"), SENSELESS.values(), ids=SENSELESS)
def test_senseless_value(word, line):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[word])
    assert str(caught.value) == line
