"""What several commands do: print answers, check a config, and give errors of the user's own code as one line."""

import argparse
import contextlib
import errno
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config import Loaded, load_config
from jaxtrain.config.kinds import called_parts, check_kinds
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError, UserError, first_line
from jaxtrain.metrics.format import format_bytes
from jaxtrain.runtime.call import user_place
from jaxtrain.runtime.files import strict_json
from jaxtrain.runtime.terminal import print_remark, printable


def print_text(text: str, *, end: str = "\n", flush: bool = False, is_content: bool = False) -> None:
    """Print a text; control characters, and those that the stream's encoding lacks, become escapes.

    With `is_content` it is what a model wrote, whose control characters files and other programs get as they are.
    """
    if not is_content or sys.stdout.isatty():
        text = printable(text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="backslashreplace").decode(encoding), end=end, flush=flush)


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

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in header:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        Console(highlight=False).print(table)
        return
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print_text("  ".join(cells).rstrip())


def print_records(records: Sequence[Mapping[str, Any]]) -> None:
    """Print records with equal keys, of which there is at least one, as a table."""
    rows = [[value_text(name, value) for name, value in record.items()] for record in records]
    print_table([*records[0]], rows)


def value_text(name: str, value: Any) -> str:
    """Return a value as it is printed for people: sizes in binary units, and a dash for None."""
    if value is None:
        return "-"
    if name.endswith(("bytes", "size")):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {value_text(key, item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return " x ".join(map(str, value)) or "scalar"
    return str(value)


def load_described(arguments: argparse.Namespace) -> Loaded:
    """Load a config that describes all of a run, without the weights that it starts from; print the loader's notes.

    A transformer with causal=false passes, because a task from Python, which no config describes, can train it.
    """
    loaded = load_config(arguments.config, overrides=arguments.overrides, weights=False)
    loaded.check_described()
    for note in loaded.notes:
        print_remark(note)
    model = loaded.config.model
    sees_ahead = model.kind == "transformer" and not model.causal
    check_kinds(loaded.config, own_task=sees_ahead and loaded.config.task == "language_modeling")
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
    """Turn errors of writing the file that an option names into one line; a full disk is reported as everywhere."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"{option} {error.filename}: {error.strerror}; give a file in a folder that exists") from None


@contextlib.contextmanager
def own_code(config: Config | None) -> Iterator[None]:
    """Turn an error that passed through the user's code into one line that names the line of that code.

    The models, losses and rows that functions of a config make are applied long after the functions returned.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if config is None or not called_parts(config) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        place = user_place(error)
        if place is None:
            raise
        raise ConfigError(
            f"{place} raised {type(error).__name__}: {first_line(error)}; --debug shows the traceback"
        ) from error
