"""What a published family is: its keys (keys.py), its name table, and what translates both. No jax here."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.interop.families.keys import EVERYWHERE, Config, Key
from jaxtrain.interop.formats.entries import Row
from jaxtrain.interop.formats.rope import read_rope, write_rope


def _nothing(*_: Config) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One published family.

    Attributes:
        name: The `model_type` of its config.json.
        architecture: The class of transformers that is written.
        keys: Declarations of every key of its config.json.
        tensors: Our model group, every key of it, with num_kv_heads, head_dim and mlp_dim filled in -> the name table.
        fixed: Keys of our model group that all models of the family have; those whose default of ours is not what the
            family means must be there.
        sizes: Published sizes: name -> keys of our model group.
        rotary: Whether it has the rotary keys, `rope_keys(theta)` among its keys.
        read: (mapped keys, the file's values of all declared keys) -> further keys of our model group.
        write: Our model group -> further keys of config.json. What it cannot say it need not check: the caller reads
            the result back and names the key that differs.
    """

    name: str
    architecture: str
    keys: tuple[Key, ...]
    tensors: Callable[[Config], tuple[Row, ...]]
    fixed: Config = field(default_factory=dict)
    sizes: Mapping[str, Config] = field(default_factory=dict)
    rotary: bool = False
    read: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = _nothing
    write: Callable[[Config], dict[str, Any]] = _nothing

    def from_published(self, config: Config) -> dict[str, Any]:
        """Returns the keys of our model group, `kind` included, for the object in a config.json.

        Raises:
            ConfigError: A key or a value of it is not supported.
        """
        ours, file = read_keys(self, config)
        rope = read_rope(file) if self.rotary else {}
        return {"kind": "transformer", **self.fixed, **ours, **rope, **self.read(ours, file)}

    def to_published(self, model: Config) -> dict[str, Any]:
        """Returns the config.json of a model group, every key of it.

        Raises:
            ConfigError: A key of the model group has a value that the family has no word for.
        """
        said = {"architectures": [self.architecture], "model_type": self.name, **write_keys(self, model)}
        return said | (write_rope(model) if self.rotary else {}) | self.write(model)


def read_keys(family: Family, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a config.json: the mapped keys of our model group, and the file's values of every declared key.

    Raises:
        ConfigError: The file has a key that is not declared, or a value that is not supported.
    """
    declared = {key.name: key for key in (*EVERYWHERE, *family.keys)}
    known = {name for key in declared.values() for name in (key.name, *key.others)}
    unknown = next((name for name in config if name not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"config.json has the key {unknown} (value {_shown(config[unknown])}), which the family {family.name} "
            "does not know; remove it if it changes nothing in the model"
        )
    ours: dict[str, Any] = {}
    file: dict[str, Any] = {}
    for key in declared.values():
        if not key.is_read:
            continue
        given = next((config[name] for name in (key.name, *key.others) if name in config), _ABSENT)
        computed = given is None and callable(key.default)
        file[key.name] = value = key.value_in(file) if given is _ABSENT or computed else given
        allowed = key.allowed or tuple(key.values or ())
        if allowed and not any(value == one and type(value) is type(one) for one in allowed):
            raise ConfigError(
                f"config.json has {key.name}: {_shown(value)}, which the family {family.name} does not support; it "
                f"knows {', '.join(map(_shown, allowed))}"
            )
        if key.to is not None:
            ours[key.to] = value if key.values is None else key.values[value]
    return ours, file


def write_keys(family: Family, model: Config) -> dict[str, Any]:
    """Returns the mapped keys of a config.json for a model group, the inverse of `read_keys`.

    Raises:
        ConfigError: A key of the model group has a value that the family has no word for.
    """
    written: dict[str, Any] = {}
    for key in family.keys:
        if key.to is None:
            continue
        value = model[key.to]
        if key.values is not None:
            theirs = [one for one, ours in key.values.items() if ours == value and type(ours) is type(value)]
            if not theirs:
                wanted = ", ".join(map(_shown, dict.fromkeys(key.values.values())))
                raise ConfigError(f"model.{key.to} is {_shown(value)}, but this family knows only {wanted}")
            value = theirs[0]
        if key.write_default or value != key.value_in(written):
            written[key.name] = value
    return written


_ABSENT = object()


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def no_tokens(model: Config, **defaults: int) -> dict[str, None]:
    """Returns null for the keys of special tokens whose default in the family (`defaults`) is no token of a model."""
    return {name: None for name, token in defaults.items() if token >= int(model["vocab_size"])}


def labels_of(count: int | None) -> dict[str, Any]:
    """Returns the keys of config.json that number the labels of a head."""
    numbers = range(count or 0)
    return dict(id2label={str(n): f"LABEL_{n}" for n in numbers}, label2id={f"LABEL_{n}": n for n in numbers})


def read_labels(file: Config) -> int:
    """Returns the number of labels that a config.json says; 2 where it says nothing, as in transformers."""
    return len(file["id2label"]) if file["id2label"] else file["num_labels"] or 2


def read_architecture(file: Config, *known: str) -> str:
    """Returns the architecture of a config.json; the last of those that are known where it names none.

    Raises:
        ConfigError: It is another one.
    """
    found = next(iter(file["architectures"] or ()), known[-1])
    if found not in known:
        raise ConfigError(f"config.json has architectures: {found}, which is not supported; known: {', '.join(known)}")
    return found


def label_names(config: Config) -> tuple[str, ...] | None:
    """Returns the names of the labels in a config.json, in the order of the outputs; None: it names none."""
    labels = config.get("id2label")
    if not isinstance(labels, Mapping):
        return None
    numbers = [str(number) for number in range(len(labels))]
    return tuple(str(labels[number]) for number in numbers) if all(number in labels for number in numbers) else None
