"""What several verbs do: print answers, check a config, and give errors of the user's own code as one line."""

import contextlib
import errno
import json
import sys
from collections.abc import Iterator, Sequence

from jaxtrain.config import Loaded
from jaxtrain.config.kinds import called_parts, check_kinds
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError, UserError
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


def print_json(value: object) -> None:
    """Print a value as indented strict JSON; NaN becomes null."""
    print(json.dumps(strict_json(value), indent=2, allow_nan=False))


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
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print_text("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def check_or_remark(loaded: Loaded) -> None:
    """Print the notes of the loader, and check that the kinds of model, data and task fit together.

    A transformer with causal=false passes, because a task from Python, which no config describes, can train it.
    """
    for note in loaded.notes:
        print_remark(note)
    model, task = loaded.config.model, loaded.config.task
    own_task = model.kind == "transformer" and not model.causal and task == "language_modeling"
    check_kinds(loaded.config, own_task=own_task)


@contextlib.contextmanager
def writes(option: str) -> Iterator[None]:
    """Give an error of writing the file that an option names as one line; a full disk is told as everywhere."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        said = f"{error.strerror}; give a file in a folder that exists"
        raise ConfigError(f"{option} {error.filename}: {said}") from None


@contextlib.contextmanager
def own_code(config: Config | None) -> Iterator[None]:
    """Give an error that passed through the user's code as one line that names the line of that code.

    The models, losses and rows that functions of a config make are applied long after the functions returned.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        place = user_place(error) if config is not None and called_parts(config) else None
        if place is None or "RESOURCE_EXHAUSTED" in str(error):
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        said = f": {first[:300]}" if first else ""
        raise ConfigError(f"{place} raised {type(error).__name__}{said}; --debug shows the traceback") from error
