"""`jaxtrain predict`: what a run's model gives for the rows of a file, as CSV or JSON lines."""

import argparse
import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.commands.shared import print_text
from jaxtrain.config.arguments import local_path
from jaxtrain.errors import ConfigError
from jaxtrain.inference.open import open_model
from jaxtrain.metrics.progress import Progress
from jaxtrain.runtime import distributed
from jaxtrain.runtime.files import strict_json, write_lines_atomic

# A text that spreadsheets would run; after a quote, which they do not show, they take it as it is. No number is one.
_FORMULA = re.compile(r"(?![+-]?[\d.]+(e[+-]?\d+)?$)[=+\-@\t\r].")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the predictions for the rows of a file, in its order; all of them, or nothing; return 0."""
    path = None
    as_json = arguments.json
    if arguments.out is not None:
        path = local_path(arguments.out, what="--out").expanduser()
        if path.suffix not in (".csv", ".jsonl") or path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"--out {path}: give a .csv or .jsonl file in a folder that exists")
        if path.suffix == ".jsonl":
            as_json = True
    distributed.start(emulate=arguments.emulate)
    with Progress(process_index=jax.process_index()) as progress, progress.phase("predicting") as phase:
        model = open_model(arguments.run_dir, step=arguments.step, quantize=arguments.quantize, report=progress.message)
        rows = model.predict_file(arguments.file, batch_size=arguments.batch, probabilities=arguments.probabilities)
        phase.note(f"{len(rows):,} rows")
    if progress.silent:
        return 0
    lines = _json_lines(rows) if as_json else _csv_lines(rows)
    if path is not None:
        write_lines_atomic(path, lines)
        return 0
    for line in lines:
        print_text(line, end="")
    return 0


def _json_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        values = dict(row)
        for name, value in row.items():
            if isinstance(value, np.ndarray):
                values[name] = value.tolist()
        text = json.dumps(strict_json(values), ensure_ascii=False, allow_nan=False)
        yield f"{text}\n"


def _csv_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a header and a line per row."""
    records = [_flat(row) for row in rows]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    yield buffer.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell per value: each number of a list has its own, and so has the probability of each class."""
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if name == "probabilities":
            for class_name, probability in value.items():
                cells[f"probability_{class_name}"] = probability
        elif name in ("numbers", "embedding"):
            for number, item in enumerate(value, start=1):
                cells[f"{name.removesuffix('s')}_{number}"] = str(item)
        elif isinstance(value, str) and _FORMULA.match(value):
            cells[name] = f"'{value}"
        else:
            cells[name] = value
    return cells
