"""Arguments of public functions, checked where they enter: every refusal says what is taken, given, and to write."""

import operator
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError, UserError

# At least two letters, so that a drive (C:/) is no scheme; one slash, because a `Path` has dropped the second.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_BUCKET = re.compile(r"(gs|s3):/{1,2}([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/+([^#*?\[\]\n]*))?")


def shown(value: Any) -> str:
    """Returns how a message names a value: a short value itself, anything else by its type and size."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value[:60] if isinstance(value, str | bytes) else value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"an array {dtype}{list(shape)}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    return f"a {type(value).__name__}"


def refusal(what: str, takes: str, value: Any, write: str) -> str:
    """Returns the line of a refused argument: `WHAT takes TAKES, not VALUE; write WRITE`."""
    return f"{what} takes {takes}, not {shown(value)}; write {write}"


def _check(passed: bool, value: Any, what: str, takes: str, write: str) -> None:
    if not passed:
        raise ConfigError(refusal(what, takes, value, write))


def check_kind(value: Any, kinds: type | tuple[type, ...], *, what: str, takes: str, write: str) -> None:
    """Raises an error where a value is not of one of these types."""
    _check(isinstance(value, kinds), value, what, takes, write)


def check_whole(value: Any, *, what: str, least: int | None, write: str, most: int | None = None) -> int:
    """Returns a whole number of Python, NumPy or jax as an int; raises an error where it is none, or out of range."""
    takes = "a whole number" if least is None else f"a whole number of {least} or more"
    takes += "" if most is None else f", at most {most}"
    is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
    fits = is_whole and (least is None or value >= least) and (most is None or value <= most)
    _check(bool(fits), value, what, takes, write)
    return operator.index(value)


def check_choice(value: Any, known: Iterable[str], *, what: str, write: str) -> None:
    """Raises an error where a value is not one of the known words."""
    known = list(known)
    _check(isinstance(value, str) and value in known, value, what, f"one of {', '.join(known)}", write)


_INSTEAD = "use a local folder, or mount the store and give its folder"


# Of Linux, in bytes.
_MAX_PATH = 4096
_MAX_NAME = 255


def local_path(
    path: str | os.PathLike[str], *, what: str, error: type[UserError] = ConfigError, instead: str = _INSTEAD
) -> Path:
    """Returns the path on this machine that was given for `what`; raises where it cannot be one."""
    text = os.fspath(path)
    if not text:
        raise error(f"{what} '' is empty; write a path, or leave it out")
    if found := _SCHEME.match(text):
        raise error(f"{what} {found[1]}://{text[found.end() :]} is not a path on this machine; {instead}")
    if "\0" in text:
        raise error(f"{what} {shown(text)} holds a NUL, which no path has; leave it out")
    if len(text) >= _MAX_PATH or any(len(part) > _MAX_NAME for part in text.split("/")):
        raise error(f"{what} {text[:60]!r}... is too long for a path; shorten it")
    return Path(path)


def is_store_address(text: str) -> bool:
    """Whether a text begins as the address of a place in an object store that checkpoints can be in."""
    return text.startswith(("gs:/", "s3:/"))


def store_address(text: str) -> tuple[str, str, str]:
    """Returns scheme, bucket and name of gs://bucket/name or s3://bucket/name; raises a ValueError where it is none."""
    found = _BUCKET.fullmatch(text)
    parts = [] if found is None else [part for part in (found[3] or "").split("/") if part]
    if found is None or ".." in parts or "." in parts:
        raise ValueError(f"{text} is not a path in a bucket; write gs://bucket/name or s3://bucket/name")
    return found[1], found[2], "/".join(parts)
