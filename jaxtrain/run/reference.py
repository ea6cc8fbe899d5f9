"""The entry `reference` of a run's rows: computed once by the parameters that the run starts from, then kept in a file.

The file holds the numbers of every row by its index, and digests of the rows, of the parameters and of the numbers,
which checkpoints hold too, so that a run never goes on with other numbers than it began with. A digest of each held-out
row lets an evaluation find its number.
"""

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtrain.checkpoint.arrays import from_process_0, storable
from jaxtrain.checkpoint.digest import digests
from jaxtrain.data import Data
from jaxtrain.data.entries import with_entry
from jaxtrain.errors import CheckpointError, DataError, UserError
from jaxtrain.metrics.progress import Progress
from jaxtrain.runtime.files import write_bytes_atomic
from jaxtrain.runtime.tree_path import path_name
from jaxtrain.train.assemble import Run, reading_threads, training_batches
from jaxtrain.train.reference import ENTRY, compute_reference, lacks_reference, with_reference

if TYPE_CHECKING:
    import grain

    from jaxtrain.models.task import Task
    from jaxtrain.train.state import TrainState

FILE = "reference.npz"
_BACK = "put the file of this run back, or start again with --resume never"
_AGAIN = "give the training command of this run again, which computes it where the parameters of its start can be had"


@dataclasses.dataclass(frozen=True)
class Reference:
    """The numbers of all rows.

    Attributes:
        train: float32 [N, ...] of the training rows.
        validation: of the held-out rows; None: there are none.
        rows: uint64, a digest of each held-out row; None: there are none.
        record: SHA-256 of `rows`, `params` and `values`: what they are of, and what they are.
    """

    train: np.ndarray
    validation: np.ndarray | None
    rows: np.ndarray | None
    record: dict[str, Any]


