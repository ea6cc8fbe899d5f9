"""The entry `reference` of a run's rows: computed once by the parameters that the run starts from, then kept in a file.

The file holds the numbers of every row by its index, and what they are of: a digest of the rows, of the parameters and
of the numbers, and one of each held-out row, by which an evaluation finds its number. Checkpoints hold the same record,
so that a run never goes on with other numbers than it began with.
"""

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtrain.checkpoint.digest import digests
from jaxtrain.checkpoint.storage import from_process_0, storable
from jaxtrain.data import Data
from jaxtrain.data.entries import with_entry
from jaxtrain.errors import CheckpointError, DataError, UserError
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
_ROWS_AT_ONCE = 256
_AGAIN = "give the training command of this run again, which computes it where the parameters of its start can be had"
# SHA-256 of `rows`, `params`, `values` and `held_out_rows`.
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The numbers of all rows.

    Attributes:
        train: float32 [N, ...] of the training rows.
        validation: of the held-out rows; None: there are none.
        record: what they are of.
        held_out_rows: uint64, a digest of each held-out row; None: there are none.
    """

    train: np.ndarray
    validation: np.ndarray | None
    record: Record
    held_out_rows: np.ndarray | None = None


def first_reference(run: Run, state: "TrainState", run_dir: Path, progress: Progress, *, main: bool) -> Reference:
    """Compute the numbers by the state that a run starts from, and write the file.

    Args:
        run: whose rows await them.
        state: at step 0.
        run_dir: exists.
        progress: shows the pass.
        main: whether this process writes.

    Raises:
        DataError: a number that is not finite.
    """
    found = _computed(run, state, progress)
    if main:
        _write(found, run_dir)
    return found


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
    path = run_dir / FILE
    wanted = recorded if isinstance(recorded, Mapping) else {}
    # Process 0 decides for all: another may see an older listing of a network file system.
    if from_process_0(lambda: int(path.is_file())):
        found = read_reference(path)
        for part, what in (("rows", "other rows"), ("params", "another start"), ("values", "other numbers")):
            if found.record.get(part) != wanted.get(part):
                raise CheckpointError(
                    f"{path} holds the reference of {what} than the checkpoint was trained with; put the file of this "
                    "run back, or start again with --resume never"
                )
        return found
    gone = f"{path} is missing, and the parameters that the run started from"
    back = "put the file back, or start again with --resume never"
    try:
        state = create()
    except UserError as error:
        raise CheckpointError(f"{gone} cannot be had again ({error}); {back}") from error
    if _params_digest(state) != wanted.get("params"):
        raise CheckpointError(f"{gone} are others by now; {back}")
    found = _computed(run, state, progress)
    progress.message(f"{path} was missing and has been computed again, from the same parameters")
    if main:
        _write(found, run_dir)
    return found


def with_known_reference(run: Run, reference: Reference) -> Run:
    """The run with the numbers in its rows."""
    data = with_reference(run.data, reference.train, reference.validation)
    batches = training_batches(run.config, data)
    return dataclasses.replace(run, data=data, batches=batches, awaits_reference=False)


def evaluated_rows(rows: "Data | grain.MapDataset", task: "Task", run_dir: Path) -> "Data | grain.MapDataset":
    """Held-out rows of a run that is opened again, or some of them, with the numbers that the run kept of them.

    Args:
        rows: data, whose held-out rows are taken, or rows.
        task: of the run.
        run_dir: of the run.

    Raises:
        DataError: the run has no numbers of these rows.
        CheckpointError: the file of its numbers is gone or damaged.
    """
    held_out: Any = rows.validation if isinstance(rows, Data) else rows
    if held_out is None or not lacks_reference(task, held_out[0]):
        return rows
    path = run_dir / FILE
    if not path.is_file():
        raise CheckpointError(
            f"{path}, with which task {task.name!r} compares, is missing; {_AGAIN}, or, where the rows of the run had "
            f"an entry {ENTRY!r}, give rows with one"
        )
    known = with_entry(held_out, ENTRY, _numbers_of(held_out, read_reference(path), task, path))
    return dataclasses.replace(rows, validation=known) if isinstance(rows, Data) else known


def _numbers_of(rows: "grain.MapDataset", found: Reference, task: "Task", path: Path) -> np.ndarray:
    """The numbers of rows, which are found by the digest of each."""
    other = "these rows"
    values, kept = found.validation, found.held_out_rows
    if values is not None and kept is not None:
        order = np.argsort(kept, kind="stable")
        wanted = _row_digests(rows)
        places = order[np.minimum(np.searchsorted(kept, wanted, sorter=order), len(kept) - 1)]
        differ = np.flatnonzero(kept[places] != wanted)
        if not len(differ):
            return values[places]
        more = f" and {len(differ) - 1:,} others" if len(differ) > 1 else ""
        other = f"row {differ[0]}{more} of the {len(rows):,} rows given"
    raise DataError(
        f"task {task.name!r} compares with the model that the run started from, and {path} has no numbers of {other}; "
        "evaluate held-out rows of the run itself, or give rows with an entry 'reference'"
    )


def read_reference(path: Path) -> Reference:
    """Read a file; with several processes all of them call this, or one alone.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        # Of bytes: NumPy leaves a file that is no archive open.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            record = json.loads(str(arrays["record"]))
            train = arrays["train"]
            validation, rows = arrays.get("validation"), arrays.get("held_out_rows")
        intact = record["values"] == _values_digest(train, validation)
        intact = intact and (rows is None or record["held_out_rows"] == _values_digest(rows))
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} cannot be read ({' '.join(str(error).split())[:100]}); delete it and {_AGAIN}"
        ) from error
    if not intact:
        raise CheckpointError(f"{path} is damaged: its numbers are not what was written; delete it and {_AGAIN}")
    return Reference(train, validation, record, rows)


