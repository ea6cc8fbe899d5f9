"""Printing of a command's answer to standard output: text, tables and JSON."""

import json
import sys
from collections.abc import Sequence

from jaxtrain.runtime.files import strict_json
from jaxtrain.runtime.terminal import printable


def print_text(text: str, *, end: str = "\n", flush: bool = False, is_content: bool = False) -> None:
    """Print a text; characters that the stream's encoding lacks become escapes instead of an error.

    Control characters do so too, because a terminal obeys them.

    Args:
        text: to print.
        end: what follows it.
        flush: whether readers get it at once.
        is_content: whether it is what a model wrote, which files and other programs get as it is.
    """
    if not is_content or (sys.stdout is not None and sys.stdout.isatty()):
        text = printable(text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="backslashreplace").decode(encoding), end=end, flush=flush)


def print_json(value: object) -> None:
    """Print a value as indented strict JSON; NaN becomes null."""
    print(json.dumps(strict_json(value), indent=2, allow_nan=False))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of aligned columns, with two spaces between them.

    Args:
        header: names of the columns.
        rows: texts of each row, one per column.
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print_text("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
