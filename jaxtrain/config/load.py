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

# A key `call` in them says the kind as well.
CALLABLE_GROUPS = tuple(name for name, field in Config.model_fields.items() if CALLED in members(field.annotation))
# Of these keys of `train`, the later one counts the steps.
_INSTEAD = {"steps": "epochs", "epochs": "steps"}
# These decide what becomes of the other keys of a group.
_FIRST = ("kind", "from", "size", "call")


@dataclass(frozen=True)
class Loaded:
    """A config and where each key that somebody set comes from.

    `name` is that of the run directory; `origins` are dotted key -> "quickstart.yaml:12", "command line", "keyword" or
    "size gpt2"; `notes` a line for each key that was left out. `run_dir` is the run whose config this is, if one was
    given, and `from_python` its parts that came from Python and are not what the config says: part -> name.
    """

    config: Config
    name: str
    origins: dict[str, str]
    notes: tuple[str, ...]
    run_dir: Path | None = None
    from_python: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def check_described(self, *, given: Iterable[str] = ()) -> None:
        """Raises a ConfigError where a part of the run came from Python and is not among those that are given again."""
        for part in (part for part in self.from_python if part not in given):
            raise ConfigError(
                f"{self.run_dir} was trained with a {part} from Python ({self.from_python[part]}), which its config "
                f"does not describe; call jt.run_config({str(self.run_dir)!r}, {part}=...) with it"
            )


