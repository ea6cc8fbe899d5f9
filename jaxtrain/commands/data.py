"""`jaxtrain data`: encodes text into files of tokens, and shows rows with the tokens that have a loss."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.commands.shared import load_noted, print_json, print_text
from jaxtrain.config import Config
from jaxtrain.config.arguments import local_path
from jaxtrain.config.data import DocumentsData, JsonlData, TextData
from jaxtrain.config.files import to_yaml
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.progress import Progress
from jaxtrain.runtime.terminal import print_remark


def _load(arguments: argparse.Namespace) -> Config:
    loaded = load_noted(arguments)
    loaded.check_described(given=["model", "task"])
    return loaded.config


def run_prepare(arguments: argparse.Namespace) -> int:
    """Encode the text of a config, and print how to train on the result; return 0."""
    source = _load(arguments).data
    if not isinstance(source, TextData | JsonlData | DocumentsData):
        raise ConfigError(f"data.kind={source.kind} is not text; set data.kind=text data.path=FILE, jsonl or documents")
    from jaxtrain.data import prepare_tokens

    folder = local_path(arguments.output, what="--output")
    with Progress() as progress, progress.phase("encoding") as phase:
        info = prepare_tokens(source, folder)
        phase.note(f"{info['num_documents']:,} documents, {info['num_tokens']:,} tokens")
    path = info["output"]
    print_remark(f"train on them: jaxtrain train {arguments.config} data.kind=tokens data.path={path}")
    # On standard output, so that it can be appended to a config file.
    print_text(to_yaml({"data": {"kind": "tokens", "path": path}}), end="")
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Print the first training rows of a config, and the description of its data; return 0."""
    config = _load(arguments)
    from jaxtrain.data.configured import open_run_data
    from jaxtrain.data.rows import shown_rows

    data = open_run_data(config)
    rows = list(shown_rows(data.train, arguments.rows, data.tokenizer))
    if arguments.json:
        print_json({"description": list(data.description), "counts": data.counts, "rows": rows})
        return 0
    for line in data.description:
        print_text(line)
    _print_rows(rows, len(data.train))
    return 0


def _print_rows(rows: Sequence[Mapping[str, Any]], total: int) -> None:
    """Print rows with marks around the tokens that have a loss."""
    print_text("tokens between [[ and ]] have a loss")
    for row in rows:
        print_text("")
        print_text(f"row {row['number']} of {total:,}: {row['length']:,} positions")
        for part in row["parts"]:
            print_text(f"-- {part['name']}: {part['tokens']:,} tokens, {part['trained']:,} with a loss")
            for span in part["spans"]:
                text = span["text"]
                if span["trained"]:
                    text = f"[[{text}]]"
                print_text(text, end="")
            print_text("")
