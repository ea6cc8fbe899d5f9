"""Texts and numbers of settings that nothing can be done with, whatever their key. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError

_LONGEST = 10_000
DEEPEST = 20
# Of a number; Python writes none out that has thousands of digits.
MOST_BITS = 200
_MOST_VALUES = 10_000


def check_texts(values: Mapping[str, Any], where: Mapping[tuple[str, ...], str]) -> None:
    """Raises where a text cannot be a path, a name or a word.

    Args:
        values: Settings, nested.
        where: Path -> where it was set, for the message.

    Raises:
        ConfigError: A text holds a NUL character or half of a character, or is very long; or the values nest deep.
    """
    stack: list[tuple[tuple[str, ...], Any]] = [((), values)]
    visited = 0
    while stack:
        path, value = stack.pop()
        visited += 1
        key = ".".join(path)
        if len(path) > DEEPEST or visited > _MOST_VALUES:
            least = f"{DEEPEST} deep" if len(path) > DEEPEST else f"{_MOST_VALUES:,} values"
            raise ConfigError(f"{path[0] if path else 'config'} is nested more than {least}; a config is much smaller")
        if isinstance(value, Mapping):
            stack += [((*path, str(name)), item) for name, item in value.items()]
            texts = [name for name in value if isinstance(name, str)]
        elif isinstance(value, list | tuple):
            stack += [((*path, str(index)), item) for index, item in enumerate(value)]
            texts = []
        else:
            texts = [value] if isinstance(value, str) else []
        for text in texts:
            reason = _mistake(text)
            if reason is not None:
                raise ConfigError(f"{key or 'a key'} ({_where(where, path)}) {reason}")


def _mistake(text: str) -> str | None:
    if "\0" in text:
        return "holds a NUL character, which no path, name or word has; leave it out"
    if len(text) > _LONGEST:
        return f"is a text of {len(text):,} characters; at most {_LONGEST:,} are read"
    try:
        # Half of a character may come from the name of a file that is not UTF-8 (surrogateescape), which is a name.
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return "holds half of a character (a lone surrogate); write the character itself"
    return None


def _where(where: Mapping[tuple[str, ...], str], path: tuple[str, ...]) -> str:
    return next((where[path[:n]] for n in range(len(path), 0, -1) if path[:n] in where), "given")