class _Tree:
    """Values from several layers, merged in order, each leaf with where it was set."""

    def __init__(self, *, weights: bool) -> None:
        self.weights = weights
        self.values: dict[str, Any] = {}
        # In the order of setting.
        self.where: dict[KeyPath, str] = {}
        self.notes: list[str] = []

    def set(self, path: KeyPath, value: Any, where: str) -> None:
        """Merge a value (a mapping merges key by key) at a path."""
        if path[1:] == ("call",) and path[0] in (*CALLABLE_GROUPS, "task"):
            path, value = path[:1], {"call": value}
        if path == ("parallel",) and value == "auto":
            degrees = [axis for axis in AXES if axis in self._given("parallel")]
            self._drop("parallel", degrees, f"parallel=auto ({where})")
            path, value = ("parallel", "auto"), True
        if path[1:] in (("kind",), ("size",)):
            self._yield_to(path[0], {path[1]: value}, where)
        if not isinstance(value, Mapping):
            self._leaf(path, value, where)
            return
        if len(path) == 1:
            if path[0] in CALLABLE_GROUPS and "call" in value and "kind" not in value:
                value = {"kind": CALLED, **value}
            if path == ("model",) and not self.weights and str(value.get("size")) in ALL_SIZES:
                # It says the same as the published model, whose files a plan needs not.
                value = {key: one for key, one in value.items() if key != "from"}
            self._yield_to(path[0], value, where)
        for key in sorted(value, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST)):
            # Names of arguments, and keys of mappings among them, are the function's: they are no paths.
            full = (*path, *([str(key)] if "args" in path else str(key).split(".")))
            (self._leaf if full[1:] == ("call",) else self.set)(full, value[key], where)
        if not value and path:
            self._node(path)
            self.where[path] = where

    def _given(self, name: str) -> dict[str, Any]:
        """What is set of a group; a value in its place, which the schema refuses, says nothing."""
        group = self.values.get(name)
        return group if isinstance(group, dict) else {}

    def _leaf(self, path: KeyPath, value: Any, where: str) -> None:
        group, before = self._node(path[:-1]), self.where.get(path, "run.json")
        if path == ("model", "from") and value and group.get("from") and not before.endswith("run.json"):
            # It takes the place of the config's own published model, so that what the config sets beside it still wins.
            group.pop("size", None)
            self.where.pop(("model", "size"), None)
        else:
            for known in [known for known in self.where if known[: len(path)] == path]:
                del self.where[known]
        group[path[-1]] = value
        self.where[path] = where
        if path[:1] == ("train",) and path[-1] in _INSTEAD and value is not None:
            other = ("train", _INSTEAD[path[-1]])
            # Both in one file, or both on the command line, are a mistake.
            if group.get(other[1]) is not None and self.where[other].partition(":")[0] != where:
                self._drop("train", other[1:], f"{'.'.join(path)} ({where})")

    def _node(self, path: KeyPath) -> dict[str, Any]:
        node = self.values
        for depth, part in enumerate(path):
            if not isinstance(node.get(part), dict):
                node[part] = {}
                self.where.pop(path[: depth + 1], None)
            node = node[part]
        return node

    def _yield_to(self, name: str, value: Mapping[str, Any], where: str) -> None:
        """Drop older keys that a new kind cannot have, that a new size sets, or that an earlier function takes."""
        group = self._given(name)
        kind = _kinds(name).get(str(value.get("kind")))
        if kind is not None and value["kind"] != group.get("kind", _default_kind(name)):
            foreign = [key for key in group if key != "kind" and self._is_foreign((name, key), group[key], kind, where)]
            self._drop(name, foreign, f"{name}.kind ({where})")
        sized = ALL_SIZES.get(str(value.get("size")), {})
        self._drop(name, [key for key in group if key in sized], f"{name}.size ({where})")
        if "args" in group and value.get("call", group.get("call")) != group.get("call"):
            self._drop(name, ["args"], f"{name}.call ({where})")

    def _is_foreign(self, path: KeyPath, value: Any, kind: type[Any], where: str) -> bool:
        if path[-1] not in kind.model_fields:
            return True
        # A word of another list was meant for the older kind, unless it is set together with the new one.
        words = words_of(kind.model_fields[path[-1]].annotation)
        return bool(words) and isinstance(value, str) and value not in words and self.where.get(path) != where

    def _drop(self, name: str, keys: Iterable[str], successor: str) -> None:
        for key in list(keys):
            del self.values[name][key]
            for known in [path for path in self.where if path[:2] == (name, key)]:
                self.notes.append(f"{'.'.join(known)} ({self.where.pop(known)}) is replaced by {successor}")

    def take_published(self) -> None:
        """Set the keys that the published model gives: those set before `model.from` give way, those after it win."""
        named, path = self._given("model").get("from"), ("model", "from")
        if not isinstance(named, str):
            return
        where, order = self.where[path], list(self.where)
        later = {known[1] for known in order[order.index(path) :] if known[:1] == ("model",)}
        size, group = self.where.get(("model", "size"), ""), self._given("model")
        if "size" in later and size.partition(":")[0] == where.partition(":")[0] and str(group["size"]) in ALL_SIZES:
            del group["size"], self.where["model", "size"]  # it says the same as the published model
        kind = _kinds("model").get(str(group.get("kind")))
        # The config of a run holds every key, and the model may be gone. What computes attention is the machine's.
        if kind is not None and {*kind.model_fields} - {"kind", "attention"} <= later:
            return
        folder = str(local_path(published_place(named, what=f"model.from ({where})"), what="model.from"))
        settings, origin = published_settings(folder), str(config_origin(Path(folder)))
        self.values["model"]["from"] = folder
        self._yield_to("model", {"kind": settings["kind"]}, where)
        older = [key for key in group if key not in later and (key in settings or key == "size")]
        self._drop("model", [key for key in older if key != "kind"], f"model.from ({where})")
        replaced = ALL_SIZES.get(str(group.get("size")), {})
        for key, value in settings.items():
            own = group.get(key)
            if isinstance(value, dict) and isinstance(own, dict) and "kind" not in own:
                group[key] = value | own  # whoever names a kind describes the whole of it
                self.where = {("model", key): origin, **self.where}
            elif key not in later and key not in replaced:
                self._leaf(("model", key), value, origin)
        self._take_tokenizer(Path(folder), where)

    def _take_tokenizer(self, folder: Path, where: str) -> None:
        """Use the tokenizer of the published model where the data takes one and none is set together with it."""
        file, data = tokenizer_origin(folder), self._given("data")
        kind = _kinds("data").get(str(data.get("kind", _default_kind("data"))))
        if file is None or kind is None or "tokenizer" not in kind.model_fields:
            return
        layers = [place.partition(":")[0] for place in self.where.values()]
        # A tokenizer that is set in the same layer as `from`, or in a later one, wins.
        later = layers[list(self.where).index(("model", "from")) :]
        own = {layer for path, layer in zip(self.where, layers, strict=True) if path[:2] == ("data", "tokenizer")}
        if own and own.isdisjoint(later):
            self._drop("data", ["tokenizer"], f"model.from ({where})")
        if "tokenizer" not in self._given("data"):
            self.set(("data", "tokenizer"), {"kind": "file", "path": str(file)}, str(file))

    def take_adapter(self) -> None:
        """Set the keys of the adapters that an adapter's folder gives and nobody has set."""
        finetune, base = self._given("finetune"), self._given("model").get("from")
        adapter = finetune.get("adapter")
        lora = finetune.get("lora") or {}
        if not isinstance(adapter, str) or not isinstance(lora, dict):
            return
        if lora.keys() >= LoraConfig.model_fields.keys():  # of a run, whose adapter may be gone
            return
        if not isinstance(base, str):
            raise ConfigError(f"finetune.adapter={adapter} needs its base; set model.from to it")
        vocab_size = self._given("model").get("vocab_size")
        for key, value in adapter_settings(adapter, base=base, vocab_size=vocab_size).items():
            if key not in lora:
                self._leaf(("finetune", "lora", key), value, adapter)


