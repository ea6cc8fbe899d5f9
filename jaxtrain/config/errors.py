"""The keys of a config, and what pydantic finds wrong in one as one line: what, where it was set, what would work.

Works on any tree of pydantic classes, so that every group can use it.
"""

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

KeyPath = tuple[str, ...]

# Tags of the two forms of `task`.
NAMED, CALLED = "named", "called"
_LONGEST_SHOWN = 60
_LIMITS = ("than", "finite", "at least", "at most")
# Names that other trainers give to groups; those of keys stand beside the keys (`AlsoCalled`).
_GROUPS = {"mesh": "parallel", "eval": "evaluation", "scheduler": "optimizer.schedule", "dataset": "data"}


class AlsoCalled(tuple[str, ...]):
    """Names that other trainers give to a setting whose own name is not similar; part of its annotation."""

    def __new__(cls, *names: str) -> "AlsoCalled":
        return super().__new__(cls, names)


@dataclass(frozen=True)
class Key:
    """One setting: its dotted path, type as text, default, doc line, and its names in other trainers."""

    path: str
    type: str
    default: Any
    doc: str
    also_called: tuple[str, ...]


def _options(annotation: Any) -> list[Any]:
    """The types that a value may have: those of a union, of unions inside it too."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) not in (Union, types.UnionType):
        return [annotation]
    return [inner for option in get_args(annotation) for inner in _options(option)]


def _is_group(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, BaseModel)


def members(annotation: Any) -> dict[str, type[BaseModel]]:
    """The classes of a union of kinds by kind, or {"": class} for a plain group, or {} for a value."""
    groups = [option for option in _options(annotation) if _is_group(option)]
    if len(groups) > 1:
        return {group.model_fields["kind"].default: group for group in groups}
    return {"": groups[0]} if groups else {}


def inner_members(annotation: Any) -> dict[str, type[BaseModel]]:
    """The classes of the items of a tuple, as `members` gives those of a field."""
    items = [get_args(option)[0] for option in _options(annotation) if get_origin(option) is tuple]
    return members(items[0]) if items else {}


def words_of(annotation: Any) -> list[Any]:
    """The words that a value may be."""
    return [word for option in _options(annotation) if get_origin(option) is Literal for word in get_args(option)]


def type_name(annotation: Any) -> str:
    """A type as users write it: `int`, `number`, `a | b`, `list of int`."""
    return " | ".join(dict.fromkeys(_option_name(option) for option in _options(annotation)))


def _option_name(option: Any) -> str:
    origin, inner = get_origin(option), get_args(option)
    if origin is tuple:
        return f"list of {inner[0].__name__ if _is_group(inner[0]) else type_name(inner[0])}"
    if origin is dict:
        return f"map of {type_name(inner[1])}"
    if origin is Literal:
        return " | ".join(map(str, inner))
    if _is_group(option):
        return "{call: module:function}" if set(option.model_fields) == {"call", "args"} else "group"
    names = {type(None): "null", float: "number", str: "text", bool: "true | false", Any: "any value"}
    return names.get(option, getattr(option, "__name__", "?"))


def _get(values: Any, name: str) -> Any:
    return values.get(name) if isinstance(values, dict) else getattr(values, name, None)


def walk(group: type[BaseModel], values: Any, prefix: str = "") -> Iterator[Key]:
    """Every key of the group, with the kinds that `values` (nested dicts or a config) chooses."""
    for name, field in group.model_fields.items():
        value, kinds = _get(values, name), members(field.annotation)
        takes_value = not all(map(_is_group, _options(field.annotation)))
        if not kinds or (takes_value and not isinstance(value, dict | BaseModel)):
            default = "(required)" if field.is_required() else field.default
            doc = field.description or "Which kind of group this is."
            also_called = next((part for part in field.metadata if isinstance(part, AlsoCalled)), ())
            yield Key(f"{prefix}{name}", type_name(field.annotation), default, doc, also_called)
        else:
            kind = _get(value, "kind") or getattr(field.default, "kind", None)
            chosen = kinds.get(str(kind)) or next(iter(kinds.values()))
            yield from walk(chosen, value, f"{prefix}{name}.")


def nearest(path: str, settings: Iterable[Key]) -> str | None:
    """The key, or group of keys, that a wrong one most likely meant: the same leaf elsewhere, or similar spelling."""
    group, dot, rest = path.partition(".")
    path = _GROUPS.get(group, group) + dot + rest
    leaf = path.rpartition(".")[2].replace("-", "_")
    keys: list[str] = []
    also_called: dict[str, str] = {}
    for setting in settings:
        keys.append(setting.path)
        for name in setting.also_called:
            also_called.setdefault(name, setting.path)
    groups = sorted({key.rpartition(".")[0] for key in keys} - {""})
    if path in (*keys, *groups):
        return path
    if leaf in also_called:
        return also_called[leaf]
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys)}
    same = [key for key in keys if key.rpartition(".")[2] == leaf]
    close = difflib.get_close_matches(path, same or [*keys, *groups], 1, 0.0 if same else 0.75)
    by_leaf = difflib.get_close_matches(leaf, leaves, 1, 0.6)
    return close[0] if close else leaves[by_leaf[0]] if by_leaf else None


def explain(
    error: ValidationError,
    root: type[BaseModel],
    values: Mapping[str, Any],
    where: Mapping[KeyPath, str] | None = None,
) -> str:
    """One line for the first mistake that pydantic found in the values of `root`, with where each was set, if known."""
    # A missing key may be there misspelt: the wrong one says more.
    first = min(error.errors(include_url=False), key=lambda one: one["type"] == "missing")
    path, group, field = _place(root, first["loc"])
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    if kind.startswith("union_tag") and isinstance(value, dict):
        path, value = (*path, "kind"), value.get("kind")
    at, key = _at(where, path), ".".join(path)
    if kind == "extra_forbidden":
        if len(path) == 1 and isinstance(value, dict) and len(value) == 1:  # mesh={data: 2} is mesh.data
            path, group = (*path, *value), None
        key = ".".join(path)
        return f"unknown key {key!r}{at}; {_hint(path, group, root, values)}"
    if kind == "missing" or (kind == "union_tag_not_found" and path[-1] == "kind"):
        above = f"; {'.'.join(path[:-1])}{_at(where, path[:-1])} needs it" if path[1:] else ""
        return f"key {key!r} is missing{above}"
    if kind == "value_error":
        return f"{key}{at}: ".removeprefix(": ") + first["msg"].removeprefix("Value error, ")
    if kind in ("union_tag_invalid", "literal_error"):
        options = context.get("expected_tags") or context["expected"]
        words = [word.strip("'") for word in options.replace(" or ", ", ").split(", ")]
        close = difflib.get_close_matches(str(value), words, 1)
        guess = f"; did you mean {close[0]!r}?" if close else ""
        return f"{key} is {_show(value)}{at}, not one of {', '.join(words)}{guess}"
    if field is None:
        example = next(walk(group, {}, f"{key}.")).path if group else "key=value"
        return f"{key} is {_show(value)}{at}; it takes nested keys, such as {example}"
    limit = first["msg"].removeprefix("Input should be ")
    limit = f", {limit}" if any(word in limit for word in _LIMITS) else ""
    return f"{key} is {_show(value)}{at}; it takes {type_name(field.annotation)}{limit}"


def where_set(where: Mapping[KeyPath, str], path: KeyPath) -> str:
    """Where a path was set: itself, else the group above it, else the key below it that was set last."""
    above = [where[path[:length]] for length in range(len(path), 0, -1) if path[:length] in where]
    below = [place for known, place in where.items() if known[: len(path)] == path]
    return next(iter([*above, *reversed(below)]), "default")


def _at(where: Mapping[KeyPath, str] | None, path: KeyPath) -> str:
    return "" if where is None else f" ({where_set(where, path)})"


def _place(root: type[BaseModel], location: tuple[int | str, ...]) -> tuple[KeyPath, type[BaseModel] | None, Any]:
    """The path of an error without the tags of unions and what is below a value; the group there; the value's field."""
    path: list[str] = []
    group: type[BaseModel] | None = root
    kinds: dict[str, type[BaseModel]] = {}
    field: Any = None
    for part in map(str, location):
        if group is None:
            if get_origin(field.annotation) is dict:  # a name in it
                path.append(part)
            break
        if part in kinds:
            group, kinds = kinds[part], {}
        elif part in group.model_fields:
            path.append(part)
            field = group.model_fields[part]
            kinds = members(field.annotation) or inner_members(field.annotation)
            group = next(iter(kinds.values()), None)
        elif part not in (NAMED, CALLED):  # an index, or a key that is not there
            path.append(part)
    return tuple(path), group, field if group is None else None


def _show(value: Any) -> str:
    """A value as it is written in a file, near enough for a message."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _hint(path: KeyPath, group: type[BaseModel] | None, root: type[BaseModel], values: Mapping[str, Any]) -> str:
    """What would work instead of an unknown key."""
    kinds = members(root.model_fields[path[0]].annotation) if path[0] in root.model_fields else {}
    owners = [kind for kind, owner in kinds.items() if kind and len(path) == 2 and path[1] in owner.model_fields]
    if owners and group is not None:
        own = group.model_fields["kind"].default
        return f"{path[0]}.kind={own} does not have it, {path[0]}.kind={owners[0]} does"
    beside = walk(group, {}, f"{'.'.join(path[:-1])}.") if group and path[1:] else ()
    close = nearest(".".join(path), [*walk(root, values), *beside])
    keys = (
        "'jaxtrain config NAME' lists the keys"
        if len(root.model_fields) > 9
        else f"it takes {', '.join(root.model_fields)}"
    )
    return f"did you mean {close!r}?" if close else keys
