"""`jaxtrain ckpt`: lists the checkpoints of a run and shows the content of one. Only `--verify` starts jax."""

import argparse
import math
from typing import Any

from jaxtrain.checkpoint import Checkpointer, CheckpointInfo
from jaxtrain.checkpoint.directory import DamagedError
from jaxtrain.checkpoint.going_back import abandoned_folders
from jaxtrain.checkpoint.tree import shown_name
from jaxtrain.checkpoint.where import checkpoint_folder
from jaxtrain.commands.shared import print_json, print_table, print_text
from jaxtrain.config.saved_run import read_run
from jaxtrain.errors import CheckpointError
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.runtime.remarks import print_remark


def _open(run_dir: str) -> Checkpointer:
    read_run(run_dir)
    return Checkpointer(checkpoint_folder(run_dir), read_only=True)


def run_ls(arguments: argparse.Namespace) -> int:
    """List the checkpoints of a run, and after them those that were abandoned when the run went back; 0.

    Raises:
        CheckpointError: a checkpoint is damaged; the list is printed before.
    """
    verify = arguments.verify
    with _open(arguments.run_dir) as checkpoints:
        directory = checkpoints.directory
        rows = [{**_row(checkpoints, step, verify), "abandoned": None} for step in checkpoints.steps()]
    for folder in abandoned_folders(directory):
        with Checkpointer(folder, read_only=True) as checkpoints:
            rows += [{**_row(checkpoints, step, verify), "abandoned": folder.name} for step in checkpoints.steps()]
    if arguments.json:
        print_json([{**row, "ok": row["problem"] is None, "verified": verify} for row in rows])
    elif rows:
        print_table(("step", "time", "size", "eval_loss", "ok"), [_cells(row, verify) for row in rows])
    else:
        print_remark(f"no checkpoints in {directory}")
    damaged = [row["problem"] for row in rows if row["problem"]]
    if damaged:
        raise CheckpointError(f"{damaged[0]}" + (f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""))
    return 0


def _row(checkpoints: Checkpointer, step: int, verify: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "saved_at": None, "bytes": None, "eval_loss": None, "problem": None}
    try:
        info = checkpoints.info(step)
        row |= {"saved_at": info.saved_at, "bytes": info.num_bytes, "eval_loss": info.eval_loss}
        if verify:
            checkpoints.verify(step)
    except CheckpointError as error:
        row["problem"] = str(error)
    return row


def _cells(row: dict[str, Any], verify: bool) -> tuple[str, ...]:
    state = "damaged" if row["problem"] else "verified" if verify else "yes"
    if row["abandoned"]:
        state += f", in {row['abandoned']}"
    return str(row["step"]), row["saved_at"] or "-", format_bytes(row["bytes"]), _loss(row["eval_loss"]), state


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.6g}"


def run_show(arguments: argparse.Namespace) -> int:
    """Print the arrays, totals and metadata of a checkpoint: by default of the newest with an intact record; 0."""
    with _open(arguments.run_dir) as checkpoints:
        info = _info(checkpoints, arguments.step)
    leaves = [
        {"path": shown_name(path), "shape": list(shape), "dtype": dtype, "bytes": info.bytes_of(path)}
        for path, (shape, dtype) in info.leaves.items()
    ]
    totals = _totals(leaves)
    if arguments.json:
        print_json(
            {
                "step": info.step,
                "path": str(info.path),
                "saved_at": info.saved_at,
                "eval_loss": info.eval_loss,
                "versions": info.versions,
                "leaves": leaves,
                "totals": totals,
                "metadata": info.metadata,
            }
        )
        return 0
    shapes = [" x ".join(map(str, leaf["shape"])) or "scalar" for leaf in leaves]
    print_table(
        ("path", "shape", "dtype", "bytes"),
        [
            (leaf["path"], shape, leaf["dtype"], format_bytes(leaf["bytes"]))
            for leaf, shape in zip(leaves, shapes, strict=True)
        ],
    )
    print_text("")
    print_table(
        ("part", "arrays", "numbers", "bytes"),
        [
            (name, str(total["arrays"]), format_count(total["numbers"]), format_bytes(total["bytes"]))
            for name, total in totals.items()
        ],
    )
    print_text("")
    facts = {
        "step": info.step,
        "saved": info.saved_at,
        "eval_loss": _loss(info.eval_loss),
        "run": info.metadata.get("name", "-"),
        "versions": ", ".join(f"{name} {version}" for name, version in info.versions.items()),
        "path": info.path,
    }
    for name, fact in facts.items():
        print_text(f"{name:<10} {fact}")
    return 0


def _info(checkpoints: Checkpointer, step: int | None) -> CheckpointInfo:
    steps = [step] if step is not None else list(reversed(checkpoints.steps()))
    damaged = None
    for one in steps:
        try:
            return checkpoints.info(one)
        except DamagedError as error:
            damaged = damaged or error
    raise damaged or CheckpointError(
        f"no checkpoint in {checkpoints.directory}; the run saves one at its end or on a signal"
    )


def _totals(leaves: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Count the arrays, numbers and bytes of each top-level part of the state, and of all parts."""
    totals: dict[str, dict[str, int]] = {}
    for part in dict.fromkeys(leaf["path"].partition("/")[0] for leaf in leaves):
        inside = [leaf for leaf in leaves if leaf["path"].partition("/")[0] == part]
        totals[part] = {
            "arrays": len(inside),
            "numbers": sum(math.prod(leaf["shape"]) for leaf in inside),
            "bytes": sum(leaf["bytes"] for leaf in inside),
        }
    names = ("arrays", "numbers", "bytes")
    return {**totals, "all": {name: sum(total[name] for total in totals.values()) for name in names}}
