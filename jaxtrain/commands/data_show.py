"""`jaxtrain data show`: rows as the model sees them, with the tokens that have a loss."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtrain.commands.output import print_json, print_text
from jaxtrain.commands.own_code import own_code
from jaxtrain.config import load_config
from jaxtrain.config.data import CalledData
from jaxtrain.config.kinds import row_form
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.terminal import print_remark, printable

if TYPE_CHECKING:
    from jaxtrain.data.shown import ShownPart, ShownRow

_SHOWN_FORMS = ("tokens", "pairs of answers")
# Around tokens with a loss where there are no colours.
_MARKS = ("[[", "]]")


def run_data_show(config: str, overrides: Sequence[str], *, rows: int, as_json: bool) -> int:
    """Print the first training rows of a config, and what its data says of itself.

    Args:
        config: a shipped name, a path or a run.
        overrides: `key=value` settings that replace those of the config.
        rows: how many.
        as_json: whether one JSON object is printed: `description`, `counts` and `rows`.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: the rows of the config hold no tokens that are predicted one after another.
        DataError: the data cannot be opened.
    """
    loaded = load_config(config, overrides=overrides)
    loaded.check_described(given=["model", "task"])
    form = row_form(loaded.config)
    if not isinstance(loaded.config.data, CalledData) and form not in _SHOWN_FORMS:
        raise ConfigError(
            f"data.kind={loaded.config.data.kind} gives {form}; data show takes chats, text and tokens without "
            "data.corruption"
        )
    for note in loaded.notes:
        print_remark(note)
    from jaxtrain.data.shown import shown_rows
    from jaxtrain.train.assemble import open_run_data

    with own_code(loaded.config):
        data = open_run_data(loaded.config)
        found = list(shown_rows(data.train, rows, data.tokenizer))
    if as_json:
        shown = [one.to_json() for one in found]
        print_json({"description": list(data.description), "counts": data.counts, "rows": shown})
        return 0
    for line in data.description:
        print_text(line)
    _print_rows(found, len(data.train))
    return 0


def _print_rows(rows: Sequence["ShownRow"], total: int) -> None:
    """Print rows, in colour where standard output is a terminal that has some."""
    if sys.stdout is None or not sys.stdout.isatty():
        _print_plain(rows, total)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    if console.color_system is None:
        _print_plain(rows, total)
        return
    console.print(Text.assemble("\n", ("tokens with a loss", "bold green"), " and ", ("tokens without", "dim")))
    for row in rows:
        console.print(Text(f"\n{_row_line(row, total)}", style="bold"))
        for part in row.parts:
            spans = [(_visible(span.text), "bold green" if span.trained else "dim") for span in part.spans]
            console.print(Text.assemble((f"{_part_line(part)}\n", "cyan"), *spans))


def _print_plain(rows: Sequence["ShownRow"], total: int) -> None:
    print_text(f"tokens between {_MARKS[0]} and {_MARKS[1]} have a loss")
    for row in rows:
        print_text(f"\n{_row_line(row, total)}")
        for part in row.parts:
            marked = (_MARKS[0] + span.text + _MARKS[1] if span.trained else span.text for span in part.spans)
            print_text(f"-- {_part_line(part)}\n{_visible(''.join(marked))}")


def _row_line(row: "ShownRow", total: int) -> str:
    trained, places = sum(part.trained for part in row.parts), sum(part.places for part in row.parts)
    whole = row.length * (len(row.parts) if _is_pair(row) else 1)
    return f"row {row.number} of {total:,}: {whole:,} places, {whole - places:,} unused, {trained:,} with a loss"


def _is_pair(row: "ShownRow") -> bool:
    return [part.name for part in row.parts] == ["chosen", "rejected"]


def _part_line(part: "ShownPart") -> str:
    return f"{part.name}: {part.tokens:,} tokens, {part.trained:,} with a loss"


def _visible(text: str) -> str:
    """Return a text without the control characters that a terminal would obey."""
    return "".join("\ufffd" if printable(character) != character else character for character in text)
