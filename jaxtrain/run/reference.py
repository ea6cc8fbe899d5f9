"""The entry `reference` of a run's rows: computed once by the parameters that the run starts from, then kept in a file.

Checkpoints hold a digest of the file, so that a run never goes on with other numbers than it began with.
"""

import dataclasses
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.data import Data
from jaxtrain.data.rows import with_entry
from jaxtrain.errors import CheckpointError, DataError
from jaxtrain.metrics.progress import Progress
from jaxtrain.runtime.files import write_bytes_atomic
from jaxtrain.train.assemble import Run, reading_threads, training_batches
from jaxtrain.train.reference import ENTRY, compute_reference, lacks_reference, with_reference

if TYPE_CHECKING:
    import grain

    from jaxtrain.models.task import Task
    from jaxtrain.train.state import TrainState

FILE = "reference.npz"


def first_reference(run: Run, state: "TrainState", run_dir: Path, progress: Progress, *, main: bool) -> tuple[Run, str]:
    """The run with the numbers in its rows, computed by the state that it starts from, and the digest of their file."""
    config, shards = run.config, run.step.mesh.size
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
    if main:
        write_bytes_atomic(run_dir / FILE, content.getvalue())
    return _with(run, arrays), hashlib.sha256(content.getvalue()).hexdigest()


def resumed_reference(run: Run, run_dir: Path, recorded: str | None) -> Run:
    """Read the numbers of a run that goes on; `recorded` is the digest of their file in its checkpoint."""
    path = run_dir / FILE
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != recorded:
        raise CheckpointError(
            f"{path} is missing, damaged or of another run; put the file of this run back, or start again with "
            "--resume never"
        )
    with np.load(path) as arrays:
        return _with(run, arrays)


def _with(run: Run, arrays: Mapping[str, np.ndarray]) -> Run:
    data = with_reference(run.data, arrays["train"], arrays.get("validation"))
    return dataclasses.replace(run, data=data, batches=training_batches(run.config, data), awaits_reference=False)


def evaluated_rows(
    rows: "Data | grain.MapDataset", task: "Task", run_dir: Path, *, own: bool
) -> "Data | grain.MapDataset":
    """Rows for the evaluation of an opened run: its `own` held-out ones with the numbers that it kept of them."""
    held_out: Any = rows.validation if isinstance(rows, Data) else rows
    if held_out is None or not lacks_reference(task, held_out[0]):
        return rows
    if not own or not isinstance(rows, Data) or not (run_dir / FILE).is_file():
        raise DataError(
            f"task {task.name!r} needs numbers that {FILE} has of the run's own rows alone; give rows with an entry "
            f"'{ENTRY}' (jaxtrain.reference_rows)"
        )
    with np.load(run_dir / FILE) as arrays:
        return dataclasses.replace(rows, validation=with_entry(held_out, ENTRY, arrays["validation"]))
