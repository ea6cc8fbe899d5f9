"""`jaxtrain ckpt` lists the checkpoints of a run and shows one; `jaxtrain report` draws pages of runs. No jax here."""

import argparse
import math
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.checkpoint.tree import shown_name
from jaxtrain.commands.shared import print_json, print_table, print_text, writes
from jaxtrain.config.arguments import local_path
from jaxtrain.config.files import read_run
from jaxtrain.errors import CheckpointError
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.metrics.report.compare import runs_below, write_comparison
from jaxtrain.metrics.report.page import write_report
from jaxtrain.runtime.terminal import print_remark


def _open(run_dir: str) -> Checkpointer:
    read_run(run_dir)
    return Checkpointer(checkpoint_folder(run_dir), read_only=True)


def run_ls(arguments: argparse.Namespace) -> int:
    """List the checkpoints of a run; 0."""
    rows = []
    with _open(arguments.run_dir) as checkpoints:
        for step in checkpoints.steps():
            row = {"step": step, "saved_at": None, "bytes": None, "eval_loss": None, "problem": None}
            try:
                info = checkpoints.info(step)
                row |= {"saved_at": info.saved_at, "bytes": info.num_bytes, "eval_loss": info.eval_loss}
                if arguments.verify:
                    checkpoints.verify(step)
            except CheckpointError as error:
                row["problem"] = str(error)
            rows.append(row)
    damaged = [row["problem"] for row in rows if row["problem"]]
    if arguments.json:
        print_json([{**row, "ok": row["problem"] is None, "verified": arguments.verify} for row in rows])
    elif rows:
        intact = "verified" if arguments.verify else "yes"
        cells = []
        for row in rows:
            state = "damaged" if row["problem"] else intact
            size = format_bytes(row["bytes"])
            cells.append((str(row["step"]), row["saved_at"] or "-", size, _loss(row["eval_loss"]), state))
        print_table(("step", "time", "size", "eval_loss", "ok"), cells)
    else:
        print_remark(f"no checkpoints in {checkpoints.directory}")
    if damaged:
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        raise CheckpointError(f"{damaged[0]}{more}")
    return 0


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.6g}"


def run_show(arguments: argparse.Namespace) -> int:
    """Print the arrays, totals and metadata of a checkpoint: by default of the newest with an intact record; 0."""
    with _open(arguments.run_dir) as checkpoints:
        info = checkpoints.info(arguments.step)
    leaves = [
        {"path": shown_name(path), "shape": list(shape), "dtype": dtype, "bytes": info.bytes_of(path)}
        for path, (shape, dtype) in info.leaves.items()
    ]
    parts: dict[str, list[dict[str, Any]]] = {}
    for leaf in leaves:
        parts.setdefault(leaf["path"].partition("/")[0], []).append(leaf)
    totals = {part: _total(part_leaves) for part, part_leaves in {**parts, "all": leaves}.items()}
    facts = {"step": info.step, "saved_at": info.saved_at, "eval_loss": info.eval_loss, "path": str(info.path)}
    if arguments.json:
        more = {"versions": info.versions, "leaves": leaves, "totals": totals, "metadata": info.metadata}
        print_json({**facts, **more})
        return 0
    shapes = [" x ".join(map(str, leaf["shape"])) or "scalar" for leaf in leaves]
    print_table(
        ("path", "shape", "dtype", "bytes"),
        [
            (one["path"], shape, one["dtype"], format_bytes(one["bytes"]))
            for one, shape in zip(leaves, shapes, strict=True)
        ],
    )
    print_text("")
    print_table(
        ("part", "arrays", "numbers", "bytes"),
        [
            (part, str(total["arrays"]), format_count(total["numbers"]), format_bytes(total["bytes"]))
            for part, total in totals.items()
        ],
    )
    print_text("")
    for name, fact in {**facts, "eval_loss": _loss(info.eval_loss)}.items():
        print_text(f"{name:<10} {fact}")
    return 0


def _total(leaves: list[dict[str, Any]]) -> dict[str, int]:
    numbers = sum(math.prod(leaf["shape"]) for leaf in leaves)
    size = sum(leaf["bytes"] for leaf in leaves)
    return {"arrays": len(leaves), "numbers": numbers, "bytes": size}


def report(arguments: argparse.Namespace) -> int:
    """Write the page of one run, or the comparison of several or of a folder of runs; 0."""
    folders = [local_path(run_dir, what="run directory") for run_dir in arguments.run_dirs]
    is_one = len(folders) == 1
    below = runs_below(folders[0]) if is_one and not (folders[0] / "run.json").exists() else []
    for folder in [] if below else folders:
        read_run(folder)
    path = folders[0] / "report.html" if is_one else Path("compare.html")
    if arguments.output is not None:
        path = local_path(arguments.output, what="--output")
    with writes("--output"):
        if is_one and not below:
            write_report(folders[0], path=path)
        else:
            write_comparison(below or folders, path)
    print_text(f"report: {path}")
    return 0