def _kinds(name: str) -> Mapping[str, type[Any]]:
    return members(Config.model_fields[name].annotation) if name in Config.model_fields else {}


def _default_kind(name: str) -> str | None:
    return getattr(Config.model_fields[name].default, "kind", None)


def _split_override(override: str) -> tuple[KeyPath, Any]:
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"cannot read {override!r} (command line); write key=value, as in train.steps=100")
    return tuple(key.split(".")), parse_value(text, f"command line, {key}")


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
    tree, label, run_dir, own = _Tree(weights=weights), "run", None, {}
    if isinstance(name, Mapping):
        tree.set((), name, origin)
    elif name is not None and str(name) not in shipped_configs() and is_run(local_path(name, what="config")):
        run_dir = Path(name)
        saved = read_run(run_dir)
        label = str(saved.get("name") or label)
        own = {part: found for part, found in recorded_parts(saved).items() if found is not None}
        tree.set((), saved["config"], f"{run_dir}/run.json")
    elif name is not None:
        path = find_config(str(name))
        label = path.stem
        values, lines = read_yaml(path)
        places = {known: str(line) for known, line in lines.items()}
        tree.set((), values, path.name)
        for known in tree.where:
            tree.where[known] = f"{path.name}:{where_set(places, known)}"
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
    size = getattr(config.model, "size", None)
    sized = {("model", key): f"size {size}" for key in ALL_SIZES.get(size or "", {})}
    origins = {".".join(path): where for path, where in {**sized, **tree.where}.items()}
    return Loaded(config, config.name or label, origins, tuple(tree.notes), run_dir, own)


@dataclass(frozen=True)
class DescribedKey(Key):
    """A key of a loaded config with its value and where it was set, all as text."""

    value: str
    origin: str


def value_text(value: object) -> str:
    """Returns a value as it is written after `key=`; a text that YAML would read as another type is quoted."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and to_yaml({"key": value}) == f"key: {value}\n":
        return value
    return json.dumps(value, ensure_ascii=False, default=lambda group: group.model_dump(mode="json"))


def nearest_key(path: str, config: Config) -> str | None:
    """Returns the key of a config that a wrong one most likely meant."""
    return nearest(path, walk(Config, config))


def describe(loaded: Loaded) -> list[DescribedKey]:
    """Returns the keys of a config: first those that belong to no group, then the groups, the kind of each first."""
    where = {tuple(key.split(".")): origin for key, origin in loaded.origins.items()}
    groups = list(Config.model_fields)
    found: list[tuple[int, bool, DescribedKey]] = []
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
        found.append((groups.index(group) if rest else -1, len(kinds) < 2, described))
    return [key for *_, key in sorted(found, key=lambda one: one[:2])]
