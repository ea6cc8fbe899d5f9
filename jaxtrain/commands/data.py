"""`jaxtrain data`: encodes text into files of tokens, and shows rows with the tokens that have a loss."""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.commands.shared import own_code, print_json, print_text
from jaxtrain.config import Loaded, load_config
from jaxtrain.config.arguments import local_path
from jaxtrain.config.data import DocumentsData, JsonlData, TextData
from jaxtrain.config.files import to_yaml
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.terminal import print_remark, printable


def _load(arguments: argparse.Namespace) -> Loaded:
    loaded = load_config(arguments.config, overrides=arguments.overrides)
    loaded.check_described(given=["model", "task"])
    for note in loaded.notes:
        print_remark(note)
    return loaded


def run_prepare(arguments: argparse.Namespace) -> int:
    """Encode the text of a config, and print how to train on the result; 0."""
    source = _load(arguments).config.data
    if not isinstance(source, TextData | JsonlData | DocumentsData):
        raise ConfigError(f"data.kind={source.kind} is not text; set data.kind=text data.path=FILE, jsonl or documents")
    from jaxtrain.data import prepare_tokens

    last = time.monotonic()

    def show(documents: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            print_remark(f"encoding: {documents:,} documents, {tokens:,} tokens")

    folder = local_path(arguments.output, what="--output")
    made = prepare_tokens(source, folder, progress=show)
    print_remark(
        f"documents: {made['num_documents']:,}, tokens: {made['num_tokens']:,} of {made['vocab_size']:,} ids "
        f"({made['dtype']}), files: {len(made['shards']):,}"
    )
    print_remark(f"train on them: jaxtrain train {arguments.config} data.kind=tokens data.path={made['output']}")
    # On standard output, so that it can be appended to a config file.
    print_text(to_yaml({"data": {"kind": "tokens", "path": made["output"]}}).rstrip("\n"))
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Print the first training rows of a config, and what its data says of itself; 0."""
    config = _load(arguments).config
    from jaxtrain.data.configured import open_run_data
    from jaxtrain.data.rows import shown_rows

    with own_code(config):
        data = open_run_data(config)
        found = list(shown_rows(data.train, arguments.rows, data.tokenizer))
    if arguments.json:
        print_json({"description": list(data.description), "counts": data.counts, "rows": found})
        return 0
    for line in data.description:
        print_text(line)
    _print_rows(found, len(data.train))
    return 0


def _print_rows(rows: Sequence[Mapping[str, Any]], total: int) -> None:
    """Print rows: in colour on a terminal that has some, else with marks around the tokens with a loss."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    coloured = console.color_system is not None
    before, after = ("", "") if coloured else ("[[", "]]")
    styles = {True: "bold green", False: "dim"}
    lines = [Text(f"tokens {'in green' if coloured else 'between [[ and ]]'} have a loss")]
    for row in rows:
        parts = row["parts"]
        trained, places = (sum(part[name] for part in parts) for name in ("trained", "places"))
        whole = row["length"] * (2 if parts[-1]["name"] == "rejected" else 1)
        counts = f"{whole:,} positions, {whole - places:,} unused, {trained:,} with a loss"
        lines.append(Text(f"\nrow {row['number']} of {total:,}: {counts}", "bold"))
        for part in parts:
            lines.append(Text(f"-- {part['name']}: {part['tokens']:,} tokens, {part['trained']:,} with a loss", "cyan"))
            text = Text()
            for span in part["spans"]:
                shown = printable(span["text"])
                text.append(f"{before}{shown}{after}" if span["trained"] else shown, styles[span["trained"]])
            lines.append(text)
    for line in lines:
        console.print(line) if coloured else print_text(line.plain)
