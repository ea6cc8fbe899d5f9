"""One loader for YAML file, `key=value` and Python keywords; every mistake is one line that says where it was set."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxtrain.config.keys import all_keys, locate, members, nearest
from jaxtrain.config.local_path import local_path
from jaxtrain.config.models import RESNET_SIZES, TRANSFORMER_SIZES
from jaxtrain.config.no_effect import no_effect_notes
from jaxtrain.config.other_names import other_name
from jaxtrain.config.schema import AXES, Config
from jaxtrain.config.yaml_file import parse_value, read_yaml
from jaxtrain.errors import ConfigError

Path_ = tuple[str, ...]


@dataclass(frozen=True)
class Loaded:
    """A config and where each key that somebody set comes from.

    Attributes:
        config: the validated tree.
        name: the name of the config (file stem), used for the run directory.
        origins: dotted key -> "quickstart.yaml:12", "command line", "keyword" or "size gpt2".
        notes: a line for each key that was left out (of another kind or a replaced size) or has no effect.
    """

    config: Config
    name: str
    origins: dict[str, str]
    notes: tuple[str, ...]


def config_folder() -> Path:
    """Folder of the shipped configs: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def shipped_configs() -> list[str]:
    """Names of the shipped configs, sorted."""
    return sorted(path.stem for path in config_folder().glob("*.yaml"))


def find_config(name: str) -> Path:
    """The file of a shipped name or a path.

    Raises:
        ConfigError: there is no such config; names the nearest.
    """
    shipped = config_folder() / f"{name}.yaml"
    if "/" not in name and shipped.is_file():
        return shipped
    path = local_path(name, what="config")
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"config {name!r} is a folder; name a .yaml file or one of {', '.join(shipped_configs())}")
    close = difflib.get_close_matches(path.stem, shipped_configs(), 1)
    hint = f"did you mean {close[0]!r}?" if close else f"shipped: {', '.join(shipped_configs())}"
    raise ConfigError(f"no config {name!r}, neither a shipped name nor a file; {hint}")


class _Tree:
    """Values from several layers, merged in order, each leaf with where it was set."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.where: dict[Path_, str] = {}
        self.notes: list[str] = []

    def set(self, path: Path_, value: Any, where: str) -> None:
        """Merge a value (a mapping merges key by key) at a path."""
        if path == ("parallel",) and value == "auto":
            self._drop("parallel", [axis for axis in AXES if axis in self._node(path)], f"parallel=auto ({where})")
            path, value = ("parallel", "auto"), True
        if isinstance(value, Mapping):
            self._yield_to(path, value, where)
            # The kind goes first: it decides which of the older keys stay.
            for key in sorted(value, key=lambda key: (key != "kind", key != "size")):
                self.set((*path, *str(key).split(".")), value[key], where)
            if not value and path:
                self._node(path)
                self.where[path] = where
            return
        if len(path) == 2 and path[1] in ("kind", "size"):
            self._yield_to(path[:1], {path[1]: value}, where)
        self._node(path[:-1])[path[-1]] = value
        # What was set below is gone, and the order of `where` is the order of setting.
        for known in [known for known in self.where if known[: len(path)] == path]:
            del self.where[known]
        self.where[path] = where

    def _node(self, path: Path_) -> dict[str, Any]:
        node = self.values
        for depth, part in enumerate(path):
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                child = node[part] = {}
                self.where.pop(path[: depth + 1], None)
            node = child
        return node

    def _yield_to(self, path: Path_, value: Mapping[str, Any], where: str) -> None:
        """Drop older keys that a new kind does not have, or that a new size sets."""
        if len(path) != 1 or path[0] not in Config.model_fields:
            return
        group = self.values.get(path[0])
        if not isinstance(group, dict):
            return
        kinds = members(Config.model_fields[path[0]].annotation)
        kind, size = value.get("kind"), value.get("size")
        default = getattr(Config.model_fields[path[0]].default, "kind", None)
        dropped: list[str] = []
        if isinstance(kind, str) and kind in kinds and kind != group.get("kind", default):
            dropped += [key for key in group if key != "kind" and key not in kinds[kind].model_fields]
        sizes = {**TRANSFORMER_SIZES, **RESNET_SIZES}
        if isinstance(size, str) and size in sizes:
            dropped += [key for key in group if key in sizes[size]]
        self._drop(path[0], dropped, f"{path[0]}.{'kind' if kind else 'size'} ({where})")

    def _drop(self, name: str, keys: Iterable[str], successor: str) -> None:
        for key in keys:
            del self.values[name][key]
            for known in [p for p in self.where if p[:2] == (name, key)]:
                self.notes.append(f"{'.'.join(known)} ({self.where.pop(known)}) gave way to {successor}")


def _where(tree: _Tree, path: Path_) -> str:
    """Where a path was set: itself, else the group above it, else the key below it that was set last."""
    for length in range(len(path), 0, -1):
        if path[:length] in tree.where:
            return tree.where[path[:length]]
    below = [where for known, where in tree.where.items() if known[: len(path)] == path]
    return below[-1] if below else "default"


def _schema_path(location: tuple[Any, ...], values: dict[str, Any]) -> Path_:
    """A pydantic error location without the tags that unions put into it."""
    path: list[str] = []
    node: Any = values
    for part in location:
        if isinstance(node, dict) and node.get("kind") == part and part not in node:
            continue
        path.append(str(part))
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            node = None
    return tuple(path)


def _with_kinds(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the default kind written into groups that leave it out, where pydantic wants it."""
    filled = dict(values)
    for name, field in Config.model_fields.items():
        group = values.get(name)
        if isinstance(group, dict) and "kind" not in group and len(members(field.annotation)) > 1:
            filled[name] = {"kind": field.default.kind, **group}
    return filled


