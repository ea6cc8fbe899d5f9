"""Bodies of requests as JSON, and their fields by a table of what each may hold. No jax here."""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.inference.server.refused import RefusedError

# (value, name) -> what the field means; raises RefusedError.
Reader = Callable[[Any, str], Any]


@dataclass(frozen=True)
class Field:
    """One field of a body.

    Attributes:
        read: checks a value that is not null.
        default: what stands for null and for a field that is not there.
        required: whether the field must be there.
    """

    read: Reader
    default: Any = None
    required: bool = False


def parse_body(raw: bytes) -> dict[str, Any]:
    """Reads a body.

    Args:
        raw: the bytes.

    Returns:
        The JSON object.

    Raises:
        RefusedError: it is no JSON object in UTF-8.
    """
    try:
        body = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits; lists in lists in lists
        raise RefusedError(400, f"the body is not JSON in UTF-8 that can be read: {error}") from None
    if not isinstance(body, dict):
        raise RefusedError(400, f"the body is {shown(body)}; send a JSON object")
    return body


def read_fields(body: Mapping[str, Any], table: Mapping[str, Field]) -> dict[str, Any]:
    """Reads every field of a body.

    Args:
        body: from `parse_body`.
        table: name -> field.

    Returns:
        Name -> value for every name of the table.

    Raises:
        RefusedError: a field is unknown, is missing or holds something else; names it.
    """
    for name in body:
        if name not in table:
            close = difflib.get_close_matches(name, table, 1, 0.75)
            guess = f"; did you mean {close[0]!r}?" if close else ""
            raise RefusedError(
                400, f"unknown field {shown(name)}{guess}", param=shown(name)[1:-1], code="unknown_field"
            )
    found = {}
    for name, field in table.items():
        value = body.get(name)
        if value is None and field.required:
            raise RefusedError(400, f"the field {name!r} is missing", param=name, code="missing_field")
        found[name] = field.default if value is None else field.read(value, name)
    return found


def wrong(value: Any, name: str, wanted: str, *, param: str | None = None) -> RefusedError:
    """The error for a field that holds something else than it may.

    Args:
        value: what it holds.
        name: of the field or of a part of it, in the message.
        wanted: what it may hold.
        param: the field that clients read; None: `name`.
    """
    return RefusedError(400, f"{name} is {shown(value)}; use {wanted}", param=param or name)


def shown(value: Any) -> str:
    """A value of a body in messages: JSON, short, and ASCII alone."""
    try:
        text = json.dumps(value)
    except RecursionError:  # lists so deep that they could just be read
        text = "lists in lists"
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def number(low: float, high: float, *, above: bool = False) -> Reader:
    """Reads a number from `low` to `high`; with `above` not `low` itself."""
    wanted = f"a number above {low:g}, up to {high:g}" if above else f"a number from {low:g} to {high:g}"

    def read(value: Any, name: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above and value == low):
            raise wrong(value, name, wanted)
        return float(value)

    return read


def whole(low: int, high: int | None = None) -> Reader:
    """Reads a whole number of at least `low`, and at most `high`."""
    wanted = f"a whole number of {low} or more" if high is None else f"a whole number from {low} to {high}"

    def read(value: Any, name: str) -> int:
        if not is_whole(value) or value < low or (high is not None and value > high):
            raise wrong(value, name, wanted)
        return value

    return read


def flag(value: Any, name: str) -> bool:
    """Reads true or false."""
    if not isinstance(value, bool):
        raise wrong(value, name, "true or false")
    return value


def text(value: Any, name: str) -> str:
    """Reads a text, which halves of surrogate pairs are not."""
    if not isinstance(value, str):
        raise wrong(value, name, "a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RefusedError(400, f"{name} holds half of a surrogate pair, which is no character", param=name) from None
    return value


def texts(least: int, most: int) -> Reader:
    """Reads one text or a list of them, none of them empty."""

    def read(value: Any, name: str) -> tuple[str, ...]:
        listed = value if isinstance(value, list) else [value]
        if not least <= len(listed) <= most:
            raise RefusedError(400, f"{name} has {len(listed)} texts; use {least} to {most}", param=name)
        for one in listed:
            if not text(one, name):
                raise RefusedError(400, f"{name} holds an empty text; leave it out", param=name)
        return tuple(listed)

    return read


def no_effect(value: Any, name: str) -> None:
    """Takes a field of OpenAI's that changes nothing here, such as the name of a user."""


def unsupported(*neutral: Any, instead: str) -> Reader:
    """Refuses a field, except for values that ask for nothing."""

    def read(value: Any, name: str) -> None:
        # 1 == True in Python, and they are different in JSON.
        if not any(value == one and type(value) is type(one) for one in neutral):
            raise RefusedError(400, f"{name} is not supported; {instead}", param=name, code="unsupported_field")

    return read