def first_reference(run: Run, state: "TrainState", run_dir: Path, progress: Progress, *, main: bool) -> Reference:
    """Compute the numbers by the state that a run starts from; the main process writes the file.

    Raises:
        DataError: a number that is not finite.
    """
    config, data, shards = run.config, run.data, run.step.mesh.size
    # As large as what a step computes at once.
    size = -(-(config.train.global_batch_size // config.train.accumulation_steps) // shards) * shards

    def computed(rows: Any, what: str) -> Any:
        if rows is None:
            return None
        how = {"batch_size": size, "workers": reading_threads(config), "what": what}
        return compute_reference(run.step, state.params, state.model_state, rows, **how)

    with progress.phase(f"reference of task {run.step.task.name}") as phase:
        train = computed(data.train, "the training rows")
        validation = computed(data.validation, "the held-out rows")
        rows = None if data.validation is None else _row_digests(data.validation)
        phase.note(f"{len(train) + len(() if rows is None else rows):,} rows, kept in {FILE}")
    arrays = {"train": train, "validation": validation, "held_out_rows": rows}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    counts = [len(train), None if validation is None else len(validation)]
    record = {
        "rows": _sha256([json.dumps([data.fingerprint, counts], sort_keys=True).encode()]),
        "params": _params_digest(state),
        "values": _values_digest(arrays),
    }
    if main:
        content = io.BytesIO()
        np.savez(content, **arrays, record=np.array(json.dumps(record)))
        write_bytes_atomic(run_dir / FILE, content.getvalue())
    return Reference(train, validation, rows, record)


def resumed_reference(
    run: Run,
    run_dir: Path,
    recorded: Any,
    create: Callable[[], "TrainState"],
    progress: Progress,
    *,
    main: bool,
) -> Reference:
    """Read the numbers of a run that goes on; where the file is gone, compute them again from the same start.

    Args:
        run: whose rows await them.
        run_dir: of the run.
        recorded: the record in its checkpoint; None: it has none.
        create: makes the state at step 0 again.
        progress: shows a pass.
        main: whether this process writes.

    Raises:
        CheckpointError: the file is damaged or of another run, or it is gone and so are the parameters that the run
            started from.
    """
    path, recorded = run_dir / FILE, recorded or {}
    # Process 0 decides for all: another may see an older listing of a network file system.
    if from_process_0(lambda: int(path.is_file())):
        found = read_reference(path)
        differ = [name for name, digest in found.record.items() if digest != recorded.get(name)]
        if differ:
            raise CheckpointError(f"{path} has other {differ[0]} than the checkpoint was trained with; {_BACK}")
        return found
    try:
        state = create()
    except UserError as error:
        raise CheckpointError(f"{path} is missing, and the start of the run too ({error}); {_BACK}") from error
    if _params_digest(state) != recorded.get("params"):
        raise CheckpointError(f"{path} is missing, and the parameters at the start are others by now; {_BACK}")
    progress.message(f"{path} is missing and is computed again, from the same parameters")
    return first_reference(run, state, run_dir, progress, main=main)


def with_known_reference(run: Run, reference: Reference) -> Run:
    """The run with the numbers in its rows."""
    data = with_reference(run.data, reference.train, reference.validation)
    batches = training_batches(run.config, data)
    return dataclasses.replace(run, data=data, batches=batches, awaits_reference=False)


def evaluated_rows(rows: "Data | grain.MapDataset", task: "Task", run_dir: Path) -> "Data | grain.MapDataset":
    """Held-out rows of a run that is opened again, or some of them, with the numbers that the run kept of them.

    Raises:
        DataError: the run has no numbers of these rows.
        CheckpointError: the file of its numbers is gone or damaged.
    """
    held_out: Any = rows.validation if isinstance(rows, Data) else rows
    if held_out is None or not lacks_reference(task, held_out[0]):
        return rows
    path = run_dir / FILE
    if not path.is_file():
        raise CheckpointError(f"{path}, with which task {task.name!r} compares, is missing; {_AGAIN}")
    found, wanted = read_reference(path), _row_digests(held_out)
    kept = {} if found.rows is None else {digest: place for place, digest in enumerate(found.rows.tolist())}
    places = [kept.get(digest) for digest in wanted.tolist()]
    if found.validation is None or None in places:
        raise DataError(
            f"{path} has no numbers of row {places.index(None)} of the rows given, with which task {task.name!r} "
            f"compares; evaluate held-out rows of the run itself, or give rows with an entry '{ENTRY}'"
        )
    known = with_entry(held_out, ENTRY, found.validation[np.array(places)])
    return dataclasses.replace(rows, validation=known) if isinstance(rows, Data) else known


def read_reference(path: Path) -> Reference:
    """Read a file; a CheckpointError where it is damaged."""
    try:
        # Of bytes: NumPy leaves a file that is no archive open.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = dict(file)
        record = json.loads(str(arrays.pop("record")))
        if record["values"] != _values_digest(arrays):
            raise ValueError("its numbers are not what was written")
        return Reference(arrays["train"], arrays.get("validation"), arrays.get("held_out_rows"), record)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete it and {_AGAIN}") from error


def _row_digests(rows: "grain.MapDataset") -> np.ndarray:
    """A digest of the content of each row, uint64 [N], which tells rows apart wherever they are."""

    def content(row: Any) -> Iterable[bytes]:
        for path, leaf in jax.tree_util.tree_leaves_with_path({k: v for k, v in row.items() if k != ENTRY}):
            array = np.ascontiguousarray(leaf)
            yield f"{path_name(path)} {array.dtype.str} {array.shape}".encode()
            yield array.tobytes()

    return np.array([int(_sha256(content(rows[i]))[:16], 16) for i in range(len(rows))], np.uint64)


def _values_digest(arrays: dict[str, np.ndarray]) -> str:
    return _sha256(f"{name} {one.dtype.str} {one.shape}".encode() + one.tobytes() for name, one in arrays.items())


def _params_digest(state: "TrainState") -> str:
    """The same on every mesh."""
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.model_state))
    found = digests(storable({path_name(path): leaf for path, leaf in leaves}))
    return _sha256([json.dumps({path: list(sums) for path, sums in found.items()}, sort_keys=True).encode()])


def _sha256(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
