"""What `jaxtrain config` prints of one config: its keys, its YAML or its shardings."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from jaxtrain.commands.output import print_table, print_text
from jaxtrain.config import Loaded, load_config
from jaxtrain.config.describe import DescribedGroup, describe
from jaxtrain.config.keys import nearest
from jaxtrain.config.kinds import check_kinds
from jaxtrain.config.yaml_file import to_yaml
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.terminal import print_remark, printable

# On narrower terminals the columns of a key are printed one below the other.
_TABLE_COLUMNS = 120


def print_loaded(config: str, overrides: Sequence[str], *, form: str, only: str | None, emulate: int | None) -> None:
    """Print a config as `jaxtrain.commands.config.print_config` describes, in a form other than its schema."""
    try:
        loaded = load_config(config, overrides=overrides)
    except ConfigError as error:
        # What is written to be read again takes the tokenizer of the weights; people look up keys without them.
        if form == "yaml":
            raise
        loaded = load_config(config, overrides=overrides, weights=False)
        print_remark(f"jaxtrain train would refuse this: {error}")
    for part, name in loaded.from_python.items():
        print_remark(f"the {part} of {config} came from Python ({name}); this config does not describe it")
    for note in loaded.notes:
        print_remark(note)
    if form == "yaml":
        print_text(to_yaml(_chosen_values(loaded, only)).rstrip("\n"))
    elif form == "sharding":
        from jaxtrain.commands.own_code import own_code
        from jaxtrain.commands.sharding import print_shardings

        with own_code(loaded.config):
            print_shardings(loaded.config, only=only, emulate=emulate)
    else:
        _print_keys(_chosen(loaded, only))
        try:
            check_kinds(loaded.config)
        except ConfigError as error:
            # A remark and no error, because users look up the keys of another kind here, one change at a time.
            print_remark(f"jaxtrain train would refuse this: {error}")


def _chosen(loaded: Loaded, only: str | None) -> list[DescribedGroup]:
    groups = describe(loaded)
    if only is None:
        return groups
    kept = []
    for group in groups:
        keys = tuple(key for key in group.keys if f"{key.path}.".startswith(f"{only.rstrip('.')}."))
        if keys:
            kept.append(DescribedGroup(group.name, group.title, keys))
    if not kept:
        close = nearest(only, loaded.config)
        raise ConfigError(f"--only {only}: no key begins with it" + (f"; did you mean {close!r}?" if close else ""))
    return kept


def _chosen_values(loaded: Loaded, only: str | None) -> dict[str, Any]:
    """The config, or what is below a prefix at its place in it."""
    values = loaded.config.model_dump(mode="json")
    if only is None:
        return values
    _chosen(loaded, only)
    path, found = only.rstrip(".").split("."), values
    for part in path:
        found = found[part]
    for part in reversed(path):
        found = {part: found}
    return found


def _print_keys(groups: Sequence[DescribedGroup]) -> None:
    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty():
        header = ("key", "value", "type", "default", "origin", "doc")
        rows = [
            (key.path, key.value, key.type, key.default, key.origin, key.doc) for group in groups for key in group.keys
        ]
        print_table(header, rows)
    elif width < _TABLE_COLUMNS:
        _print_stacked(groups, width)
    else:
        _print_rich(groups)


def _print_stacked(groups: Sequence[DescribedGroup], width: int) -> None:
    for group in groups:
        print_text(f"\n{group.name or 'run'}: {group.title}")
        for key in group.keys:
            print_text(f"  {key.path}={key.value}")
            default = "" if key.default == key.value else f", default {key.default}"
            about = f"{key.doc} [{key.type}{default}; {key.origin}]"
            print_text(textwrap.fill(about, width, initial_indent="      ", subsequent_indent="      "))


def _print_rich(groups: Sequence[DescribedGroup]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for group in groups:
        console.print(Text.assemble(("\n" + (group.name or "run"), "bold"), f"  {group.title}"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
        for title, ratio in (("key", 5), ("value", 4), ("type", 4), ("default", 3), ("origin", 4), ("doc", 9)):
            table.add_column(title, ratio=ratio, overflow="fold", header_style="dim")
        for key in group.keys:
            # Keys that somebody set are bold, so that they are easy to find among defaults.
            style = "" if key.origin == "default" else "bold"
            cells = (
                key.path,
                key.value,
                key.type,
                "" if key.default == key.value else key.default,
                key.origin,
                key.doc,
            )
            styles = (style, style, "dim", "dim", "", "dim")
            table.add_row(*(Text(printable(cell), style) for cell, style in zip(cells, styles, strict=True)))
        console.print(table)
