"""Numbers that go wrong in a run: spikes, steps that are not finite, and devices that compute or keep other bits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint import Checkpointer
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


def table(*, spikes: tuple[int, ...] = (), nan_batch: int | None = None) -> jt.Data:
    """Rows of a linear function; those of some batches are far off, one row of another is not a number."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(ROWS, 8)).astype(np.float32)
    targets = inputs @ random.normal(size=(8, 1)).astype(np.float32)
    for batch in spikes:
        targets[rows_of(batch)] += 1e3
    if nan_batch is not None:
        inputs[rows_of(nan_batch)[5], 2] = np.nan
    data = jt.open_data({"kind": "synthetic", "task": "table", "num_columns": 8})
    train = jt.ArrayRows({"inputs": inputs, "targets": targets})
    return dataclasses.replace(data, train=train, validation=None, fingerprint={"name": "rows"}, num_outputs=1)


def train(run_dir: Path, data: jt.Data, **overrides: Any) -> tuple[jt.Result, list[str]]:
    progress = Lines()
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return jt.run_config(CONFIG, run_dir=run_dir, overrides=keys, data=data, progress=progress), progress.lines


def metrics(run_dir: Path) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row for row in rows}
    assert len(found) == len(rows), "a step stands twice in metrics.jsonl"
    return found


def bits(state: jt.TrainState) -> dict[str, bytes]:
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.optimizer_state, state.spikes))
    return {str(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def test_a_spike_is_skipped_and_the_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    data = table(spikes=(40,))
    keys = {"spikes__action": "skip", "spikes__window": 32}
    whole, lines = train(tmp_path / "whole", data, **keys)
    assert [line for line in lines if "spike" in line and "step 41 is a spike" in line]
    rows = metrics(tmp_path / "whole")
    assert (rows[40]["spikes"], rows[41]["spikes"], rows[60]["spikes"], rows[60]["skipped_steps"]) == (0, 1, 1, 1)
    train(tmp_path / "part", data, **keys, train__steps=35)
    resumed, _ = train(tmp_path / "part", data, **keys)
    assert bits(resumed.state) == bits(whole.state)


def test_a_step_that_is_not_finite_names_its_row(tmp_path: Path) -> None:
    _, lines = train(tmp_path, table(nan_batch=20), train__steps=24)
    row = int(rows_of(20)[5])
    found = json.loads((tmp_path / "nonfinite" / "step_21.json").read_text())
    print(lines, found)
    assert [(one["row"], one["not_finite"]) for one in found["rows"]] == [(row, ["inputs"])]
    assert any(f"batch 20, row {row} (inputs not finite)" in line for line in lines)


def test_a_roll_back(tmp_path: Path) -> None:
    data = table(spikes=(40,))
    keys = {"spikes__action": "roll_back", "spikes__window": 32, "spikes__roll_back_steps": 15, "spikes__skip_batches": 5}
    whole, lines = train(tmp_path / "whole", data, **keys)
    print(lines, json.loads((tmp_path / "whole" / "run.json").read_text())["rolled_back"])
    with Checkpointer(tmp_path / "whole" / "checkpoints", read_only=True) as c:
        print(c.steps(), c.metadata()["rolled_back"])
    assert whole.step == STEPS
