"""`jaxtrain ckpt`: lists the checkpoints of a run and shows the content of one. Only `--verify` starts jax."""

import math
from typing import Any

from jaxtrain.checkpoint import Checkpointer, CheckpointInfo
from jaxtrain.checkpoint.directory import DamagedError, abandoned_folders, live_steps
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.checkpoint.tree import shown_name
from jaxtrain.commands.output import print_json, print_table, print_text
from jaxtrain.config.saved_run import read_run
from jaxtrain.errors import CheckpointError
from jaxtrain.metrics.format import format_bytes, format_count
from jaxtrain.run.mended import mend_run
from jaxtrain.runtime.terminal import print_remark

# How often steps are listed where all of a list went before they were read: starting jax takes longer than some runs
# keep a step. The newest one stays the longest, and is read first.
_LOOKS = 3


def _open(run_dir: str) -> Checkpointer:
    mend_run(run_dir)
    read_run(run_dir)
    return Checkpointer(checkpoint_folder(run_dir), read_only=True)


def run_ckpt_ls(run_dir: str, *, verify: bool, as_json: bool) -> int:
    """List the checkpoints of a run, and after them those that were abandoned when the run went back to an older one.

    Args:
        run_dir: directory of the run.
        verify: whether every array is read and compared with its digest.
        as_json: whether a JSON list is printed.

    Returns:
        The exit code 0.

    Raises:
        CheckpointError: a checkpoint is damaged; the list is printed before.
    """
    with _open(run_dir) as checkpoints:
        directory = checkpoints.directory
        rows = _rows(checkpoints, verify=verify, abandoned=None)
    for folder in abandoned_folders(directory):
        with Checkpointer(folder, read_only=True) as checkpoints:
            rows += _rows(checkpoints, verify=verify, abandoned=folder.name)
    damaged = [row["problem"] for row in rows if row["problem"]]
    if as_json:
        print_json([{**row, "ok": row["problem"] is None, "verified": verify} for row in rows])
    elif rows:
        print_table(("step", "time", "size", "eval_loss", "ok"), [_ls_row(row, verify=verify) for row in rows])
    elif not live_steps(directory):
        print_remark(f"no checkpoints in {directory}")
    if damaged:
        raise CheckpointError(f"{damaged[0]}" + (f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""))
    return 0


def _rows(checkpoints: Checkpointer, *, verify: bool, abandoned: str | None) -> list[dict[str, Any]]:
    """Describe each checkpoint of a directory.

    Args:
        checkpoints: of the directory.
        verify: whether every array is compared with its digest.
        abandoned: name of the directory where it holds abandoned checkpoints; None: those of the run.
    """
    rows: list[dict[str, Any]] = []
    deleted: list[int] = []
    for _ in range(_LOOKS):
        steps = checkpoints.steps()
        for step in reversed(steps):
            row = _row(checkpoints, step, verify=verify)
            if row is None:
                deleted.append(step)
            else:
                rows.insert(0, {**row, "abandoned": abandoned})
        if rows or not steps:
            break
    if deleted:
        shown = ", ".join(map(str, sorted(deleted)))
        which = f"step {shown} was" if len(deleted) == 1 else f"steps {shown} were"
        print_remark(f"{which} deleted from {checkpoints.directory} while the list was made")
    return rows


def _row(checkpoints: Checkpointer, step: int, *, verify: bool) -> dict[str, Any] | None:
    """Describe a checkpoint; None where the run, which trains, has deleted it meanwhile."""
    row: dict[str, Any] = {"step": step, "saved_at": None, "bytes": None, "eval_loss": None, "problem": None}
    try:
        info = checkpoints.info(step)
        row |= {"saved_at": info.saved_at, "bytes": info.num_bytes, "eval_loss": info.eval_loss}
        if verify:
            checkpoints.verify(step)
    except CheckpointError as error:
        if step not in checkpoints.steps():
            return None
        if not isinstance(error, DamagedError):
            raise
        row["problem"] = str(error)
    return row


def _ls_row(row: dict[str, Any], *, verify: bool) -> tuple[str, ...]:
    loss = "-" if row["eval_loss"] is None else f"{row['eval_loss']:.6g}"
    state = "damaged" if row["problem"] else "verified" if verify else "yes"
    if row["abandoned"]:
        state += f", in {row['abandoned']}"
    return str(row["step"]), row["saved_at"] or "-", format_bytes(row["bytes"]), loss, state


def run_ckpt_show(run_dir: str, *, step: int | None, as_json: bool) -> int:
    """Print the arrays, totals and metadata of a checkpoint.

    Args:
        run_dir: directory of the run.
        step: step of the checkpoint; None: the newest one whose record is intact.
        as_json: whether one JSON object is printed; its metadata holds the complete config.

    Returns:
        The exit code 0.

    Raises:
        CheckpointError: the checkpoint does not exist, or its record is damaged.
    """
    with _open(run_dir) as checkpoints:
        info = _info(checkpoints, step)
    leaves = [
        {"path": shown_name(path), "shape": list(shape), "dtype": dtype, "bytes": _leaf_bytes(info, path)}
        for path, (shape, dtype) in info.leaves.items()
    ]
    totals = _totals(leaves)
    if as_json:
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
    print_table(
        ("path", "shape", "dtype", "bytes"),
        [
            (leaf["path"], " x ".join(map(str, leaf["shape"])) or "scalar", leaf["dtype"], format_bytes(leaf["bytes"]))
            for leaf in leaves
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
        "eval_loss": "-" if info.eval_loss is None else f"{info.eval_loss:.6g}",
        "run": info.metadata.get("name", "-"),
        "versions": ", ".join(f"{name} {version}" for name, version in info.versions.items()),
        "path": info.path,
    }
    for name, fact in facts.items():
        print_text(f"{name:<10} {fact}")
    return 0


def _info(checkpoints: Checkpointer, step: int | None) -> CheckpointInfo:
    damaged: dict[int, str] = {}
    while candidates := [one for one in checkpoints.steps() if one not in damaged and step in (None, one)]:
        try:
            return checkpoints.info(candidates[-1])
        except CheckpointError as error:
            # A run that trains deletes old steps meanwhile.
            if candidates[-1] in checkpoints.steps():
                if step is not None or not isinstance(error, DamagedError):
                    raise
                damaged[candidates[-1]] = str(error)
    if damaged:
        raise CheckpointError(next(iter(damaged.values())))
    if step is not None and checkpoints.steps():
        return checkpoints.info(step)  # says which there are
    raise CheckpointError(f"no checkpoint in {checkpoints.directory}; the run saves one at its end or on a signal")


def _leaf_bytes(info: CheckpointInfo, path: str) -> int:
    from dataclasses import replace

    return replace(info, leaves={path: info.leaves[path]}).num_bytes


def _totals(leaves: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Count the arrays, numbers and bytes of each top-level part of the state, and of all parts."""
    totals: dict[str, dict[str, int]] = {}
    for leaf in leaves:
        for part in (leaf["path"].partition("/")[0], "all"):
            total = totals.setdefault(part, {"arrays": 0, "numbers": 0, "bytes": 0})
            total["arrays"] += 1
            total["numbers"] += math.prod(leaf["shape"])
            total["bytes"] += leaf["bytes"]
    return {**{part: total for part, total in totals.items() if part != "all"}, "all": totals["all"]}