def _computed(run: Run, state: "TrainState", progress: Progress) -> Reference:
    config, data = run.config, run.data
    # As large as what a step computes at once.
    size = config.train.global_batch_size // config.train.accumulation_steps
    shards = run.step.mesh.size
    size = -(-size // shards) * shards if size % shards else size
    rows = {"the training rows": data.train, "the held-out rows": data.validation}
    with progress.phase(f"reference of task {run.step.task.name}") as phase:
        train, validation = (
            None
            if part is None
            else compute_reference(
                run.step,
                state.params,
                state.model_state,
                part,
                batch_size=size,
                workers=reading_threads(config),
                what=what,
            )
            for what, part in rows.items()
        )
        assert train is not None
        count = len(train) + (0 if validation is None else len(validation))
        phase.note(f"{count:,} rows, kept in {FILE}")
        held_out = None if data.validation is None else _row_digests(data.validation)
        record = {"rows": _rows_digest(data), "params": _params_digest(state)}
        record["values"] = _values_digest(train, validation)
        if held_out is not None:
            record["held_out_rows"] = _values_digest(held_out)
    return Reference(train, validation, record, held_out)


def _write(reference: Reference, run_dir: Path) -> None:
    arrays: dict[str, Any] = {"train": reference.train, "record": np.array(json.dumps(reference.record))}
    if reference.validation is not None:
        arrays["validation"] = reference.validation
    if reference.held_out_rows is not None:
        arrays["held_out_rows"] = reference.held_out_rows
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_bytes_atomic(run_dir / FILE, content.getvalue())


def _rows_digest(data: Data) -> str:
    counts = [len(data.train), None if data.validation is None else len(data.validation)]
    return _sha256(json.dumps([data.fingerprint, counts], sort_keys=True).encode())


def _row_digests(rows: "grain.MapDataset") -> np.ndarray:
    """A digest of the content of each row, uint64 [N], which tells rows apart wherever they are."""
    from jaxtrain.data.rows import Rows

    found = np.empty(len(rows), np.uint64)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        numbers = np.arange(first, min(first + _ROWS_AT_ONCE, len(rows)))
        at_once = rows.gather(numbers) if isinstance(rows, Rows) else None
        for place, number in enumerate(numbers.tolist()):
            row = rows[number] if at_once is None else jax.tree.map(lambda column, i=place: column[i], at_once)
            found[number] = int(_sha256(*_content(row))[:16], 16)
    return found


def _content(row: Any) -> Iterator[bytes]:
    entries = {name: entry for name, entry in row.items() if name != ENTRY}
    for path, leaf in jax.tree_util.tree_leaves_with_path(entries):
        array = np.ascontiguousarray(leaf)
        yield f"{path_name(path)} {array.dtype.str} {array.shape}".encode()
        yield array.tobytes()


def _values_digest(*arrays: np.ndarray | None) -> str:
    parts = [part for part in arrays if part is not None]
    return _sha256(*(f"{part.dtype.str} {part.shape}".encode() + part.tobytes() for part in parts))


def _params_digest(state: "TrainState") -> str:
    """The same on every mesh."""
    tree = (state.params, state.model_state)
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    return _sha256(
        json.dumps({path: list(sums) for path, sums in digests(storable(leaves)).items()}, sort_keys=True).encode()
    )


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
