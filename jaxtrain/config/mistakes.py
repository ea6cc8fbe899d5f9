"""What pydantic finds wrong in a config, as one line: a table from the type of its error to the message.

A mistake of another kind is a row of `_MESSAGES`; what no row knows is shown with what the key takes.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from jaxtrain.config.call import CALLED, NAMED
from jaxtrain.config.keys import all_keys, locate, members, nearest
from jaxtrain.config.other_names import other_name
from jaxtrain.config.schema import Config

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Mistake:
    """One error of pydantic.

    Attributes:
        path: of the key in the config, without the tags that unions put into it.
        value: what was given there.
        message: pydantic's own.
        context: pydantic's: `expected`, `min_length`, ...
        values: all of the config as it was given.
        where: path -> where it was set, in the order of setting.
    """

    path: KeyPath
    value: Any
    message: str
    context: Mapping[str, Any]
    values: dict[str, Any]
    where: Mapping[KeyPath, str]


@dataclass(frozen=True)
class Message:
    """How a mistake is put.

    Attributes:
        line: with the names of its words in braces.
        words: gives the words.
    """

    line: str
    words: Callable[[Mistake], dict[str, Any]]


def explain(error: ValidationError, values: dict[str, Any], where: Mapping[KeyPath, str]) -> str:
    """One line for the first mistake that pydantic found, and how many more there are.

    Args:
        error: raised for `values`.
        values: the config as it was given.
        where: path -> where it was set, in the order of setting.
    """
    # A missing key may be there misspelt: the wrong one says more.
    first = min(error.errors(), key=lambda found: found["type"] == "missing")
    path, value = _schema_path(first["loc"], values), first["input"]
    message = _MESSAGES.get(first["type"], _OTHER)
    if first["type"] == "union_tag_not_found" and not isinstance(value, dict):
        message = _OTHER
    line = message.line.format(**message.words(Mistake(path, value, first["msg"], first.get("ctx", {}), values, where)))
    # A list that loses a wrong item can be too short as well: what stands above the first mistake is no second one.
    here = _key_path(first["loc"], values)
    found = error.errors()
    others = sum(not here.startswith(path) for path in {_key_path(one["loc"], values) for one in found})
    return line + (f" (and {others} more)" if others else "")


def where_set(where: Mapping[KeyPath, str], path: KeyPath) -> str:
    """Where a path was set: itself, else the group above it, else the key below it that was set last."""
    for length in range(len(path), 0, -1):
        if path[:length] in where:
            return where[path[:length]]
    below = [place for known, place in where.items() if known[: len(path)] == path]
    return below[-1] if below else "default"


def _unknown_key(mistake: Mistake) -> dict[str, Any]:
    return {
        "key": ".".join(mistake.path),
        "where": where_set(mistake.where, mistake.path),
        "hint": _hint(mistake.path, mistake.values),
    }


def _missing_key(mistake: Mistake, tag: str = "") -> dict[str, Any]:
    path = (*mistake.path, tag) if tag else mistake.path
    above = path[:-1]
    return {
        "key": ".".join(path),
        "group": ".".join(above),
        "where_group": where_set(mistake.where, above or ("",)),
    }


def _missing_kind(mistake: Mistake) -> dict[str, Any]:
    return _missing_key(mistake, "kind")


def _wrong_choice(mistake: Mistake, tag: str = "") -> dict[str, Any]:
    path = (*mistake.path, tag) if tag else mistake.path
    given = mistake.value.get(tag) if tag else mistake.value
    expected = mistake.context.get("expected_tags") or mistake.context.get("expected", "")
    options = [option.strip().strip("'") for option in expected.replace(" or ", ", ").split(",")]
    word = given[:_LONGEST_SHOWN] if isinstance(given, str) else _show(given)
    close = difflib.get_close_matches(word, options, 1)
    if len(options) > _MOST_OPTIONS:
        shown = difflib.get_close_matches(word, options, 6, 0.0)
        options = [*shown, f"and {len(options) - len(shown)} others"]
    return {
        "key": ".".join(path),
        "value": _show(given),
        "where": where_set(mistake.where, path),
        "options": ", ".join(options),
        "nearest": f"; did you mean {close[0]!r}?" if close else "",
    }


def _wrong_kind(mistake: Mistake) -> dict[str, Any]:
    return _wrong_choice(mistake, "kind")


def _wrong_size(mistake: Mistake) -> dict[str, Any]:
    return _wrong_choice(mistake, "size")


def _own_check(mistake: Mistake) -> dict[str, Any]:
    return {
        "key": ".".join(mistake.path),
        "where": where_set(mistake.where, mistake.path),
        "reason": mistake.message.removeprefix("Value error, "),
    }


def _too_short(mistake: Mistake) -> dict[str, Any]:
    return _wrong_value(mistake, f"at least {mistake.context['min_length']} of them")


def _too_long(mistake: Mistake) -> dict[str, Any]:
    return _wrong_value(mistake, f"at most {mistake.context['max_length']} of them")


def _wrong_value(mistake: Mistake, message: str | None = None) -> dict[str, Any]:
    # Errors inside a union or a list go on below the key, which is named with all of its value.
    key, siblings = locate(mistake.path, mistake.values)
    if key is None:
        example = next((sibling for sibling in siblings if sibling.path.endswith(".kind")), siblings[0])
        return {
            "key": ".".join(mistake.path),
            "value": _show(mistake.value),
            "where": where_set(mistake.where, mistake.path),
            "takes": f"it takes keys of its own, such as {example.path}",
        }
    above = tuple(key.path.split("."))
    if key.type == "map of text" and len(mistake.path) > len(above):
        return _wrong_entry(mistake, above)
    value = _value(mistake.values, key.path, mistake.value)
    message = message or mistake.message.removeprefix("Input should be ")
    example = f", as in [{value}]" if key.type == "list of text" and isinstance(value, str) else ""
    limit = f", {message}" if any(word in message for word in ("than", "finite", "at least", "at most")) else ""
    return {
        "key": key.path,
        "value": _show(value),
        "where": where_set(mistake.where, tuple(key.path.split("."))),
        "takes": f"it takes {key.type}{example}{limit}",
    }


def _wrong_entry(mistake: Mistake, above: KeyPath) -> dict[str, Any]:
    """A name or a text of a map, as of `logging.tags`."""
    name, path, value = mistake.path[len(above)], mistake.path[: len(above) + 1], mistake.value
    where = where_set(mistake.where, path)
    if mistake.path[-1] == "[key]":
        takes = "a name there is 1 to 60 letters, digits, '_' and '-'"
        return {"key": f"a name in {'.'.join(above)}", "value": _show(name), "where": where, "takes": takes}
    takes = "it takes text"
    if isinstance(value, str):
        takes += f" of at most {mistake.context.get('max_length')} characters"
    elif isinstance(value, dict):
        takes += "; a point in a name is read as a group, write '_'"
    elif not isinstance(value, list):
        quoted = json.dumps(_show(value))
        # A shell takes the outer quotes away.
        example = f"{'.'.join(path)}='{quoted}'" if where == "command line" else f"{name}: {quoted}"
        takes += f": quote it, as in {example}"
    return {"key": ".".join(path), "value": _show(value), "where": where, "takes": takes}


_LONGEST_SHOWN = 200
# Of more than this, only the nearest are shown.
_MOST_OPTIONS = 20

_MISSING = "key {key!r} is missing; {group} ({where_group}) needs it"
_CHOICE = "{key} is {value} ({where}), not one of {options}{nearest}"
_VALUE = "{key} is {value} ({where}); {takes}"
_MESSAGES: dict[str, Message] = {
    "extra_forbidden": Message("unknown key {key!r} ({where}); {hint}", _unknown_key),
    "missing": Message(_MISSING, _missing_key),
    "union_tag_not_found": Message(_MISSING, _missing_kind),
    "union_tag_invalid": Message(_CHOICE, _wrong_kind),
    "literal_error": Message(_CHOICE, _wrong_choice),
    "unknown_size": Message(_CHOICE, _wrong_size),
    "value_error": Message("{key} ({where}): {reason}", _own_check),
    "too_short": Message(_VALUE, _too_short),
    "too_long": Message(_VALUE, _too_long),
}
_OTHER = Message(_VALUE, _wrong_value)


def _schema_path(location: tuple[int | str, ...], values: dict[str, Any]) -> KeyPath:
    """A pydantic error location without the tags that unions put into it."""
    path: list[str] = []
    node: Any = values
    for part in location:
        if isinstance(node, dict) and node.get("kind") == part and part not in node:
            continue
        if path == ["task"] and part in (NAMED, CALLED):
            continue
        path.append(str(part))
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            node = None
    return tuple(path)


def _key_path(location: tuple[int | str, ...], values: dict[str, Any]) -> str:
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


def _show(value: Any) -> str:
    """A value as it is written in a file, near enough for a message."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > _LONGEST_SHOWN:  # Python writes no such number out
        return "a number of more than 60 digits"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _hint(path: KeyPath, values: dict[str, Any]) -> str:
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
