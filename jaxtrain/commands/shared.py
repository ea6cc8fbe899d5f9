"""What several commands do: load a config, print an answer for people or as JSON, and write the file of an option."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config import Loaded, load_config
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.runtime.files import strict_json
from jaxtrain.runtime.terminal import print_remark, printable


def print_text(text: str, *, end: str = "\n", flush: bool = False, is_content: bool = False) -> None:
    """Print a text; control characters, and those that the stream's encoding lacks, become escapes.

    With `is_content` it is what a model wrote, whose control characters files and other programs get as they are.
    """
    if not is_content or sys.stdout.isatty():
        text = printable(text)
    encoding = sys.stdout.encoding or "utf-8"
    shown = text.encode(encoding, errors="backslashreplace").decode(encoding)
    print(shown, end=end, flush=flush)


def json_text(value: object) -> str:
    """Return a value as indented strict JSON; NaN becomes null."""
    return json.dumps(strict_json(value), indent=2, allow_nan=False)


def print_json(value: object) -> None:
    """Print a value as indented strict JSON; NaN becomes null."""
    print(json_text(value))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns; on a terminal long cells are folded, elsewhere a row is a line."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for row in rows:
            table.add_row(*(Text(printable(cell), overflow="fold") for cell in row))
        Console(highlight=False).print(table)
        return
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print_text("  ".join(map(str.ljust, line, widths)).rstrip())


def print_records(records: Sequence[Mapping[str, Any]]) -> None:
    """Print records with equal keys as a table."""
    if records:
        rows = []
        for record in records:
            rows.append([value_text(name, value) for name, value in record.items()])
        print_table([*records[0]], rows)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print a name and a value per line; those of a mapping inside have its name before theirs."""
    print_table(("what", "value"), [*_fact_rows(facts)])


def _fact_rows(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, fact in facts.items():
        label = prefix + name.replace("_", " ")
        if isinstance(fact, Mapping):
            yield from _fact_rows(fact, f"{label} ")
        else:
            yield label, value_text(name, fact)


def value_text(name: str, value: Any) -> str:
    """Return a value as it is printed for people: bytes in binary units, large numbers as counts, a dash for None."""
    if value is None:
        return "-"
    if name.endswith("bytes") and isinstance(value, int):
        return format_bytes(value)
    if not isinstance(value, float):
        return str(value)
    if abs(value) < 1e6:
        return f"{value:.6g}"
    return format_count(value)


def load_noted(arguments: argparse.Namespace, *, weights: bool = True) -> Loaded:
    """Load the config of a command, and print the loader's notes."""
    loaded = load_config(arguments.config, overrides=arguments.overrides, weights=weights)
    for note in loaded.notes:
        print_remark(note)
    return loaded


def load_described(arguments: argparse.Namespace) -> Loaded:
    """Load a config that describes all of a run, without the weights that it starts from."""
    loaded = load_noted(arguments, weights=False)
    loaded.check_described()
    return loaded


def write_output(option: str, path: Path | str, text: str) -> None:
    """Write the file that an option names.

    Raises:
        ConfigError: it cannot be written there.
    """
    with writes(option):
        Path(path).write_text(text, encoding="utf-8")
    print_remark(f"wrote {path}")


@contextlib.contextmanager
def writes(option: str) -> Iterator[None]:
    """Turn errors of writing the file that an option names into one line."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise ConfigError(f"{option} {error.filename}: {error.strerror}; give a file in a folder that exists") from None
