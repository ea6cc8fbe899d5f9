"""The one file that calls Orbax: it writes a flat dictionary of arrays with a record, and reads chosen arrays back.

`AsyncCheckpointer` is used without `CheckpointManager`: the manager takes any directory with a number for a name for a
step, so that with an empty `77/` it silently refuses to save step 50, and it would delete files of others.
"""

import contextlib
import gc
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.directory import ARRAYS_ITEM, RECORD_ITEM
from jaxtrain.errors import CheckpointError

_SAVE_TIMEOUT_SECONDS = 1200
# After a failed read, the other reads end within this time, during which their output is suppressed.
_PENDING_READS_SECONDS = 0.5


class ReadError(Exception):
    """Arrays of a step could not be read.

    Args:
        reason: one short phrase.
        of_this_machine: whether the reason is permission or memory, so that the files may be intact.
    """

    def __init__(self, reason: str, *, of_this_machine: bool) -> None:
        super().__init__(reason)
        self.of_this_machine = of_this_machine


def _without_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


class Storage:
    """Writes arrays and record of one step at a time in the background, and reads them."""

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        # Orbax also logs the failures that it raises, with tracebacks of hundreds of lines; our error is one line.
        logging.getLogger("absl").addFilter(_without_orbax)
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
        self._checkpointer.save(path, args=ocp.args.Composite(**items))

    def read(self, path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Read the named arrays, and only those, each directly into its sharding.

        Args:
            path: directory of a step.
            wanted: path -> `jax.ShapeDtypeStruct` with a sharding, or NumPy array for a leaf on the host.

        Returns:
            Path -> array.

        Raises:
            ReadError: an array cannot be read. Only the reason is kept: Orbax's own error refers to its pending reads,
                which it prints when it is freed.
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
        with _quiet():
            try:
                return self._checkpointer.restore(path, args=ocp.args.Composite(**{ARRAYS_ITEM: arguments}))[
                    ARRAYS_ITEM
                ]
            except Exception as error:
                failure = ReadError(cause(error), of_this_machine=_is_of_this_machine(error))
                _free_frames(error)
            time.sleep(_PENDING_READS_SECONDS)
            gc.collect()
        raise failure

    def wait(self) -> None:
        """Wait until the last write is complete; raise its error if it failed."""
        self._checkpointer.wait_until_finished()

    def check(self) -> None:
        """Raise the error of a write in the background if it has failed, without waiting."""
        self._checkpointer.check_for_errors()

    def close(self) -> None:
        """Release the threads."""
        self._checkpointer.close()


def save_error(path: Path, error: BaseException) -> CheckpointError:
    """Return any error of a save as an error of one line, and free its unfinished work without output."""
    failure = CheckpointError(f"cannot save checkpoint {path}: {cause(error)}")
    with _quiet():
        _free_frames(error)
        gc.collect()
    return failure


def _free_frames(error: BaseException) -> None:
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def cause(error: BaseException) -> str:
    """Return the root cause of an exception as one short phrase."""
    chain = _chain(error)
    for link in chain:
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
    text = str(chain[0])
    for phrase in ("No space left on device", "Permission denied", "Disk quota exceeded", "Read-only file system"):
        if phrase in text:
            return phrase
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(chain[0]).__name__)
    return line if len(line) <= 160 else f"{line[:157]}..."


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _is_of_this_machine(error: BaseException) -> bool:
    texts = ("PERMISSION_DENIED", "Permission denied", "RESOURCE_EXHAUSTED")
    return any(
        isinstance(link, PermissionError | MemoryError) or any(text in str(link) for text in texts)
        for link in _chain(error)
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the hundreds of lines that the unfinished work of a failed operation prints when it ends or is freed."""
    hook, asyncio_logger = sys.unraisablehook, logging.getLogger("asyncio")
    disabled = asyncio_logger.disabled

    def without_reads(unraisable: Any) -> None:
        closed_loop = isinstance(unraisable.exc_value, RuntimeError) and "loop is closed" in str(unraisable.exc_value)
        code = getattr(unraisable.object, "cr_code", None)
        if not closed_loop and (code is None or "orbax" not in code.co_filename):
            hook(unraisable)

    sys.unraisablehook = without_reads
    asyncio_logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = hook
        asyncio_logger.disabled = disabled
