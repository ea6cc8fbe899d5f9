"""One loader for YAML files, `key=value` and Python keywords; every mistake is one line that says where it was set."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxtrain.config.arguments import local_path
from jaxtrain.config.errors import CALLED, Key, KeyPath, explain, members, nearest, walk, where_set, words_of
from jaxtrain.config.files import (
    find_config,
    is_run,
    parse_value,
    read_run,
    read_yaml,
    recorded_parts,
    shipped_configs,
    to_yaml,
)
from jaxtrain.config.model import ALL_SIZES
from jaxtrain.config.published import adapter_settings, published_settings
from jaxtrain.config.schema import AXES, Config, LoraConfig
from jaxtrain.config.secrets import redacted, redacted_keys
from jaxtrain.errors import ConfigError
from jaxtrain.formats.hub import config_origin, published_place, tokenizer_origin

# Groups that a function of the user can make: a key `call` in one of them sets its kind as well.
CALLABLE_GROUPS = tuple(name for name, field in Config.model_fields.items() if CALLED in members(field.annotation))
# Of these two keys, the one that is set later replaces the other.
_REPLACES: dict[KeyPath, str] = {("train", "steps"): "epochs", ("train", "epochs"): "steps"}
# Keys that decide what becomes of the others of their group: they are set first.
_DECIDING = ("kind", "from", "size", "call")


@dataclass(frozen=True)
class Loaded:
    """A config and where each key that somebody set comes from.

    Attributes:
        config: the validated config.
        name: that of the run directory.
        origins: dotted key -> "quickstart.yaml:12", "command line", "keyword" or "size gpt2".
        notes: a line for each key that was left out.
        run_dir: the run whose config this is; None: it is not of a run.
        from_python: part of that run that came from Python, and is not what the config describes -> its name.
    """

    config: Config
    name: str
    origins: dict[str, str]
    notes: tuple[str, ...]
    run_dir: Path | None = None
    from_python: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def check_described(self, *, given: Iterable[str] = ()) -> None:
        """Raise a `ConfigError` where a part of the run came from Python and is not among those given again."""
        for part, name in self.from_python.items():
            if part not in given:
                raise ConfigError(
                    f"{self.run_dir} was trained with a {part} from Python ({name}), which its config does not "
                    f"describe; call jt.run_config({str(self.run_dir)!r}, {part}=...) with it"
                )


def load_config(
    name: str | Path | Mapping[str, Any] | None = None,
    *,
    overrides: Iterable[str] = (),
    keywords: Mapping[str, Any] | None = None,
    origin: str = "config",
    weights: bool = True,
) -> Loaded:
    """Load a config: a shipped name, a path, a run or a mapping, then `key=value` strings, then keywords.

    Args:
        name: a shipped name ("quickstart"), a path to a YAML file, the directory of a run (its own config, as it was
            resolved), a nested mapping, or None for all defaults.
        overrides: strings as on the command line ("train.steps=100"); later ones win.
        keywords: a nested mapping from Python ({"train": {"steps": 100}} or {"train.steps": 100}).
        origin: where a mapping comes from, for messages.
        weights: whether `model.from` is opened where the config gives the `model.size` beside it; False: for a plan.

    Returns:
        The validated config with its name and the origin of each key.

    Raises:
        ConfigError: no such config, or a wrong key or value; one line naming key, origin and what would work.

    Example:
        >>> loaded = jt.load_config("quickstart", overrides=["train.steps=20"], keywords={"seed": 3})
        >>> loaded.config.train.steps, loaded.config.seed, loaded.origins["train.steps"]
        (20, 3, 'command line')
    """
    tree = _Tree(weights=weights)
    label = "run"
    run_dir = None
    from_python: dict[str, str] = {}
    if isinstance(name, Mapping):
        tree.set((), name, origin)
    elif name is not None and str(name) not in shipped_configs() and is_run(local_path(name, what="config")):
        run_dir = Path(name)
        saved = read_run(run_dir)
        label = str(saved.get("name") or label)
        from_python = {part: text for part, text in recorded_parts(saved).items() if text is not None}
        tree.set((), saved["config"], f"{run_dir}/run.json")
    elif name is not None:
        path = find_config(str(name))
        label = path.stem
        values, lines = read_yaml(path)
        tree.set((), values, path.name)
        tree.add_lines({key: str(line) for key, line in lines.items()})
    for override in overrides:
        tree.set(*_split_override(override), "command line")
    tree.set((), keywords or {}, "keyword")
    tree.take_published()
    tree.take_adapter()
    for key in redacted_keys(tree.values):
        raise ConfigError(f"{key} looked like a secret, so the run did not save it; give it again: {key}=...")
    try:
        config = Config.model_validate(tree.values)
    except ValidationError as error:
        raise ConfigError(explain(error, Config, tree.values, tree.where)) from None
    size = str(getattr(config.model, "size", None))
    origins = {f"model.{key}": f"size {size}" for key in ALL_SIZES.get(size, {})}
    origins |= {".".join(path): where for path, where in tree.where.items()}
    return Loaded(config, config.name or label, origins, tuple(tree.notes), run_dir, from_python)


# --- The layers of a config, merged. ---


class _Tree:
    """Values from several layers, merged in order, each leaf with where it was set.

    Attributes:
        weights: whether published models are opened, see `load_config`.
        values: the nested values.
        where: path of a leaf -> where it was set, in the order of setting.
        notes: a line for each key that was replaced.
    """

    def __init__(self, *, weights: bool) -> None:
        self.weights = weights
        self.values: dict[str, Any] = {}
        self.where: dict[KeyPath, str] = {}
        self.notes: list[str] = []

    def set(self, path: KeyPath, value: Any, where: str) -> None:
        """Merge a value at a path; a mapping is merged key by key."""
        if path[1:] == ("call",) and path[0] in (*CALLABLE_GROUPS, "task"):
            path = path[:1]
            value = {"call": value}
        if path == ("parallel",) and value == "auto":
            degrees = [axis for axis in AXES if axis in self._group("parallel")]
            self._drop("parallel", degrees, f"parallel=auto ({where})")
            path = ("parallel", "auto")
            value = True
        if path[1:] in (("kind",), ("size",)):
            self._make_room(path[0], {path[1]: value}, where)
        if not isinstance(value, Mapping):
            self._set_leaf(path, value, where)
            return
        if len(path) == 1:
            if path[0] in CALLABLE_GROUPS and "call" in value and "kind" not in value:
                value = {"kind": CALLED, **value}
            if path == ("model",) and not self.weights and str(value.get("size")) in ALL_SIZES:
                # The size says the same as the published model, whose files a plan does not need.
                value = {key: entry for key, entry in value.items() if key != "from"}
            self._make_room(path[0], value, where)
        for key in sorted(value, key=_rank):
            keys = str(key).split(".")
            if "args" in path:
                keys = [str(key)]  # names of arguments are those of the function, and not paths
            child = (*path, *keys)
            if child[1:] == ("call",):
                self._set_leaf(child, value[key], where)
            else:
                self.set(child, value[key], where)
        if not value and path:
            self._mapping_at(path)
            self.where[path] = where

    def add_lines(self, lines: Mapping[KeyPath, str]) -> None:
        """Add the numbers of lines to the places in a file, where all values are from that file."""
        for path, file in self.where.items():
            self.where[path] = f"{file}:{where_set(lines, path)}"

    def _group(self, name: str) -> dict[str, Any]:
        """Return what is set of a group; a value in its place, which the schema refuses, counts as nothing."""
        group = self.values.get(name)
        return group if isinstance(group, dict) else {}

    def _mapping_at(self, path: KeyPath) -> dict[str, Any]:
        """Return the mapping at a path; it replaces what else stands on the way there."""
        node = self.values
        for depth, part in enumerate(path):
            if not isinstance(node.get(part), dict):
                node[part] = {}
                self.where.pop(path[: depth + 1], None)
            node = node[part]
        return node

    def _set_leaf(self, path: KeyPath, value: Any, where: str) -> None:
        group = self._mapping_at(path[:-1])
        before = self.where.get(path, "run.json")
        if path == ("model", "from") and value and group.get("from") and not before.endswith("run.json"):
            # It takes the place of the config's own published model, so that what the config sets beside it still wins.
            group.pop("size", None)
            self.where.pop(("model", "size"), None)
        else:
            self._forget(path)
        group[path[-1]] = value
        self.where[path] = where
        other = _REPLACES.get(path)
        if other is None or value is None or group.get(other) is None:
            return
        # Both in one file, or both on the command line, are a mistake, which the schema reports.
        if _file_of(self.where["train", other]) != where:
            self._drop("train", [other], f"{'.'.join(path)} ({where})")

    def _forget(self, path: KeyPath) -> list[str]:
        """Forget where a path and what is below it were set; return it, as lines."""
        below = [known for known in self.where if known[: len(path)] == path]
        return [f"{'.'.join(known)} ({self.where.pop(known)})" for known in below]

    def _drop(self, name: str, keys: Iterable[str], successor: str) -> None:
        """Drop keys of a group that something replaces, with a note for each."""
        for key in list(keys):
            del self.values[name][key]
            self.notes += [f"{line} is replaced by {successor}" for line in self._forget((name, key))]

    def _make_room(self, name: str, value: Mapping[str, Any], where: str) -> None:
        """Drop older keys that a new kind cannot have, that a new size sets, or that an earlier function takes."""
        group = self._group(name)
        kind = _kinds(name).get(str(value.get("kind")))
        if kind is not None and value["kind"] != group.get("kind", _default_kind(name)):
            foreign = [key for key in group if key != "kind" and self._is_foreign((name, key), group[key], kind, where)]
            self._drop(name, foreign, f"{name}.kind ({where})")
        sized = ALL_SIZES.get(str(value.get("size")), {})
        self._drop(name, [key for key in group if key in sized], f"{name}.size ({where})")
        if "args" in group and "call" in value and value["call"] != group.get("call"):
            self._drop(name, ["args"], f"{name}.call ({where})")

    def _is_foreign(self, path: KeyPath, value: Any, kind: type[Any], where: str) -> bool:
        """Return whether a kind cannot have a value, which was set for another kind."""
        if path[-1] not in kind.model_fields:
            return True
        # A word of another list was meant for the older kind, unless it is set together with the new one.
        words = words_of(kind.model_fields[path[-1]].annotation)
        return bool(words) and isinstance(value, str) and value not in words and self.where.get(path) != where

    def take_published(self) -> None:
        """Set the keys that the published model gives: those set before `model.from` give way, those after it win."""
        group = self._group("model")
        source = group.get("from")
        if not isinstance(source, str):
            return
        where = self.where["model", "from"]
        order = list(self.where)
        later = {path[1] for path in order[order.index(("model", "from")) :] if path[:1] == ("model",)}
        size_origin = self.where.get(("model", "size"), "")
        if "size" in later and _file_of(size_origin) == _file_of(where) and str(group["size"]) in ALL_SIZES:
            # The size says the same as the published model.
            del group["size"]
            del self.where["model", "size"]
        kind = _kinds("model").get(str(group.get("kind")))
        # The config of a run holds every key, and the model may be gone. What computes attention is the machine's.
        if kind is not None and {*kind.model_fields} - {"kind", "attention"} <= later:
            return
        folder = local_path(published_place(source, what=f"model.from ({where})"), what="model.from")
        settings = published_settings(str(folder))
        origin = str(config_origin(Path(folder)))
        group["from"] = str(folder)
        self._make_room("model", {"kind": settings["kind"]}, where)
        older = [key for key in group if key not in later and key != "kind" and (key in settings or key == "size")]
        self._drop("model", older, f"model.from ({where})")
        sized = ALL_SIZES.get(str(group.get("size")), {})
        for key, value in settings.items():
            configured = group.get(key)
            if isinstance(value, dict) and isinstance(configured, dict) and "kind" not in configured:
                # Whoever names a kind describes all of it; other groups are completed.
                group[key] = value | configured
                self.where = {("model", key): origin, **self.where}
            elif key not in later and key not in sized:
                self._set_leaf(("model", key), value, origin)
        self._take_tokenizer(Path(folder), where)

    def _take_tokenizer(self, folder: Path, where: str) -> None:
        """Use the tokenizer of the published model where the data takes one and none is set together with it."""
        file = tokenizer_origin(folder)
        kind = _kinds("data").get(str(self._group("data").get("kind", _default_kind("data"))))
        if file is None or kind is None or "tokenizer" not in kind.model_fields:
            return
        # A tokenizer that is set in the same layer as `from`, or in a later one, wins.
        layers = [_file_of(place) for place in self.where.values()]
        later = layers[list(self.where).index(("model", "from")) :]
        layers = {_file_of(place) for path, place in self.where.items() if path[:2] == ("data", "tokenizer")}
        if layers and layers.isdisjoint(later):
            self._drop("data", ["tokenizer"], f"model.from ({where})")
        if "tokenizer" not in self._group("data"):
            self.set(("data", "tokenizer"), {"kind": "file", "path": str(file)}, str(file))

    def take_adapter(self) -> None:
        """Set the keys of the adapters that an adapter's folder gives and nobody has set."""
        finetune = self._group("finetune")
        adapter = finetune.get("adapter")
        lora = finetune.get("lora") or {}
        if not isinstance(adapter, str) or not isinstance(lora, dict):
            return
        if lora.keys() >= LoraConfig.model_fields.keys():  # of a run, whose adapter may be gone
            return
        model = self._group("model")
        base = model.get("from")
        if not isinstance(base, str):
            raise ConfigError(f"finetune.adapter={adapter} needs its base; set model.from to it")
        for key, value in adapter_settings(adapter, base=base, vocab_size=model.get("vocab_size")).items():
            if key not in lora:
                self._set_leaf(("finetune", "lora", key), value, adapter)


