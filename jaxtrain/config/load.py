"""One loader for YAML file, `key=value` and Python keywords; every mistake is one line that says where it was set."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxtrain.config.adapter import adapter_settings
from jaxtrain.config.arguments import check_kind, refusal, shown
from jaxtrain.config.base import Group
from jaxtrain.config.call import CALLED
from jaxtrain.config.finetune import LoraConfig
from jaxtrain.config.keys import can_be, members
from jaxtrain.config.local_path import local_path
from jaxtrain.config.mistakes import KeyPath, explain
from jaxtrain.config.published import published_settings
from jaxtrain.config.saved_run import is_run, read_run, recorded_parts
from jaxtrain.config.schema import AXES, Config
from jaxtrain.config.secrets import redacted_keys
from jaxtrain.config.shipped import find_config, is_shipped
from jaxtrain.config.sizes import ALL_SIZES
from jaxtrain.config.yaml_file import parse_value, read_yaml
from jaxtrain.errors import ConfigError
from jaxtrain.published.config_file import config_origin, tokenizer_origin
from jaxtrain.published.hub import published_place


@dataclass(frozen=True)
class Loaded:
    """A config and where each key that somebody set comes from.

    Attributes:
        config: the validated tree.
        name: the name of the config (file stem), used for the run directory.
        origins: dotted key -> "quickstart.yaml:12", "command line", "keyword" or "size gpt2".
        notes: a line for each key that was left out (of another kind or a replaced size).
        run_dir: the run whose config this is, where the directory of a run was given; None: another source.
        from_python: part of that run (`model`, `task`, `data`) -> its name, for each part that came from Python and is
            not what the config says.
    """

    config: Config
    name: str
    origins: dict[str, str]
    notes: tuple[str, ...]
    run_dir: Path | None = None
    from_python: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def check_described(self, *, given: Iterable[str] = ()) -> None:
        """Raises where the config is of a run whose parts came from Python, so that it does not describe them.

        Args:
            given: Parts that are passed in again.

        Raises:
            ConfigError: Names the first such part, and how to pass it.
        """
        missing = [part for part in self.from_python if part not in given]
        if missing:
            part = missing[0]
            raise ConfigError(
                f"{self.run_dir} was trained with a {part} from Python ({self.from_python[part]}), which its config "
                f"does not describe; call jt.run_config({str(self.run_dir)!r}, {part}=...) with it"
            )


# A key `call` in them says the kind as well.
CALLABLE_GROUPS = tuple(name for name, field in Config.model_fields.items() if CALLED in members(field.annotation))


class _Tree:
    """Values from several layers, merged in order, each leaf with where it was set."""

    def __init__(self, *, weights: bool) -> None:
        self.weights = weights
        self.size_beside: str | None = None
        # The config of a run holds the keys that its published model gave, and the model may be gone.
        self.reads_published = True
        self.values: dict[str, Any] = {}
        self.where: dict[KeyPath, str] = {}
        self.notes: list[str] = []

    def set(self, path: KeyPath, value: Any, where: str) -> None:
        """Merge a value (a mapping merges key by key) at a path."""
        if len(path) == 2 and path[0] in (*CALLABLE_GROUPS, "task") and path[1] == "call":
            path, value = path[:1], {"call": value}
        if path == ("parallel",) and value == "auto":
            self._drop("parallel", [axis for axis in AXES if axis in self._node(path)], f"parallel=auto ({where})")
            path, value = ("parallel", "auto"), True
        if isinstance(value, Mapping):
            if len(path) == 1 and path[0] in CALLABLE_GROUPS and "call" in value and "kind" not in value:
                value = {"kind": CALLED, **value}
            reads, self.reads_published = self.reads_published, self.reads_published and not _is_whole(path, value)
            if path == ("model",) and value.get("from") and value.get("size") in ALL_SIZES and self.reads_published:
                # The size says the same as the published model, and is there where its weights are not.
                self.size_beside = value["size"] if self.weights else None
                value = {key: one for key, one in value.items() if key != ("size" if self.weights else "from")}
            self._yield_to(path, value, where)
            # The kind goes first: it decides which of the older keys stay.
            for key in sorted(value, key=lambda key: (key != "kind", key != "from", key != "size", key != "call")):
                # Names of arguments, and keys of mappings among them, are the function's: they are no paths.
                parts = [str(key)] if "args" in path else str(key).split(".")
                self._set_inside(path, parts, value[key], where)
            self.reads_published = reads
            if not value and path:
                self._node(path)
                self.where[path] = where
            return
        if len(path) == 2 and path[1] in ("kind", "size"):
            self._yield_to(path[:1], {path[1]: value}, where)
        if path == ("model", "from") and isinstance(value, str):
            value = str(local_path(published_place(value, what=f"model.from ({where})"), what="model.from"))
            if self.reads_published:
                self._take_published(value, where)
        if path == ("model", "head", "kind"):
            self._drop_published_head(where)
        self._leaf(path, value, where)

    def _drop_published_head(self, where: str) -> None:
        """Drop the head of a published model, which was set as one value: who names a kind describes the whole head."""
        model, path = self._given("model"), ("model", "head")
        if path in self.where and isinstance(model.get("head"), dict):
            del self.where[path]
            model["head"] = {key: value for key, value in model["head"].items() if (*path, key) in self.where}

    def _take_published(self, folder: str, where: str) -> None:
        """Set the keys of the model that a published model gives; what is set later has precedence."""
        settings = published_settings(folder)
        size, self.size_beside = self.size_beside, None
        wrong = [key for key in ("num_layers", "embed_dim") if size and settings.get(key) != ALL_SIZES[size].get(key)]
        if wrong:
            raise ConfigError(
                f"model.from={folder} ({where}) has another {wrong[0]} than model.size={size}; leave it out"
            )
        kind = self._given("model").get("kind", settings["kind"])
        # One that was set elsewhere, before, gives way to the published model.
        if kind != settings["kind"] and self.where.get(("model", "kind")) == where:
            raise ConfigError(
                f"model.kind={kind} ({where}), but model.from={folder} is of kind {settings['kind']}; leave out one of "
                "the two"
            )
        self._yield_to(("model",), {"kind": settings["kind"]}, where)
        group = self._node(("model",))
        self._drop("model", [key for key in group if key in settings or key == "size"], f"model.from ({where})")
        for key, value in settings.items():
            self._leaf(("model", key), value, str(config_origin(Path(folder))))
        # Another tokenizer than the model's would make its weights useless; one set together with it is meant.
        tokenizers = [where_set for path, where_set in self.where.items() if path[:2] == ("data", "tokenizer")]
        if tokenizers and where not in tokenizers and tokenizer_origin(Path(folder)) is not None:
            self._drop("data", ["tokenizer"], f"model.from ({where})")

    def take_tokenizer(self) -> None:
        """Use the tokenizer of the published model where the data takes one and none is set."""
        model = self.values.get("model")
        folder = model.get("from") if isinstance(model, dict) else None
        data = self._given("data")
        kinds = members(Config.model_fields["data"].annotation)
        kind = kinds.get(str(data.get("kind", Config.model_fields["data"].default.kind)))
        if not isinstance(folder, str) or not self.reads_published or kind is None:
            return
        if "tokenizer" in kind.model_fields and "tokenizer" not in data:
            file = tokenizer_origin(Path(folder))
            if file is not None:
                self.set(("data", "tokenizer"), {"kind": "file", "path": str(file)}, str(file))

    def take_adapter(self) -> None:
        """Set the keys of the adapters that an adapter's folder gives and nobody has set."""
        group, model = self.values.get("finetune"), self.values.get("model")
        adapter = group.get("adapter") if isinstance(group, dict) else None
        if not isinstance(group, dict) or not isinstance(adapter, str):
            return
        lora = group.get("lora")
        known = set(lora) if isinstance(lora, dict) else set()
        if known >= set(LoraConfig.model_fields):  # of a run, whose adapter may be gone
            return
        base = model.get("from") if isinstance(model, dict) else None
        if not isinstance(base, str):
            raise ConfigError(
                f"finetune.adapter={adapter} ({self.where['finetune', 'adapter']}) without its base; set model.from to "
                "the published folder that it is an adapter of"
            )
        for key, value in adapter_settings(adapter, base=base).items():
            if key not in known:
                self._leaf(("finetune", "lora", key), value, adapter)

    def _given(self, name: str) -> dict[str, Any]:
        """What is set of a group; a value in its place, which the schema refuses, says nothing."""
        group = self.values.get(name)
        return group if isinstance(group, dict) else {}

    def _set_inside(self, path: KeyPath, parts: Sequence[str], value: Any, where: str) -> None:
        """Merge a value below a group whose kind is set already."""
        full = (*path, *parts)
        if len(path) == 1 and parts == ["call"]:
            self._leaf(full, value, where)
        else:
            self.set(full, value, where)

    def _leaf(self, path: KeyPath, value: Any, where: str) -> None:
        node = self._node(path[:-1])
        if path[-1] in node:
            # What was set below is gone, and the order of `where` is the order of setting.
            for known in [known for known in self.where if known[: len(path)] == path]:
                del self.where[known]
        node[path[-1]] = value
        self.where[path] = where

    def _node(self, path: KeyPath) -> dict[str, Any]:
        node = self.values
        for depth, part in enumerate(path):
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                child = node[part] = {}
                self.where.pop(path[: depth + 1], None)
            node = child
        return node

    def _yield_to(self, path: KeyPath, value: Mapping[str, Any], where: str) -> None:
        """Drop older keys that a new kind cannot have, that a new size sets, or that an earlier function takes."""
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
            old = kinds.get(str(group.get("kind", default)))
            for key in group:
                # A word that the older kind knew, from elsewhere than the new kind, was meant for the older one.
                gives_way = old is not None and can_be(old, key, group[key]) and self.where.get((path[0], key)) != where
                if key not in kinds[kind].model_fields or (gives_way and not can_be(kinds[kind], key, group[key])):
                    dropped.append(key)
            dropped = [key for key in dropped if key != "kind"]
        if isinstance(size, str) and size in ALL_SIZES:
            dropped += [key for key in group if key in ALL_SIZES[size]]
        # Arguments are those of the function that they were written for.
        by = "kind" if kind else "size"
        if "call" in value and value["call"] != group.get("call", value["call"]) and "args" in group:
            dropped, by = [*dropped, "args"], "call"
        self._drop(path[0], dict.fromkeys(dropped), f"{path[0]}.{by} ({where})")

    def _drop(self, name: str, keys: Iterable[str], successor: str) -> None:
        for key in keys:
            del self.values[name][key]
            for known in [p for p in self.where if p[:2] == (name, key)]:
                self.notes.append(f"{'.'.join(known)} ({self.where.pop(known)}) gave way to {successor}")


