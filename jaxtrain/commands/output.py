"""What commands print as their answer: text, tables and JSON on standard output."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from jaxtrain.runtime.files import strict_json


def print_text(text: str) -> None:
    """Print an answer; signs that the stream's encoding lacks become escapes instead of an error."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="backslashreplace").decode(encoding))


def print_json(value: Any) -> None:
    """Print an answer as indented strict JSON (NaN as null)."""
    print(json.dumps(strict_json(value), indent=2, allow_nan=False))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, two spaces apart."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print_text("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
