"""`jaxtrain ckpt` lists the checkpoints of a run and shows one; `jaxtrain report` draws pages of runs. No jax here."""

import argparse
import math
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.checkpoint.tree import shown_name
from jaxtrain.commands.shared import print_json, print_records, print_table, print_text, value_text, writes
from jaxtrain.config.arguments import local_path
from jaxtrain.config.files import read_run
from jaxtrain.errors import CheckpointError
from jaxtrain.metrics.format import format_count
from jaxtrain.metrics.report.compare import runs_below, write_comparison
from jaxtrain.metrics.report.page import write_report
from jaxtrain.runtime.terminal import print_remark


def _open(run_dir: str) -> Checkpointer:
    read_run(run_dir)
    return Checkpointer(checkpoint_folder(run_dir), read_only=True)


def run_ls(arguments: argparse.Namespace) -> int:
    """List the checkpoints of a run; return 0.

    Raises:
        CheckpointError: a checkpoint is damaged; the list is printed before.
    """
    records = []
    rows = []
    problems = []
    with _open(arguments.run_dir) as checkpoints:
        for step in checkpoints.steps():
            record: dict[str, Any] = {"step": step, "saved_at": None, "bytes": None, "eval_loss": None, "problem": None}
            state = "yes"
            try:
                info = checkpoints.info(step)
                record |= {"saved_at": info.saved_at, "bytes": info.num_bytes, "eval_loss": info.eval_loss}
                if arguments.verify:
                    checkpoints.verify(step)
                    state = "verified"
            except CheckpointError as error:
                record["problem"] = str(error)
                state = "damaged"
                problems.append(str(error))
            rows.append([value_text(name, value) for name, value in record.items() if name != "problem"] + [state])
            records.append({**record, "ok": state != "damaged", "verified": arguments.verify})
    if arguments.json:
        print_json(records)
    elif records:
        print_table(("step", "time", "size", "eval_loss", "ok"), rows)
    else:
        print_remark(f"no checkpoints in {checkpoints.directory}")
    if problems:
        others = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        raise CheckpointError(f"{problems[0]}{others}")
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Print the arrays, totals and metadata of a checkpoint, by default of the newest intact one; return 0."""
    with _open(arguments.run_dir) as checkpoints:
        info = checkpoints.info(arguments.step)
    leaves = []
    totals: dict[str, dict[str, int]] = {}
    for path, (shape, dtype) in info.leaves.items():
        name = shown_name(path)
        size = info.bytes_of(path)
        leaves.append({"path": name, "shape": list(shape), "dtype": dtype, "bytes": size})
        for part in (name.partition("/")[0], "all"):
            total = totals.setdefault(part, {"arrays": 0, "numbers": 0, "bytes": 0})
            total["arrays"] += 1
            total["numbers"] += math.prod(shape)
            total["bytes"] += size
    totals["all"] = totals.pop("all")
    facts = {"step": info.step, "saved_at": info.saved_at, "eval_loss": info.eval_loss, "path": str(info.path)}
    if arguments.json:
        print_json({**facts, "versions": info.versions, "leaves": leaves, "totals": totals, "metadata": info.metadata})
        return 0
    print_records(leaves)
    print_text("")
    print_records(
        [{"part": part, **total, "numbers": format_count(total["numbers"])} for part, total in totals.items()]
    )
    print_text("")
    for name, fact in facts.items():
        print_text(f"{name:<10} {value_text(name, fact)}")
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Write the page of one run, or the comparison of several or of a folder of runs; return 0."""
    folders = [local_path(run_dir, what="run directory") for run_dir in arguments.run_dirs]
    path = Path("compare.html")
    runs = folders
    if len(folders) == 1:
        path = folders[0] / "report.html"
        if not (folders[0] / "run.json").exists():
            runs = runs_below(folders[0]) or folders
    if runs == folders:
        for folder in folders:
            read_run(folder)
    if arguments.output is not None:
        path = local_path(arguments.output, what="--output")
    with writes("--output"):
        if runs == folders[:1]:
            write_report(folders[0], path=path)
        else:
            write_comparison(runs, path)
    print_text(f"report: {path}")
    return 0