def _is_whole(path: KeyPath, value: Mapping[str, Any]) -> bool:
    """Whether a mapping is a whole model group as a run saved it, which the published model need not fill."""
    kind = members(Config.model_fields["model"].annotation).get(str(value.get("kind")))
    # What computes attention is left to the machine where a saved run is opened.
    return path == ("model",) and kind is not None and {*kind.model_fields} - {"attention"} <= {*value}


def _with_kinds(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the default kind written into groups that leave it out, where pydantic wants it."""
    filled = dict(values)
    for name, field in Config.model_fields.items():
        group = values.get(name)
        kinds = members(field.annotation)
        if not isinstance(group, dict) or len(kinds) < 2:
            continue
        group = group if "kind" in group else {"kind": field.default.kind, **group}
        chosen = kinds.get(str(group["kind"]))
        filled[name] = group if chosen is None else {key: _with_inner_kind(chosen, key, group[key]) for key in group}
    return filled


def _with_inner_kind(group: type[Group], key: str, value: Any) -> Any:
    """The value of an optional key whose groups have kinds, with the first kind where it names none."""
    field = group.model_fields.get(key)
    kinds = [] if field is None or field.is_required() else list(members(field.annotation))
    return {"kind": kinds[0], **value} if len(kinds) > 1 and isinstance(value, dict) and "kind" not in value else value


def _check_call(name: Any, overrides: Any, keywords: Any) -> None:
    """Raise where an argument of `load_config` is of another type."""
    wanted = "a name, a path or a mapping"
    if name is not None:
        kinds = (str, Path, Mapping)
        check_kind(name, kinds, what="load_config", takes=wanted, write="load_config('quickstart')")
    takes, write = "a list of key=value texts", "overrides=['train.steps=100']"
    if isinstance(overrides, str):
        raise ConfigError(refusal("load_config: overrides", takes, overrides, f"overrides=[{overrides!r}]"))
    if isinstance(overrides, Mapping):
        raise ConfigError(refusal("load_config: overrides", takes, overrides, "keywords={...} for a dict"))
    check_kind(overrides, Iterable, what="load_config: overrides", takes=takes, write=write)
    if keywords is not None:
        write = "keywords={'train.steps': 100}"
        check_kind(keywords, Mapping, what="load_config: keywords", takes="a mapping of keys", write=write)


def _split_override(override: str) -> tuple[KeyPath, Any]:
    check_kind(override, str, what="load_config: overrides", takes="key=value texts", write="'train.steps=100'")
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not key or any(not part for part in key.split(".")):
        raise ConfigError(f"cannot read {shown(override)} (command line); write key=value, as in train.steps=100")
    return tuple(key.split(".")), parse_value(text, f"command line, {key}")


def _is_set(config: Config, key: str) -> bool:
    """Whether a key differs from the default of its group, or is a kind other than the default one."""
    group, _, rest = key.partition(".")
    if rest == "kind":
        return getattr(config, group).kind != Config.model_fields[group].default.kind
    value: Any = config.model_dump(exclude_defaults=True)
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def load_config(
    name: str | Path | Mapping[str, Any] | None = None,
    *,
    overrides: Iterable[str] = (),
    keywords: Mapping[str, Any] | None = None,
    origin: str = "keyword",
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
    _check_call(name, overrides, keywords)
    tree = _Tree(weights=weights)
    given = [_split_override(override) for override in overrides]
    label, run_dir, own = "run", None, {}
    if isinstance(name, Mapping):
        for key, value in name.items():
            tree.set(tuple(str(key).split(".")), value, origin)
    elif name is not None and not is_shipped(str(name)) and is_run(local_path(name, what="config")):
        run_dir = Path(name)
        saved = read_run(run_dir)
        label = str(saved.get("name") or label)
        own = {part: found for part, found in recorded_parts(saved).items() if found is not None}
        tree.reads_published = False
        tree.set((), saved["config"], f"{run_dir}/run.json")
        tree.reads_published = True
    elif name is not None:
        path = find_config(str(name))
        label = path.stem
        values, lines = read_yaml(path)
        model = values.get("model")
        if isinstance(model, dict) and "from" in model:
            # Another published model takes the place of the config's own, which need not be here.
            keys = {**{".".join(key): value for key, value in given}, **(keywords or {})}
            inner = keys.get("model")
            before, model["from"] = model["from"], keys.get("model.from", model["from"])
            model["from"] = inner.get("from", model["from"]) if isinstance(inner, Mapping) else model["from"]
            if model["from"] not in (before, None):
                model.pop("size", None)
                given = [(key, value) for key, value in given if key != ("model", "from")]
                keywords = {key: value for key, value in (keywords or {}).items() if key != "model.from"}
        tree.set((), values, path.name)
        if values.get("parallel") == "auto":
            lines[("parallel", "auto")] = lines[("parallel",)]
        for group in CALLABLE_GROUPS:
            if (group, "call") in lines:
                lines.setdefault((group, "kind"), lines[(group, "call")])
        for key_path, line in lines.items():
            if key_path in tree.where:
                tree.where[key_path] = f"{path.name}:{line}"
    for key, value in given:
        tree.set(key, value, "command line")
    for key, value in (keywords or {}).items():
        tree.set(tuple(str(key).split(".")), value, "keyword")
    if tree.where.get(("model", "from")) != f"{run_dir}/run.json":
        tree.take_tokenizer()
    tree.take_adapter()
    for key in redacted_keys(tree.values):
        raise ConfigError(f"{key} looked like a secret, so the run did not write it down; give it again: {key}=...")
    tree.values = _with_kinds(tree.values)
    try:
        config = Config.model_validate(tree.values)
    except ConfigError as error:
        if not isinstance(error.__cause__, ValidationError):
            raise
        # Again, with where each value was set.
        raise ConfigError(explain(error.__cause__, tree.values, tree.where)) from None
    origins = {".".join(path): where for path, where in tree.where.items()}
    if run_dir is not None:
        # A run records every key; what is at its default was not set by anybody.
        origins = {
            key: where for key, where in origins.items() if where != f"{run_dir}/run.json" or _is_set(config, key)
        }
    size = getattr(config.model, "size", None)
    for key in ALL_SIZES.get(size or "", {}):
        origins.setdefault(f"model.{key}", f"size {size}")
    return Loaded(config, config.name or label, origins, tuple(tree.notes), run_dir, own)
