"""The one file that calls Orbax: writes a flat dictionary of arrays with a record, and reads chosen arrays back.

`AsyncCheckpointer` is used below `CheckpointManager`: the manager counts any directory with a number for a name as a
step, so that an empty `77/` makes it refuse to save step 50 without a word, and it would delete what it did not write.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import failures
from jaxtrain.checkpoint.directory import ARRAYS_ITEM, RECORD_ITEM

_SAVE_TIMEOUT_SECONDS = 1200


class Storage:
    """Arrays and record of one step at a time, written in the background."""

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        failures.silence_log()
        handlers = {
            ARRAYS_ITEM: ocp.PyTreeCheckpointHandler(),
            RECORD_ITEM: ocp.JsonCheckpointHandler(),
        }
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(**handlers),
            async_options=ocp.AsyncOptions(timeout_secs=_SAVE_TIMEOUT_SECONDS),
            file_options=ocp.options.FileOptions(path_permission_mode=0o750),
        )

    def write(self, path: Path, arrays: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Start to write; return when the arrays are copied and may be donated."""
        import orbax.checkpoint as ocp

        items: dict[str, Any] = {RECORD_ITEM: ocp.args.JsonSave(dict(record))}
        if arrays:
            items[ARRAYS_ITEM] = ocp.args.PyTreeSave(dict(arrays))
        self._checkpointer.save(path, args=ocp.args.Composite(**items))

    def read(self, path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Read the named arrays, and only those, each straight into its sharding.

        Args:
            path: directory of a step.
            wanted: by path, a `jax.ShapeDtypeStruct` with a sharding, or a numpy array for a leaf on the host.

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
        return failures.read_or_reason(lambda: self._checkpointer.restore(path, args=composite)[ARRAYS_ITEM])

    def wait(self) -> None:
        """Block until the last write is committed; raise what went wrong."""
        self._checkpointer.wait_until_finished()

    def check(self) -> None:
        """Raise what went wrong in the background, without waiting."""
        self._checkpointer.check_for_errors()

    def close(self) -> None:
        """Release the threads."""
        self._checkpointer.close()
