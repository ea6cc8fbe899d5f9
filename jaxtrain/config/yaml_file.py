"""Reads YAML files strictly: with the safe loader, without duplicate keys, and with the line of every key."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxtrain.config.arguments import shown
from jaxtrain.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads 1e-3 as a number (YAML 1.1 demands 1.0e-3)."""


# YAML 1.1 reads 010 as 8, 12:30 as 750 and 2024-01-01 as a date. Here they are texts, which a key of numbers refuses.
_REPLACED = ("int", "float", "timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^([-+]?([0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+|\.[0-9]+([eE][-+]?[0-9]+)?|[0-9][0-9_]*\.[0-9_]*"
        r"|\.(inf|Inf|INF))|\.(nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)

# A shipped config has about 2 KiB. What is larger is another file.
_MOST_BYTES = 1 << 18


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that quotes every text that the loader would read as another type."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def to_yaml(values: Mapping[str, object]) -> str:
    """Returns the values as a YAML text that `read_yaml` reads back unchanged."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _check(node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int], name: str) -> None:
    """Rejects duplicate keys, and records the line of each key below the node."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(f"{name}:{line}: a key is a list or a mapping; write a word")
            key_path = (*path, *key.split("."))
            if key_path in lines:
                first = lines[key_path]
                raise ConfigError(f"{name}:{line}: key {key!r} is there twice (first on line {first}); keep one")
            lines[key_path] = line
            _check(value_node, key_path, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _check(item, (*path, str(index)), lines, name)


def _construct(text: str, name: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Returns the value of a YAML text, None for an empty one, and the line of each key path."""
    lines: dict[tuple[str, ...], int] = {}
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _check(node, (), lines, name)
        return loader.construct_document(node), lines
    except (ValueError, KeyError, AttributeError):  # raised by the constructors of explicit tags
        raise yaml.YAMLError("a value does not fit its tag") from None
    finally:
        if loader is not None:
            loader.dispose()


def parse_value(text: str, where: str) -> Any:
    """Returns the value of `key=value`, read as YAML.

    Args:
        text: What stands after the equals sign.
        where: Where it was written, for the message.

    Returns:
        A number, text, boolean, None, list or dict.

    Raises:
        ConfigError: The text is not YAML.
    """
    try:
        return _construct(text, where)[0]
    except yaml.YAMLError:
        raise ConfigError(f"cannot read the value {shown(text)} ({where}); quote it, as in 'key=\"text\"'") from None


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Reads the mapping in a YAML file.

    Args:
        path: The file, in UTF-8.

    Returns:
        The mapping, empty for an empty file, and the line of each key path, counted from 1.

    Raises:
        ConfigError: The file is missing, is not YAML or not a mapping, has a key twice, or is larger than a config is.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"{path} has more than {_MOST_BYTES >> 10} KiB, so it is no config; name a .yaml file")
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    try:
        values, lines = _construct(text, path.name)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None
    if values is None:
        return {}, lines
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a config is a mapping of groups, this is a {type(values).__name__}")
    return values, lines
