"""Describes every key of a loaded config (value, type, default, origin, doc line) as data. No jax, no printing."""

import json
from dataclasses import dataclass

from jaxtrain.config.base import Group
from jaxtrain.config.keys import members, walk
from jaxtrain.config.load import Loaded
from jaxtrain.config.schema import Config
from jaxtrain.config.yaml_file import parse_value
from jaxtrain.errors import ConfigError


@dataclass(frozen=True)
class DescribedKey:
    """One key of the config.

    Attributes:
        path: Dotted path of the key.
        value: The value, written as after `key=` on the command line.
        type: The type, or the kinds to choose from.
        default: The default, written as `value` is, or "(required)".
        origin: Where the value was set.
        doc: The doc line of the key.
    """

    path: str
    value: str
    type: str
    default: str
    origin: str
    doc: str


@dataclass(frozen=True)
class DescribedGroup:
    """The keys of one top-level group; `name` is "" for the keys that belong to no group."""

    name: str
    title: str
    keys: tuple[DescribedKey, ...]


def value_text(value: object) -> str:
    """Returns a value as it is written after `key=`; a text that YAML would read as another type is quoted."""
    if isinstance(value, str):
        return value if _reads_as_itself(value) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple | list):
        return json.dumps([_plain(item) for item in value], ensure_ascii=False)
    if isinstance(value, Group | dict):
        return json.dumps(_plain(value), ensure_ascii=False)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _reads_as_itself(text: str) -> bool:
    try:
        return parse_value(text, "") == text
    except ConfigError:
        return False


def _plain(value: object) -> object:
    return value.model_dump(mode="json") if isinstance(value, Group) else value


def _lookup(tree: object, path: str) -> object:
    for part in path.split("."):
        tree = getattr(tree, part)
    return tree


def _origin(origins: dict[str, str], path: str) -> str:
    """Returns where the key, or the nearest group above it, was set."""
    parts = path.split(".")
    known = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    # A mapping such as compiler_options may be set key by key.
    below = (where for key, where in origins.items() if key.startswith(f"{path}."))
    return next((origins[prefix] for prefix in known if prefix in origins), next(below, "default"))


def describe(loaded: Loaded) -> list[DescribedGroup]:
    """Returns the keys of a config by group, in the order of the tree.

    Args:
        loaded: A config with the origin of each value.

    Returns:
        The groups: first the keys that belong to no group, then each top-level group, its kind before its other keys.
    """
    config = loaded.config
    groups: dict[str, list[DescribedKey]] = {"": []}
    for key in walk(Config, config):
        group = key.path.partition(".")[0] if "." in key.path else ""
        kinds = members(Config.model_fields[group].annotation) if group else {}
        is_kind = len(kinds) > 1 and key.path == f"{group}.kind"
        described = DescribedKey(
            path=key.path,
            value=value_text(_lookup(config, key.path)),
            type=" | ".join(kinds) if is_kind else key.type,
            default=key.default if key.default == "(required)" else value_text(key.default),
            origin=_origin(loaded.origins, key.path),
            doc=key.doc,
        )
        keys = groups.setdefault(group, [])
        keys.insert(0 if is_kind else len(keys), described)
    fields = Config.model_fields
    return [
        DescribedGroup(name, (fields[name].description or "") if name else "The run.", tuple(keys))
        for name, keys in groups.items()
    ]
