"""What a caller gave to a public function: checked, and shown in one line. No jax here.

Every message has the same form: what the argument takes, what it was given, and how to write it.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtrain.errors import ConfigError, UserError

_LONGEST_TEXT = 60
_MOST_BITS = 200


def shown(value: Any) -> str:
    """Returns how a message names a value: a short value itself, anything else by kind and shape."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:  # Python writes no such number out
        return "a number of more than 60 digits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str | bytes):
        return repr(value if len(value) <= _LONGEST_TEXT else value[:_LONGEST_TEXT])
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"an array {dtype}{list(shape)}"
    if isinstance(value, Mapping):
        names = ", ".join(map(repr, list(value)[:6])) + (", ..." if len(value) > 6 else "")
        return f"a dict of {names}" if value else "an empty dict"
    if isinstance(value, list | tuple | set | frozenset):
        return f"a {type(value).__name__} of {len(value)}" if value else f"an empty {type(value).__name__}"
    name = getattr(value, "__name__", None)
    if callable(value) and isinstance(name, str):
        return "a lambda" if name == "<lambda>" else f"the function {name}"
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def refusal(what: str, takes: str, value: Any, write: str) -> str:
    """Returns the line of a refused argument: `WHAT takes TAKES, not VALUE; write WRITE`.

    Args:
        what: Name of the argument, with the function: "Batches: global_batch_size".
        takes: What it takes: "a whole number of 1 or more".
        value: What was given.
        write: How to write it: "Batches(rows, 32, seed=0, shuffle=True)".
    """
    return f"{what} takes {takes}, not {shown(value)}; write {write}"


def check_kind(
    value: Any,
    kinds: type | tuple[type, ...],
    *,
    what: str,
    takes: str,
    write: str,
    error: type[UserError] = ConfigError,
) -> None:
    """Raises an error where a value is not of one of these types.

    Args:
        value: What was given.
        kinds: The types that are accepted.
        what, takes, write: As for `refusal`.
        error: Type of the error.

    Raises:
        UserError: The value is of another type.
    """
    if not isinstance(value, kinds):
        raise error(refusal(what, takes, value, write))


def check_function(value: Any, *, what: str, takes: str, write: str) -> None:
    """Raises an error where a value cannot be called, or is a class.

    Args:
        value: What was given.
        what, takes, write: As for `refusal`.

    Raises:
        ConfigError: The value is no function.
    """
    if not callable(value) or isinstance(value, type):
        raise ConfigError(refusal(what, takes, value, write))


def check_whole(
    value: Any,
    *,
    what: str,
    least: int | None,
    write: str,
    most: int | None = None,
    error: type[UserError] = ConfigError,
) -> int:
    """Returns a whole number, which may be one of Python, NumPy or jax, as an int.

    Args:
        value: What was given.
        what, write: As for `refusal`.
        least: The smallest number that is accepted; None: any.
        most: The largest; None: any.
        error: Type of the error.

    Raises:
        UserError: The value is no whole number, too small or too large.
    """
    takes = "a whole number" if least is None else f"a whole number of {least} or more"
    takes += "" if most is None else f", at most {most}"
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or (least is not None and found < least) or (most is not None and found > most):
        raise error(refusal(what, takes, value, write))
    return found


def check_number(value: Any, *, what: str, takes: str, write: str) -> None:
    """Raises an error where a value is no finite number.

    Args:
        value: What was given; a number of Python or NumPy.
        what, takes, write: As for `refusal`.

    Raises:
        ConfigError: The value is something else.
    """
    try:
        if isinstance(value, bool | str | bytes) or not math.isfinite(value):
            raise TypeError
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(refusal(what, takes, value, write)) from None


def check_choice(value: Any, known: Iterable[str], *, what: str, write: str) -> None:
    """Raises an error where a value is not one of the known words.

    Args:
        value: What was given.
        known: The words.
        what, write: As for `refusal`.

    Raises:
        ConfigError: The value is another word, or no text.
    """
    known = list(known)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(refusal(what, f"one of {', '.join(known)}", value, write))
