"""`jaxtrain predict`: what a run's model gives for the rows of a file, as CSV or JSON lines."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.commands.output import print_text
from jaxtrain.commands.own_code import own_code
from jaxtrain.config import Config
from jaxtrain.config.local_path import local_path
from jaxtrain.config.saved_run import is_run
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.open_run import open_run, saved_config
from jaxtrain.run.predict import predict_published
from jaxtrain.runtime import distributed
from jaxtrain.runtime.files import strict_json, write_lines_atomic

_CSV, _JSON_LINES = ".csv", ".jsonl"


def run_predict(
    run_dir: str,
    file: str,
    *,
    out: str | None,
    batch_size: int | None,
    probabilities: bool,
    quantize: str | None,
    step: int | None,
    emulate: int | None,
    as_json: bool,
) -> int:
    """Print or write the predictions for the rows of a file, in its order; all of them, or nothing.

    Args:
        run_dir: directory of the run, or the folder of a published model.
        file: see `OpenedRun.predict_file`.
        out: .csv or .jsonl file to write or replace; None: standard output.
        batch_size: the largest batch; None: a microbatch of the run.
        probabilities: whether classes come with the probability of each.
        quantize: number format of the linear layers; None: the one in which they were trained.
        step: step of the checkpoint; None: the newest intact one.
        emulate: number of CPU devices to emulate; None: the devices of the machine.
        as_json: whether JSON lines are printed in place of CSV.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: `out` is no file that can be written, or the model gives no predictions per row.
        DataError: the file or a row of it is not what the run reads.
    """
    written = None if out is None else _checked(out, as_json)
    published = _is_published(run_dir, {"--step": step, "--quantize": quantize})
    config = Config() if published else saved_config(run_dir).config
    distributed.start(emulate=emulate, compilation_cache=config.compilation_cache)
    main = distributed.is_main_process()
    with own_code(config), Progress(process_index=0 if main else 1) as progress, progress.phase("predicting") as phase:
        if published:
            rows = predict_published(run_dir, file, batch_size=batch_size, probabilities=probabilities)
        else:
            run = open_run(run_dir, step=step, quantize=quantize, report=progress.message)
            rows = run.predict_file(file, batch_size=batch_size, probabilities=probabilities)
        phase.note(f"{len(rows):,} rows")
    if not main:
        return 0
    lines = _json_lines(rows) if as_json or (written and written.suffix == _JSON_LINES) else _csv_lines(rows)
    if written is not None:
        write_lines_atomic(written, lines)
        return 0
    for line in lines:
        print_text(line.removesuffix("\n"))
    return 0


def _is_published(path: str, options: Mapping[str, Any]) -> bool:
    """Whether a folder holds a published model and no run.

    Raises:
        ConfigError: it does, and an option is given that only runs have.
    """
    folder = local_path(path, what="run directory").expanduser()
    if is_run(folder) or not (folder / "config.json").is_file():
        return False
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"{option} {value} is for runs, and {path} is a published model; leave it out")
    return True


def _checked(out: str, as_json: bool) -> Path:
    """The file to write, which is refused before anything is computed.

    Raises:
        ConfigError: it is of another format, or its folder is not there.
    """
    path = local_path(out, what="--out").expanduser()
    if path.suffix not in (_CSV, _JSON_LINES):
        raise ConfigError(f"--out {out} is no .csv or .jsonl file; name it so, by the format that you want")
    if as_json and path.suffix == _CSV:
        raise ConfigError(
            f"--json asks for JSON lines, but --out {out} is CSV; write --out {path.with_suffix('.jsonl')}"
        )
    if path.is_dir() or not path.parent.is_dir():
        wrong = "is a folder" if path.is_dir() else f"is in {path.parent}, which is no folder"
        raise ConfigError(f"--out {out} {wrong}; name a file in a folder that is there")
    return path


def _json_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}
        yield json.dumps(strict_json(plain), ensure_ascii=False, allow_nan=False) + "\n"


def _csv_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A header and a line per row; of words, a line per word."""
    flat = [line for row in rows for line in (_word_lines(row) if "words" in row else [_flat(row)])]
    # The first line has every column but for words without a class; all rows of a file are alike.
    header = max(flat, key=len, default={})
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(header), restval="", lineterminator="\n")
    writer.writeheader()
    for line in flat:
        writer.writerow(line)
        # A text may hold line ends, which are inside quotes.
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


def _word_lines(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    shares = row.get("probabilities") or [None] * len(row["words"])
    for number, (word, name, found) in enumerate(zip(row["words"], row["classes"], shares, strict=True), start=1):
        yield {"row": row["row"], "word": number, "text": word, "class": name} | _shares(found)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """One cell per value: lists get a number each, classes their names."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        match name:
            case "probabilities":
                found |= _shares(value)
            case "numbers" | "embedding":
                singular = name.removesuffix("s")
                found |= {f"{singular}_{i}": str(number) for i, number in enumerate(value, start=1)}
            case _:
                found[name] = value
    return found


def _shares(probabilities: Mapping[str, float] | None) -> dict[str, float]:
    return {f"probability_{name}": share for name, share in (probabilities or {}).items()}
