"""The entry `reference` of a run's rows: computed once by the parameters that the run starts from, then kept in a file.

Checkpoints hold a digest of the file, so that a run never goes on with other numbers than it began with.
"""

import dataclasses
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grain
import numpy as np

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.run_folder import checkpoint_folder
from jaxtrain.data.configured import reading_threads, training_batches
from jaxtrain.data.rows import with_entry
from jaxtrain.errors import CheckpointError
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.assemble import Run
from jaxtrain.runtime.distributed import is_main_process
from jaxtrain.runtime.files import write_bytes_atomic
from jaxtrain.train.reference import ENTRY, compute_reference, with_reference
from jaxtrain.train.state import TrainState

FILE = "reference.npz"


def first_reference(run: Run, state: TrainState, run_dir: Path, progress: Progress) -> tuple[Run, str]:
    """The run with the numbers in its rows, computed by the state that it starts from, and the digest of their file."""
    config = run.config
    shards = run.step.mesh.size
    # As large as what a step computes at once.
    size = -(-(config.train.global_batch_size // config.train.accumulation_steps) // shards) * shards
    how: dict[str, Any] = {"batch_size": size, "workers": reading_threads(config)}
    sets = {"train": (run.data.train, "the training rows"), "validation": (run.data.validation, "the held-out rows")}
    with progress.phase(f"reference of task {run.step.task.name}") as phase:
        arrays: dict[str, Any] = {
            name: compute_reference(run.step, state.params, state.model_state, rows, what=what, **how)
            for name, (rows, what) in sets.items()
            if rows is not None
        }
        phase.note(f"{sum(map(len, arrays.values())):,} rows, kept in {FILE}")
    content = io.BytesIO()
    np.savez(content, **arrays)
    if is_main_process():
        write_bytes_atomic(run_dir / FILE, content.getvalue())
    return _with(run, arrays), hashlib.sha256(content.getvalue()).hexdigest()


def with_kept_reference(run: Run, run_dir: Path, recorded: str | None) -> Run:
    """The run with the numbers that it kept when it began; `recorded` is the digest of their file in its checkpoint."""
    return _with(run, _kept(run_dir, recorded))


def _kept(run_dir: Path, recorded: str | None) -> dict[str, np.ndarray]:
    path = run_dir / FILE
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != recorded:
        raise CheckpointError(
            f"{path} is missing, damaged or of another run; put the file of this run back, or start again with "
            "--resume never"
        )
    with np.load(path) as arrays:
        return dict(arrays)


def _with(run: Run, arrays: Mapping[str, np.ndarray]) -> Run:
    data = with_reference(run.data, arrays["train"], arrays.get("validation"))
    return dataclasses.replace(run, data=data, batches=training_batches(run.config, data), awaits_reference=False)


def own_rows_with_reference(rows: grain.MapDataset, run_dir: Path) -> grain.MapDataset:
    """The held-out rows of a run that is opened again, with the numbers that it kept of them."""
    with Checkpointer(checkpoint_folder(run_dir), read_only=True) as checkpoints:
        recorded = checkpoints.metadata().get("reference")
    return with_entry(rows, ENTRY, _kept(run_dir, recorded)["validation"])
