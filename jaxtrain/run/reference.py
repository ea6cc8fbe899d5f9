"""The entry `reference` of a run's rows: computed once by the parameters that the run starts from, then kept in a file.

Checkpoints hold a digest of the file, so that a run never goes on with other numbers than it began with.
"""

import dataclasses
import hashlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtrain.data import Data
from jaxtrain.data.rows import with_entry
from jaxtrain.errors import CheckpointError, DataError
from jaxtrain.metrics.progress import Progress
from jaxtrain.runtime.files import write_bytes_atomic
from jaxtrain.runtime.tree import path_name
from jaxtrain.train.assemble import Run, reading_threads, training_batches
from jaxtrain.train.reference import ENTRY, compute_reference, lacks_reference, with_reference

if TYPE_CHECKING:
    import grain

    from jaxtrain.models.task import Task
    from jaxtrain.train.state import TrainState

FILE = "reference.npz"
_BACK = "put the file of this run back, or start again with --resume never"


def first_reference(run: Run, state: "TrainState", run_dir: Path, progress: Progress, *, main: bool) -> tuple[Run, str]:
    """The run with the numbers in its rows, computed by the state that it starts from, and the digest of their file."""
    config, shards = run.config, run.step.mesh.size
    # As large as what a step computes at once.
    size = -(-(config.train.global_batch_size // config.train.accumulation_steps) // shards) * shards
    sets = {"train": (run.data.train, "the training rows"), "validation": (run.data.validation, "the held-out rows")}
    arrays: dict[str, Any] = {}
    with progress.phase(f"reference of task {run.step.task.name}") as phase:
        for name, (rows, what) in sets.items():
            if rows is not None:
                how = {"batch_size": size, "workers": reading_threads(config), "what": what}
                arrays[name] = compute_reference(run.step, state.params, state.model_state, rows, **how)
        phase.note(f"{sum(map(len, arrays.values())):,} rows, kept in {FILE}")
    if run.data.validation is not None:
        arrays["held_out"] = _rows_digest(run.data.validation)
    content = io.BytesIO()
    np.savez(content, **arrays)
    if main:
        write_bytes_atomic(run_dir / FILE, content.getvalue())
    return _with(run, arrays), _sha256([content.getvalue()])


def resumed_reference(run: Run, run_dir: Path, recorded: str | None) -> Run:
    """Read the numbers of a run that goes on; `recorded` is the digest of their file in its checkpoint."""
    path = run_dir / FILE
    if _sha256([path.read_bytes() if path.is_file() else b""]) != recorded:
        raise CheckpointError(f"{path} is missing, damaged or of another run; {_BACK}")
    return _with(run, _read(path))


def _with(run: Run, arrays: Mapping[str, np.ndarray]) -> Run:
    data = with_reference(run.data, arrays["train"], arrays.get("validation"))
    return dataclasses.replace(run, data=data, batches=training_batches(run.config, data), awaits_reference=False)


def evaluated_rows(rows: "Data | grain.MapDataset", task: "Task", run_dir: Path) -> "Data | grain.MapDataset":
    """The held-out rows of a run that is opened again, with the numbers that the run kept of them."""
    held_out: Any = rows.validation if isinstance(rows, Data) else rows
    if held_out is None or not lacks_reference(task, held_out[0]):
        return rows
    arrays = _read(run_dir / FILE)
    if str(arrays.get("held_out")) != _rows_digest(held_out):
        raise DataError(
            f"{run_dir / FILE} has no numbers of these rows for task {task.name!r}; evaluate the held-out rows of the "
            f"run itself, or give rows with an entry '{ENTRY}'"
        )
    known = with_entry(held_out, ENTRY, arrays["validation"])
    return dataclasses.replace(rows, validation=known) if isinstance(rows, Data) else known


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            return dict(file)
    except Exception as error:  # a dozen types of a damaged archive
        raise CheckpointError(f"{path} is missing or damaged ({error}); {_BACK}") from error


def _rows_digest(rows: Any) -> str:
    """Of the content of rows, whatever they come from."""
    content = ({name: entry for name, entry in rows[i].items() if name != ENTRY} for i in range(len(rows)))
    leaves = (leaf for row in content for leaf in jax.tree_util.tree_leaves_with_path(row))
    return _sha256(
        f"{path_name(path)} {np.asarray(leaf).dtype} {np.shape(leaf)}".encode() + np.asarray(leaf).tobytes()
        for path, leaf in leaves
    )


def _sha256(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
