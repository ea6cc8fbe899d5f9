"""Small files, written atomically: a reader sees the complete old text or the complete new one."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_lines_atomic(path: Path, lines: Iterable[str]) -> None:
    """Write lines (each with its end) as UTF-8 to a file beside `path`, which is synced and renamed to `path`."""
    # A lone surrogate (from bytes of a file name, or a sample that ends inside a character) must not be an error.
    _write_atomic(path, (line.encode("utf-8", errors="backslashreplace") for line in lines))


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Write bytes atomically."""
    _write_atomic(path, (content,))


def _write_atomic(path: Path, parts: Iterable[bytes]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename:
            error.filename = str(path)  # the file that the user knows
        raise


def write_text_atomic(path: Path, text: str) -> None:
    """Write a text atomically, as UTF-8."""
    write_lines_atomic(path, (text,))


def write_json_atomic(path: Path, value: Any) -> None:
    """Write a value atomically, as indented strict JSON (NaN and infinities become null)."""
    write_text_atomic(path, json.dumps(strict_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def strict_json(value: Any) -> Any:
    """A value in types of strict JSON: NaN and infinities, which JSON does not have, become None.

    Numbers of NumPy and jax become Python numbers, tuples and sets become lists, other objects become their `str`.
    """
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((strict_json(item) for item in value), key=str)
    return plain_number(value) if is_number(value) else str(value)


def plain_number(value: Any) -> float | int | None:
    """A number of any library as a Python int or float, and None for NaN, infinities and other objects."""
    if not is_number(value):
        return None
    try:
        return value.__index__()
    except (AttributeError, TypeError):
        number = float(value)
        return number if math.isfinite(number) else None


def is_number(value: Any) -> bool:
    """Whether a value is one number of any library that Python's `float` takes; NaN and infinities are."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str | bytes)
