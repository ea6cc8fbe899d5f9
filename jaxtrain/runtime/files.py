"""Small files replaced in one rename: a reader sees the old text or the next one, never a part."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_lines_atomic(path: Path, lines: Iterable[str]) -> None:
    """Writes the lines (each with its own line end) as UTF-8 beside `path`, syncs, and renames over `path`."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # A lone surrogate (bytes of an odd file name, a sample cut inside a character) must not stop the write.
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text_atomic(path: Path, text: str) -> None:
    """Writes all of `text` or nothing."""
    write_lines_atomic(path, (text,))


def write_json_atomic(path: Path, value: Any) -> None:
    """Writes `value` as indented strict JSON (NaN and infinities as null), all of it or nothing."""
    write_text_atomic(path, json.dumps(strict_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def strict_json(value: Any) -> Any:
    """`value` in types of strict JSON: NaN and infinities, which it cannot hold, become None.

    Numbers of NumPy and JAX become Python numbers, tuples and sets lists, and anything else its `str`.
    """
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((strict_json(item) for item in value), key=str)
    return plain_number(value) if _is_number(value) else str(value)


def plain_number(value: Any) -> float | int | None:
    """A Python int or finite float for a number of any library; None for NaN, infinities and what is no number."""
    if isinstance(value, int):
        return int(value)
    if not _is_number(value):
        return None
    try:
        return value.__index__()
    except (AttributeError, TypeError):
        number = float(value)
        return number if math.isfinite(number) else None


def _is_number(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
