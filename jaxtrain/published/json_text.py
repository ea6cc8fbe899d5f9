"""Reads JSON that somebody else wrote: strictly, and never deeper than a program may go. No jax here."""

import json
from typing import Any

# The files of published models have about four levels.
_DEEPEST = 64


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Args:
        text: In UTF-8, where it is bytes.

    Raises:
        ValueError: It is no JSON, has a key of an object twice, holds NaN or an infinity, or is nested too deeply.
    """
    try:
        found = json.loads(text, object_pairs_hook=_each_key_once, parse_constant=_refuse)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth(found)
    return found


_TOO_DEEP = f"it is nested more than {_DEEPEST} deep"


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {again[:100]!r} is there twice")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"it holds {name}, which JSON does not have")


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_DEEPEST):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)
