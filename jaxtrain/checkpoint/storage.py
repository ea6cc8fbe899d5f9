"""The one file that calls Orbax: it writes a flat dictionary of arrays with a record, and reads chosen arrays back.

`AsyncCheckpointer` is used without `CheckpointManager`: the manager takes any directory with a number for a name for a
step, so that with an empty `77/` it silently refuses to save step 50, and it would delete files of others.
"""

import contextlib
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from jaxtrain.checkpoint import failures, s3_orbax
from jaxtrain.checkpoint.directory import ARRAYS_ITEM, RECORD_ITEM
from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.remote import RemotePath, forget_listings

_SAVE_TIMEOUT_SECONDS = 1200
# Orbax divides what is replicated between the devices that hold it, and compiles a program for every part of every
# shape: 20 ms a part on CPU, more than writing a small one takes. Parts of this size and more are divided, and no
# device writes an array of more than the second size alone.
_SMALLEST_PART_BYTES = 4 * 2**20
_LARGEST_WHOLE_BYTES = 32 * 2**20
# While a save starts, Orbax numbers it by a counter of the process: of two that start at once, in two threads, each
# would wait for what the other creates.
_starting = threading.Lock()


class Storage:
    """Writes arrays and record of one step at a time in the background, and reads them.

    Args:
        folder: of the steps; None: on this machine.
    """

    def __init__(self, folder: Place | None = None) -> None:
        import orbax.checkpoint as ocp

        failures.silence_log()
        handlers = {
            ARRAYS_ITEM: ocp.PyTreeCheckpointHandler(type_handler_registry=_type_handlers()),
            RECORD_ITEM: ocp.JsonCheckpointHandler(),
        }
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(**handlers),
            async_options=ocp.AsyncOptions(timeout_secs=_SAVE_TIMEOUT_SECONDS),
            file_options=ocp.options.FileOptions(
                path_permission_mode=None if isinstance(folder, RemotePath) else 0o750
            ),
        )

    def write(self, path: Place, arrays: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Start to write a step; return when the arrays are copied and may be donated.

        Args:
            path: directory of the step, which must not exist.
            arrays: path -> array.
            record: JSON values to store with them.
        """
        import orbax.checkpoint as ocp

        items: dict[str, Any] = {RECORD_ITEM: ocp.args.JsonSave(dict(record))}
        if arrays:
            items[ARRAYS_ITEM] = ocp.args.PyTreeSave(dict(arrays))
        with _one_at_a_time():
            self._checkpointer.save(_orbax_path(path), args=ocp.args.Composite(**items))

    def read(self, path: Place, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Read the named arrays, and only those, each directly into its sharding.

        Args:
            path: directory of a step.
            wanted: path -> `jax.ShapeDtypeStruct` with a sharding, or NumPy array for a leaf on the host.

        Returns:
            Path -> array.

        Raises:
            ReadError: with the reason only; see `failures`.
        """
        import jax
        import numpy
        import orbax.checkpoint as ocp

        if not wanted:
            return {}

        def restore_args(leaf: Any) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
            return ocp.RestoreArgs(restore_type=numpy.ndarray, dtype=leaf.dtype)

        arguments = ocp.args.PyTreeRestore(
            item=dict(wanted),
            restore_args={name: restore_args(leaf) for name, leaf in wanted.items()},
            partial_restore=True,
        )
        composite = ocp.args.Composite(**{ARRAYS_ITEM: arguments})
        place = _orbax_path(path)
        return failures.read_or_reason(lambda: self._checkpointer.restore(place, args=composite)[ARRAYS_ITEM])

    def wait(self) -> None:
        """Wait until the last write is complete; raise its error if it failed."""
        self._checkpointer.wait_until_finished()

    def check(self) -> None:
        """Raise the error of a write in the background if it has failed, without waiting."""
        self._checkpointer.check_for_errors()

    def close(self) -> None:
        """Release the threads."""
        self._checkpointer.close()


def _one_at_a_time() -> AbstractContextManager[object]:
    """Held while a save starts; nothing where there are several processes, which start their saves in one order.

    There each start waits for the other processes: two threads that took the lock in another order on each of them
    would wait for ever.
    """
    import jax

    return _starting if jax.process_count() == 1 else contextlib.nullcontext()


def _type_handlers() -> Any:
    """Orbax's own handlers of arrays and numbers, but for when replicated arrays are divided between devices.

    Orbax's own handler of arrays has a store of its own for shapes and data types as well, which have no public name;
    the record of a step holds them (`tree.describe`).
    """
    import jax
    import numpy
    from orbax.checkpoint import type_handlers

    smallest = min(_SMALLEST_PART_BYTES, _LARGEST_WHOLE_BYTES // jax.device_count())
    arrays = type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=smallest)
    scalars = type_handlers.ScalarHandler()
    return type_handlers.create_type_handler_registry(
        (int, scalars),
        (float, scalars),
        (numpy.number, scalars),
        (numpy.ndarray, type_handlers.NumpyHandler()),
        (jax.Array, arrays),
    )


def _orbax_path(path: Place) -> Any:
    """The path as Orbax takes it: for this machine any path class, for a store one of its own."""
    if not isinstance(path, RemotePath):
        return path
    from etils import epath

    if path.scheme == "s3":
        s3_orbax.enable()
    forget_listings(path.scheme)
    return epath.Path(str(path))


def read_on_host(path: Place, names: Iterable[str]) -> dict[str, Any]:
    """Read the named arrays of a step into host memory; no device, process or open `Storage` takes part.

    Args:
        path: directory of a step.
        names: stored names of arrays.

    Returns:
        Path -> NumPy array in the dtype that it was saved in.

    Raises:
        ReadError: with the reason only; see `failures`.
    """
    import numpy
    import orbax.checkpoint as ocp

    failures.silence_log()
    wanted = list(names)
    arguments = ocp.args.PyTreeRestore(
        item=dict.fromkeys(wanted, 0),
        restore_args={name: ocp.RestoreArgs(restore_type=numpy.ndarray) for name in wanted},
        partial_restore=True,
    )
    folder = _orbax_path(path / ARRAYS_ITEM)
    return failures.read_in_background(lambda: ocp.PyTreeCheckpointHandler().restore(folder, args=arguments))
