"""Files that hold a config: YAML, the shipped configs, and the record of a run (`run.json`). No jax, and no schema."""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxtrain.config.arguments import local_path
from jaxtrain.errors import ConfigError, first_line

RUN_FILE = "run.json"
# Aliases may make a small file as large as one likes.
_MAX_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads 1e-3 as a number (YAML 1.1 demands 1.0e-3), and 010, 12:30 and 2024-01-01 as texts."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("int", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_INT = r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)"
_FLOAT = r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|\.?[0-9]+[eE][-+]?[0-9]+|\.[0-9]+|\.inf)|\.nan"
for _tag, _pattern in (("int", _INT), ("float", _FLOAT)):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), list("-+0123456789."))


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that quotes every text that the loader would read as another type."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def to_yaml(values: Mapping[str, object]) -> str:
    """Returns the values as a YAML text that `read_yaml` reads back unchanged."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _note_lines(node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int], name: str) -> None:
    """Records the line of each key below the node, which may be there once."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key_path = (*path, *str(key_node.value).split("."))
            if key_path in lines:
                first = lines[key_path]
                raise ConfigError(
                    f"{name}:{line}: key {key_node.value!r} is given twice (first on line {first}); keep one"
                )
            lines[key_path] = line
            _note_lines(value_node, key_path, lines, name)


def _check_size(node: yaml.Node, name: str) -> None:
    """Raises an error where a node holds too many values, each counted wherever an alias repeats it."""
    nodes: list[Any] = [node]
    for value in nodes:  # which grows meanwhile
        if isinstance(value, yaml.CollectionNode):
            nodes += value.value
        elif isinstance(value, tuple):  # a key and its value
            nodes += value
        if len(nodes) > _MAX_VALUES:
            raise ConfigError(f"{name}: holds more than {_MAX_VALUES:,} values, with aliases written out; write fewer")


def _construct(text: str, name: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Returns the value of a YAML text, None for an empty one, and the line of each key path."""
    lines: dict[tuple[str, ...], int] = {}
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None, lines
    _check_size(node, name)
    _note_lines(node, (), lines, name)
    return loader.construct_document(node), lines


def parse_value(text: str, where: str) -> Any:
    """Returns the value of `key=value`, read as YAML without comments: a number, text, boolean, None, list or dict."""
    is_plain = not text.startswith(("'", '"', "[", "{"))
    if is_plain and re.search(r"(^|\s)#", text):
        return text
    try:
        if re.search(r"""["'\]}]\s+#[^"'\]}]*$""", text):
            raise ValueError("YAML would drop what follows the value")
        return _construct(text, where)[0]
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"cannot read the value {text[:60]!r} ({where}); quote it, as in 'key=\"text\"'") from None


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Returns the mapping in a YAML file, empty for an empty file, and the line of each key path, counted from 1."""
    try:
        values, lines = _construct(path.read_text(encoding="utf-8"), path.name)
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"{path}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {reason}") from None
    if not isinstance(values, dict | None):
        raise ConfigError(f"{path}: a config must be a mapping of groups, not a {type(values).__name__}")
    return values or {}, lines


_PACKAGE = Path(__file__).resolve().parent.parent
# Inside the installed package, or beside it in a checkout.
CONFIGS = next(folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir())


def shipped_configs() -> list[str]:
    """Names of the shipped configs, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def find_config(name: str) -> Path:
    """The file of a shipped name or a path; the error where there is none names the nearest."""
    if name in shipped_configs():
        return CONFIGS / f"{name}.yaml"
    path = local_path(name, what="config")
    if path.is_file():
        return path
    close = difflib.get_close_matches(path.stem, shipped_configs())
    close.sort(key=lambda one: not one.startswith(path.stem))
    hint = f"did you mean {close[0]!r}?" if close else f"shipped: {', '.join(shipped_configs())}"
    raise ConfigError(f"no config {name!r}: it is not a shipped name, a file or a run; {hint}")


def read_run(run_dir: str | Path) -> dict[str, Any]:
    """Returns the content of the `run.json` in the directory of a run; raises a ConfigError where it is none."""
    path = local_path(run_dir, what="run directory")
    try:
        info = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
        if isinstance(info["config"], dict):
            return info
    except (FileNotFoundError, NotADirectoryError):
        published = (path / "config.json").is_file() or (path / "adapter_config.json").is_file()
        hint = f"; did you mean {path.parent}?" if is_run(path.parent) else "; give the directory of one (runs/<name>)"
        hint = f"; make a run of this published model: jaxtrain import {path} -o RUN_DIR" if published else hint
        raise ConfigError(f"{path} is not a run: it has no run.json{hint}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path / RUN_FILE}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ConfigError(f"{path / RUN_FILE} holds no config; it was not written by jaxtrain, or is damaged")


def is_run(path: Path) -> bool:
    """Returns whether a path is the directory of a run."""
    return (path / RUN_FILE).is_file()


def recorded_parts(record: Mapping[str, Any]) -> dict[str, str | None]:
    """Returns the names of the parts from Python that a record (run.json) has noted; None: the config's."""
    found = record.get("from_python") or {}
    return {part: found.get(part) for part in ("model", "task", "data", "optimizer")}
