"""Small runs whose numbers go wrong, and what makes them wrong."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain.metrics.progress import Progress

ROWS, BATCH, STEPS = 512, 8, 60
CONFIG: dict[str, Any] = {
    "name": "numbers",
    "task": "regression",
    "model": {"kind": "mlp", "hidden_dims": [16]},
    "data": {"kind": "synthetic", "task": "table", "num_columns": 8},
    "optimizer": {"kind": "adamw", "learning_rate": 1e-3, "schedule": {"kind": "constant"}},
    "train": {"steps": STEPS, "global_batch_size": BATCH},
    "checkpoint": {"every": 10, "keep_last": 4},
    "logging": {"every": 1, "tensorboard": False, "report": False},
}


class Lines(Progress):
    """Progress that keeps its lines."""

    def __init__(self) -> None:
        super().__init__(process_index=1)
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def rows_of(batch: int) -> np.ndarray:
    """The rows of a batch in the training order, which the data and the seed decide."""
    return jt.Batches(jt.ArrayRows({"inputs": np.zeros((ROWS, 8))}), BATCH, seed=0, shuffle=True).row_numbers(batch)


def table(*, spikes: tuple[int, ...] = (), nan_batch: int | None = None, far_batch: int | None = None) -> jt.Data:
    """Rows of a linear function; those of some batches are off, and of two more one is not a number, one too far."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(ROWS, 8)).astype(np.float32)
    targets = inputs @ random.normal(size=(8, 1)).astype(np.float32)
    for batch in spikes:
        targets[rows_of(batch)] += 1e3
    if nan_batch is not None:
        inputs[rows_of(nan_batch)[5], 2] = np.nan
    if far_batch is not None:
        targets[rows_of(far_batch)[3]] = 1e30
    data = jt.open_data({"kind": "synthetic", "task": "table", "num_columns": 8})
    train = jt.ArrayRows({"inputs": inputs, "targets": targets})
    return dataclasses.replace(data, train=train, validation=None, fingerprint={"name": "rows"}, num_outputs=1)


def train(run_dir: Path, data: jt.Data, **overrides: Any) -> tuple[jt.Result, list[str]]:
    progress = Lines()
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    result = jt.run_config(CONFIG, run_dir=run_dir, overrides=keys, data=data, progress=progress)
    return result, progress.lines


def metrics(run_dir: Path) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row for row in rows}
    assert len(found) == len(rows), "a step stands twice in metrics.jsonl"
    return found


def bits(state: jt.TrainState) -> dict[str, bytes]:
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.optimizer_state, state.spikes))
    return {str(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