def _rank(key: object) -> int:
    return _DECIDING.index(key) if key in _DECIDING else len(_DECIDING)


def _file_of(place: str) -> str:
    """Return the layer of a place: "quickstart.yaml:12" is in "quickstart.yaml"."""
    return place.partition(":")[0]


def _kinds(name: str) -> Mapping[str, type[Any]]:
    """Return the kinds of a group: name -> class."""
    return members(Config.model_fields[name].annotation) if name in Config.model_fields else {}


def _default_kind(name: str) -> str | None:
    return getattr(Config.model_fields[name].default, "kind", None)


_MAX_DEPTH = 100  # of a key; each dot is one level of recursion


def _split_override(override: str) -> tuple[KeyPath, Any]:
    """Return the path and the value of `key=value`."""
    key, equals, text = override.removeprefix("--").partition("=")
    parts = key.split(".")
    if not equals or not all(parts) or len(parts) > _MAX_DEPTH:
        raise ConfigError(f"cannot read {override!r} (command line); write key=value, as in train.steps=100")
    return tuple(parts), parse_value(text, f"command line, {key}")


# --- A config as text. ---


@dataclass(frozen=True)
class DescribedKey(Key):
    """A key of a loaded config with its value and where it was set, all as text."""

    value: str
    origin: str