def _show(value: Any) -> str:
    """A value as it is written in a file, near enough for a message."""
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or value is True or value is False
        else repr(value)
    )


def _hint(path: Path_, values: dict[str, Any]) -> str:
    """What would work instead of an unknown key."""
    kinds = members(Config.model_fields[path[0]].annotation) if path[0] in Config.model_fields else {}
    owners = [kind for kind, group in kinds.items() if kind and path[1:] in [(key,) for key in group.model_fields]]
    if owners:
        return f"{path[0]}.kind={values[path[0]]['kind']} does not have it, {path[0]}.kind={owners[0]} does"
    meant = other_name(".".join(path), all_keys(path, values))
    if meant is not None and (" " in meant or "=" in meant):
        return meant if " " in meant else f"set {meant}"
    close = nearest(".".join(path), values)
    return f"did you mean {close!r}?" if close else "'jaxtrain config NAME' lists the keys"


def _explain(error: ValidationError, tree: _Tree) -> str:
    """One line for the first mistake that pydantic found."""
    # A missing key may be there misspelt: the wrong one says more.
    first = min(error.errors(), key=lambda found: found["type"] == "missing")
    path = _schema_path(first["loc"], tree.values)
    dotted, where = ".".join(path), _where(tree, path)
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    tag = {"union_tag_invalid": "kind", "union_tag_not_found": "kind", "unknown_size": "size"}.get(kind)
    if tag:
        dotted, where = f"{dotted}.{tag}", _where(tree, (*path, tag))
    if kind == "extra_forbidden":
        line = f"unknown key {dotted!r} ({where}); {_hint(path, tree.values)}"
    elif kind in ("missing", "union_tag_not_found") and (tag is None or isinstance(value, dict)):
        above = dotted.rpartition(".")[0]
        line = f"key {dotted!r} is missing; {above} ({_where(tree, tuple(above.split('.')))}) needs it"
    elif kind in ("union_tag_invalid", "literal_error", "unknown_size"):
        expected = context.get("expected_tags") or context.get("expected", "")
        got = value.get(tag) if tag else value
        options = [option.strip().strip("'") for option in expected.replace(" or ", ", ").split(",")]
        close = difflib.get_close_matches(str(got), options, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        line = f"{dotted} is {_show(got)} ({where}), not one of {', '.join(options)}{hint}"
    elif kind == "value_error":
        line = f"{dotted} ({where}): {first['msg'].removeprefix('Value error, ')}"
    else:
        # Errors inside a union or a list go on below the key, which is named with its whole value.
        key, siblings = locate(path, tree.values)
        if key:
            dotted, where, value = (
                key.path,
                _where(tree, tuple(key.path.split("."))),
                _value(tree.values, key.path, value),
            )
        else:
            dotted = dotted.removesuffix(".kind") if tag else dotted
        takes = f"it takes {key.type}" if key else f"it takes keys of its own, such as {siblings[0].path}"
        message = first["msg"].removeprefix("Input should be ")
        if kind == "too_short":
            message = f"at least {context['min_length']} of them"
        if key and key.type == "list of text" and isinstance(value, str):
            takes += f", as in [{value}]"
        limit = f", {message}" if key and ("than" in message or "finite" in message or "at least" in message) else ""
        line = f"{dotted} is {_show(value)} ({where}); {takes}{limit}"
    # A list that loses a wrong item can be too short as well: what stands above the first mistake is no second one.
    here = _key_path(first["loc"], tree.values)
    others = len({at for found in error.errors() if not here.startswith(at := _key_path(found["loc"], tree.values))})
    return line + (f" (and {others} more)" if others else "")


def _key_path(location: tuple[Any, ...], values: dict[str, Any]) -> str:
    """The key of an error location: what goes on below it is about the same key."""
    path = _schema_path(location, values)
    key, _ = locate(path, values)
    return key.path if key else ".".join(path)


def _value(values: Any, path: str, default: Any) -> Any:
    """What stands at a dotted path."""
    for part in path.split("."):
        if isinstance(values, dict) and part in values:
            values = values[part]
        elif isinstance(values, list | tuple) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            return default
    return values


def _split_override(override: str) -> tuple[Path_, Any]:
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not key or any(not part for part in key.split(".")):
        raise ConfigError(f"cannot read {override!r} (command line); write key=value, as in train.steps=100")
    return tuple(key.split(".")), parse_value(text, f"command line, {key}")


def load_config(
    name: str | Path | Mapping[str, Any] | None = None,
    *,
    overrides: Iterable[str] = (),
    keywords: Mapping[str, Any] | None = None,
    origin: str = "keyword",
) -> Loaded:
    """Load a config: a shipped name, a path or a mapping, then `key=value` strings, then keywords.

    Args:
        name: a shipped name ("quickstart"), a path to a YAML file, a nested mapping, or None for all defaults.
        overrides: strings as on the command line ("train.steps=100"); later ones win.
        keywords: a nested mapping from Python ({"train": {"steps": 100}} or {"train.steps": 100}).
        origin: where a mapping comes from, for messages.

    Returns:
        The validated config with its name and the origin of each key.

    Raises:
        ConfigError: no such config, or a wrong key or value; one line naming key, origin and what would work.
    """
    tree = _Tree()
    label = "run"
    if isinstance(name, Mapping):
        for key, value in name.items():
            tree.set(tuple(str(key).split(".")), value, origin)
    elif name is not None:
        path = find_config(str(name))
        label = path.stem
        values, lines = read_yaml(path)
        tree.set((), values, path.name)
        if values.get("parallel") == "auto":
            lines[("parallel", "auto")] = lines[("parallel",)]
        for key_path, line in lines.items():
            if key_path in tree.where:
                tree.where[key_path] = f"{path.name}:{line}"
    for override in overrides:
        key, value = _split_override(override)
        tree.set(key, value, "command line")
    for key, value in (keywords or {}).items():
        tree.set(tuple(key.split(".")), value, "keyword")
    tree.values = _with_kinds(tree.values)
    try:
        config = Config.model_validate(tree.values)
    except ValidationError as error:
        raise ConfigError(_explain(error, tree)) from None
    origins = {".".join(path): where for path, where in tree.where.items()}
    notes = (*tree.notes, *no_effect_notes(config, origins))
    size = getattr(config.model, "size", None)
    for key in {**TRANSFORMER_SIZES, **RESNET_SIZES}.get(size or "", {}):
        origins.setdefault(f"model.{key}", f"size {size}")
    return Loaded(config, config.name or label, origins, notes)
