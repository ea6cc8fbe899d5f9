"""`jaxtrain ckpt` lists the checkpoints of a run and shows one; `jaxtrain report` draws pages of runs. No jax here."""

import argparse
import math
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.checkpoint.tree import shown_name
from jaxtrain.commands.shared import print_facts, print_json, print_records, print_text, writes
from jaxtrain.config.arguments import local_path
from jaxtrain.config.files import read_run
from jaxtrain.errors import CheckpointError
from jaxtrain.metrics.report.compare import runs_below, write_comparison
from jaxtrain.metrics.report.page import write_report


def _open(run_dir: str) -> Checkpointer:
    read_run(run_dir)
    return Checkpointer(checkpoint_folder(run_dir), read_only=True)


def run_ls(arguments: argparse.Namespace) -> int:
    """List the checkpoints of a run; return 0.

    Raises:
        CheckpointError: a checkpoint is damaged; the list is printed before.
    """
    records = []
    problems = []
    with _open(arguments.run_dir) as checkpoints:
        for step in checkpoints.steps():
            record: dict[str, Any] = {"step": step, "saved_at": None, "bytes": None, "eval_loss": None, "ok": True}
            try:
                info = checkpoints.info(step)
                record |= {"saved_at": info.saved_at, "bytes": info.num_bytes, "eval_loss": info.eval_loss}
                if arguments.verify:
                    checkpoints.verify(step)
            except CheckpointError as error:
                record["ok"] = False
                problems.append(str(error))
            records.append(record)
    if arguments.json:
        print_json(records)
    else:
        print_records(records)
    if problems:
        raise CheckpointError(f"{len(problems)} of {len(records)} checkpoints: {problems[0]}")
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
        for part in ("all", name.partition("/")[0]):
            total = totals.setdefault(part, {"numbers": 0, "bytes": 0})
            total["numbers"] += math.prod(shape)
            total["bytes"] += size
    facts = {"totals": totals, "step": info.step, "saved_at": info.saved_at, "eval_loss": info.eval_loss}
    facts["path"] = str(info.path)
    if arguments.json:
        print_json({**facts, "versions": info.versions, "leaves": leaves, "metadata": info.metadata})
        return 0
    print_records(leaves)
    print_text("")
    print_facts(facts)
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Write the page of one run, or the comparison of several or of a folder of runs; return 0."""
    folders = [local_path(run_dir, what="run directory") for run_dir in arguments.run_dirs]
    path = Path("compare.html")
    runs = []
    if len(folders) == 1:
        path = folders[0] / "report.html"
        runs = runs_below(folders[0])
    if not runs:
        runs = folders
        for folder in folders:
            read_run(folder)
    if arguments.output is not None:
        path = local_path(arguments.output, what="--output")
    with writes("--output"):
        if len(folders) == 1 and runs is folders:
            write_report(folders[0], path=path)
        else:
            write_comparison(runs, path)
    print_text(f"report: {path}")
    return 0
