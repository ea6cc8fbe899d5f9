"""The keys of the config tree: a walk over the schema that errors, `jaxtrain config` and suggestions share."""

import difflib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from jaxtrain.config.base import Group
from jaxtrain.config.call import Call
from jaxtrain.config.other_names import other_name
from jaxtrain.config.schema import Config


@dataclass(frozen=True)
class Key:
    """One setting: its dotted path, type as text, default and doc line."""

    path: str
    type: str
    default: Any
    doc: str


def _strip(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _options(annotation: Any) -> list[Any]:
    """The types that a value may have: those of a union, of unions inside it too."""
    annotation = _strip(annotation)
    if get_origin(annotation) not in (Union, types.UnionType):
        return [annotation]
    return [inner for option in get_args(annotation) for inner in _options(option)]


def members(annotation: Any) -> dict[str, type[Group]]:
    """The classes of a union of kinds by kind, or {"": class} for a plain group, or {} for a value."""
    groups = [o for o in _options(annotation) if isinstance(o, type) and issubclass(o, Group)]
    if len(groups) > 1:
        return {group.model_fields["kind"].default: group for group in groups}
    return {"": groups[0]} if groups else {}


def type_name(annotation: Any) -> str:
    """A type as users write it: `int`, `number`, `a | b`, `list of int`."""
    annotation = _strip(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Call):
        return "{call: module:function}"
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(option) for option in get_args(annotation))
    if annotation is type(None):
        return "null"
    if origin is tuple:
        item = get_args(annotation)[0]
        # A group in a list has keys of its own, which a name tells better than the word.
        return f"list of {item.__name__ if isinstance(item, type) and issubclass(item, Group) else type_name(item)}"
    if origin is dict:
        return f"map of {type_name(get_args(annotation)[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Group):
        return "group"
    if origin is not None:  # Literal
        return " | ".join(str(option) for option in get_args(annotation))
    return {float: "number", str: "text", bool: "true | false", Any: "any value"}.get(
        annotation, getattr(annotation, "__name__", "?")
    )


def _default(field: FieldInfo) -> Any:
    return "(required)" if field.is_required() else field.default


def _member(values: Any, name: str) -> Any:
    return values.get(name) if isinstance(values, dict) else getattr(values, name, None)


def _takes_names(annotation: Any) -> bool:
    """Whether a name may stand in place of a group, as for `task`."""
    return any(get_origin(_strip(option)) is Literal for option in get_args(_strip(annotation)))


def _chosen(field: FieldInfo, value: Any) -> type[Group] | None:
    """The class of a group field that the value's kind chooses; None for a field that is no group."""
    classes = members(field.annotation)
    if _takes_names(field.annotation) and not isinstance(value, dict | Group):
        return None
    kind = _member(value, "kind")
    if kind is None and not field.is_required():
        kind = getattr(field.default, "kind", None)
    return classes.get("") or classes.get(str(kind)) or next(iter(classes.values()), None)


def walk(group: type[Group], values: Any, prefix: str = "") -> Iterator[Key]:
    """Every key of the group, with the kinds that `values` (nested dicts or a config) chooses."""
    for name, field in group.model_fields.items():
        path = f"{prefix}{name}"
        value = _member(values, name)
        chosen = _chosen(field, value)
        optional = type(None) in get_args(_strip(field.annotation))
        if chosen is None or (optional and value is None):
            yield Key(path, type_name(field.annotation), _default(field), field.description or "")
        else:
            yield from walk(chosen, value, f"{path}.")


def locate(path: Sequence[str], values: Any) -> tuple[Key | None, list[Key]]:
    """The key that a path names or goes into, and the keys of the deepest group on the way; into lists too."""
    group, node, prefix, rest = Config, values, "", list(path)
    while rest:
        name = rest.pop(0)
        field = group.model_fields.get(name)
        if field is None:
            break
        value, chosen, here = _member(node, name), _chosen(field, _member(node, name)), f"{prefix}{name}"
        annotation = _strip(field.annotation)
        if get_origin(annotation) is tuple and rest and members(get_args(annotation)[0]):
            chosen, index = members(get_args(annotation)[0])[""], rest.pop(0)
            value = value[int(index)] if isinstance(value, list | tuple) and index.isdigit() else None
            here = f"{here}.{index}"
        if chosen is None:
            return Key(here, type_name(field.annotation), _default(field), field.description or ""), []
        group, node, prefix = chosen, value, f"{here}."
    return None, list(walk(group, node, prefix))


def all_keys(path: Sequence[str], values: Any) -> list[str]:
    """The paths of every key of the kinds that `values` chooses, and of the deepest group that a path goes into."""
    return [key.path for key in (*walk(Config, values), *locate(path, values)[1])]


def nearest(path: str, values: Any) -> str | None:
    """The valid key that a wrong one most likely meant.

    What other trainers call it comes first, then the same leaf elsewhere, then similar spelling.
    """
    keys = all_keys(path.split("."), values)
    meant = other_name(path, keys)
    if meant in keys:
        return meant
    groups = sorted({k.rsplit(".", 1)[0] for k in keys if "." in k})
    leaf = path.rsplit(".", 1)[-1]
    same_leaf = [key for key in keys if key.rsplit(".", 1)[-1] == leaf]
    if same_leaf:
        return difflib.get_close_matches(path, same_leaf, 1, 0.0)[0]
    close = difflib.get_close_matches(path, keys + groups, 1, 0.75)
    if close:
        return close[0]
    leaves: dict[str, str] = {}
    for key in keys:
        leaves.setdefault(key.rsplit(".", 1)[-1], key)
    by_leaf = difflib.get_close_matches(leaf, leaves, 1, 0.6)
    return leaves[by_leaf[0]] if by_leaf else None


def can_be(kind: type[Group], key: str, value: object) -> bool:
    """Whether a kind of a group has a key, and not another list of words for it, which lacks the value."""
    if key not in kind.model_fields:
        return False
    annotation = kind.model_fields[key].annotation
    parts = [annotation] if get_origin(annotation) is Literal else get_args(annotation)
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    return not words or not isinstance(value, str) or value in words