def value_text(value: object) -> str:
    """Return a value as it is written after `key=`; a text that YAML would read as another type is quoted."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and to_yaml({"key": value}) == f"key: {value}\n":
        return value
    return json.dumps(value, ensure_ascii=False, default=lambda group: group.model_dump(mode="json"))


def nearest_key(path: str, config: Config) -> str | None:
    """Return the key of a config that a wrong one most likely meant."""
    return nearest(path, walk(Config, config))


def describe(loaded: Loaded) -> list[DescribedKey]:
    """Return the keys of a config: first those that belong to no group, then the groups, the kind of each first."""
    where = {tuple(key.split(".")): origin for key, origin in loaded.origins.items()}
    groups = list(Config.model_fields)
    ranked: list[tuple[int, bool, DescribedKey]] = []
    for key in walk(Config, loaded.config):
        group, _, rest = key.path.partition(".")
        kinds = _kinds(group) if rest == "kind" else {}
        described = DescribedKey(
            path=key.path,
            value=value_text(redacted(functools.reduce(getattr, key.path.split("."), loaded.config), key.path)),
            type=" | ".join(kinds) if len(kinds) > 1 else key.type,
            default=key.default if key.default == "(required)" else value_text(key.default),
            origin=where_set(where, tuple(key.path.split("."))),
            doc=key.doc,
            also_called=key.also_called,
        )
        ranked.append((groups.index(group) if rest else -1, len(kinds) < 2, described))
    ranked.sort(key=lambda row: row[:2])
    return [key for *_, key in ranked]
