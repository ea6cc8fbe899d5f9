"""`jaxtrain predict`: what a run's model gives for the rows of a file, as CSV or JSON lines."""

import argparse
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.commands.shared import own_code, print_text
from jaxtrain.config.arguments import local_path
from jaxtrain.errors import ConfigError
from jaxtrain.inference.open import open_model
from jaxtrain.metrics.progress import Progress
from jaxtrain.runtime import distributed
from jaxtrain.runtime.files import strict_json, write_lines_atomic

# A text that spreadsheets would run; after a quote, which they do not show, they take it as it is. No number is one.
_FORMULA = re.compile(r"(?![+-]?[\d.]+(e[+-]?\d+)?$)[=+\-@\t\r].")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the predictions for the rows of a file, in its order; all of them, or nothing."""
    out = None if arguments.out is None else local_path(arguments.out, what="--out").expanduser()
    if out is not None and (out.suffix not in (".csv", ".jsonl") or out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--out {out}: give a .csv or .jsonl file in a folder that exists")
    distributed.start(emulate=arguments.emulate)
    main, how = distributed.is_main_process(), {"batch_size": arguments.batch, "probabilities": arguments.probabilities}
    with Progress(process_index=0 if main else 1) as progress, progress.phase("predicting") as phase:
        chosen = {"step": arguments.step, "quantize": arguments.quantize, "report": progress.message}
        model = open_model(arguments.run_dir, **chosen)
        with own_code(model.config):
            rows = model.predict_file(arguments.file, **how)
        phase.note(f"{len(rows):,} rows")
    if not main:
        return 0
    lines = _json_lines(rows) if arguments.json or (out and out.suffix == ".jsonl") else _csv_lines(rows)
    if out is not None:
        write_lines_atomic(out, lines)
        return 0
    for line in lines:
        print_text(line, end="")
    return 0


def _json_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}
        yield json.dumps(strict_json(plain), ensure_ascii=False, allow_nan=False) + "\n"


def _csv_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A header and a line per row."""
    flat = [_flat(row) for row in rows]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    yield buffer.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """One cell per value: lists get a number each, classes their names."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name == "probabilities":
            found |= _numbered("probability", value)
        elif name in ("numbers", "embedding"):
            found |= _numbered(name.removesuffix("s"), dict(enumerate(map(str, value), start=1)))
        elif isinstance(value, str) and _FORMULA.match(value):
            found[name] = f"'{value}"
        else:
            found[name] = value
    return found


def _numbered(name: str, values: Mapping[Any, Any]) -> dict[str, Any]:
    return {f"{name}_{key}": value for key, value in values.items()}
