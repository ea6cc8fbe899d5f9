"""Small runs for tests: a config that trains in about a second, and helpers to run it here or in a process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint import Checkpointer

# A schedule would depend on the number of steps, and a run of each number would compile a step of its own.
TINY: dict[str, Any] = {
    "name": "tiny",
    "model": dict(kind="transformer", num_layers=2, embed_dim=32, num_heads=4, max_sequence_length=32, dropout=0.1),
    "data": dict(kind="text", tokenizer=dict(kind="byte")),
    "optimizer": dict(
        kind="adamw", learning_rate=1e-3, weight_decay=0.1, ema_decay=0.9, schedule=dict(kind="constant")
    ),
    "train": dict(steps=100, global_batch_size=8),
    "evaluation": dict(max_batches=2),
    "checkpoint": dict(every=None),
    "logging": dict(every=1, tensorboard=False, report=False),
}


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    """step -> training loss; a step logged twice is an error."""
    found: dict[int, float] = {}
    for row in rows(run_dir):
        if "loss" in row:
            assert row["step"] not in found, f"step {row['step']} stands twice in metrics.jsonl"
            found[row["step"]] = row["loss"]
    return found


def saved_arrays(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, whole on one device."""
    with Checkpointer(run_dir / "checkpoints", read_only=True) as checkpointer:
        info = checkpointer.info(step)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        params = {
            name.removeprefix("params."): jax.ShapeDtypeStruct(shape, dtype, sharding=device)
            for name, (shape, dtype) in info.leaves.items()
            if name.startswith("params.")
        }
        restored = checkpointer.restore(params, step=step, prefix="params")
        return {name: np.asarray(leaf) for name, leaf in restored.items()}


def command(config: Path, run_dir: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "jaxtrain", "train", str(config), "--run-dir", str(run_dir), *arguments]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", **variables}


def run_process(config: Path, run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`jaxtrain train` in a process of its own."""
    return subprocess.run(
        command(config, run_dir, *arguments), capture_output=True, text=True, env=environment(), timeout=300
    )


def write_config(folder: Path, **changes: Any) -> Path:
    """TINY (with dotted changes) as a YAML file."""
    values = json.loads(json.dumps(TINY))
    for key, value in changes.items():
        group, _, leaf = key.partition("__")
        if leaf:
            values[group][leaf] = value
        else:
            values[group] = value
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    return path
