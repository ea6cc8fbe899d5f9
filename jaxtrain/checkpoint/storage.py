"""The one file that calls Orbax: it writes a flat table of arrays with a record, and reads arrays back, verified.

`AsyncCheckpointer` is used without `CheckpointManager`: the manager takes any directory with a number for a name for a
step (with an empty `77/` it silently refuses to save step 50), deletes by its rules before a newer step is read back,
and cannot go back to an earlier one.
"""

import contextlib
import errno
import functools
import gc
import importlib
import logging
import math
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import numpy

from jaxtrain import __version__
from jaxtrain.checkpoint import digest
from jaxtrain.checkpoint.directory import CheckpointInfo, DamagedError
from jaxtrain.checkpoint.places import ARRAYS_ITEM, RECORD_ITEM, Place, RemotePath, forget_listings
from jaxtrain.checkpoint.tree import is_key, native, shown_name
from jaxtrain.errors import CheckpointError

_SAVE_TIMEOUT_SECONDS = 1200
_S3 = "s3://"
# Orbax divides what is replicated between the devices that hold it, and compiles a program for every part of every
# shape: 20 ms a part on CPU. Parts of this size are divided, and no device writes more than the second size alone.
_SMALLEST_PART_BYTES = 4 * 2**20
_LARGEST_WHOLE_BYTES = 32 * 2**20
# Arrays that are read on the host at once: small ones together, because each read has a cost of its own.
_READ_BYTES = 64 * 2**20
# While a save starts, Orbax numbers it by a counter of the process: of two that start at once, in two threads, each
# would wait for what the other creates.
_starting = threading.Lock()

# What keeps this machine from reading files that may be whole, as errors of the system, of tensorstore, of clients.
_ERRNOS = (errno.EACCES, errno.EPERM, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE)
_TEXTS = (
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "UNAUTHENTICATED", "ABORTED"),
    *("CURL error", *map(os.strerror, _ERRNOS)),
)
_CLIENTS = {"aiohttp", "botocore", "aiobotocore", "gcsfs", "google", "requests", "urllib3"}
# What a file system says in the middle of a long text.
_REASONS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, *_ERRNOS)


class Storage:
    """Writes arrays and record of one step at a time in the background, and reads them."""

    def __init__(self, folder: Place | None = None) -> None:
        import orbax.checkpoint as ocp

        _silence()
        handlers = {
            ARRAYS_ITEM: ocp.PyTreeCheckpointHandler(type_handler_registry=_type_handlers()),
            RECORD_ITEM: ocp.JsonCheckpointHandler(),
        }
        mode = None if isinstance(folder, RemotePath) else 0o750
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(**handlers),
            async_options=ocp.AsyncOptions(timeout_secs=_SAVE_TIMEOUT_SECONDS),
            file_options=ocp.options.FileOptions(path_permission_mode=mode),
        )

    def write(self, path: Place, arrays: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Start to write a step, and a record of JSON values; return when the arrays are copied and may be donated."""
        import jax
        import orbax.checkpoint as ocp

        items: dict[str, Any] = {RECORD_ITEM: ocp.args.JsonSave(dict(record))}
        if arrays:
            items[ARRAYS_ITEM] = ocp.args.PyTreeSave(dict(arrays))
        # Several processes start their saves in one order, and wait for one another inside: a lock could deadlock them.
        with _starting if jax.process_count() == 1 else contextlib.nullcontext():
            self._checkpointer.save(_orbax_path(path), args=ocp.args.Composite(**items))

    def read(self, path: Place, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Read the named arrays, and only those, each directly into its sharding; a NumPy array stays on the host."""
        import jax
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
        return _read(path, lambda: self._checkpointer.restore(_orbax_path(path), args=composite)[ARRAYS_ITEM])

    def wait(self) -> None:
        """Wait until the last write is complete; raise its error if it failed."""
        self._checkpointer.wait_until_finished()

    def check(self) -> None:
        """Raise the error of a write in the background if it has failed, without waiting."""
        self._checkpointer.check_for_errors()

    def close(self) -> None:
        """Release the threads."""
        self._checkpointer.close()


def _type_handlers() -> Any:
    """Orbax's own handlers of arrays and numbers, but for when replicated arrays are divided between devices."""
    import jax
    from orbax.checkpoint import type_handlers

    smallest = min(_SMALLEST_PART_BYTES, _LARGEST_WHOLE_BYTES // jax.device_count())
    scalars = type_handlers.ScalarHandler()
    return type_handlers.create_type_handler_registry(
        (int, scalars),
        (float, scalars),
        (numpy.number, scalars),
        (numpy.ndarray, type_handlers.NumpyHandler()),
        (jax.Array, type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=smallest)),
    )


def _orbax_path(path: Place) -> Any:
    """The path as Orbax takes it: for this machine any path class, for a store one of its own."""
    if not isinstance(path, RemotePath):
        return path
    from etils import epath

    if path.scheme == "s3":
        _enable_s3()
    forget_listings(path.scheme)
    return epath.Path(str(path))


@functools.cache
def _enable_s3() -> None:
    """Make Orbax write to s3:// in this process, by replacing four of its private names; further calls do nothing.

    Orbax 0.12 sends everything but gs:// to the driver for files, although tensorstore, which writes the arrays, speaks
    S3 itself (orbax issue 359 and pull request 2739, both open). What is replaced decides which addresses are those of
    a store (where a step is complete once its `commit_success.txt` is written, since a store cannot rename), which
    driver of tensorstore they get, and that their two slashes are kept.
    """
    stores: Any = importlib.import_module("orbax.checkpoint._src.path.gcs_utils")
    tensorstore: Any = importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils")
    plain_spec = stores.get_kvstore_for_gcs
    plain_driver = tensorstore._use_gcs_driver
    plain_path = tensorstore._normalize_path

    def spec(path: Any) -> dict[str, Any]:
        return _s3_spec(str(path)) if str(path).startswith(_S3) else plain_spec(path)

    def normal(path: str) -> str:
        found = plain_path(path)
        return found.replace("s3:/", _S3, 1) if path.startswith(_S3) else found

    stores._GCS_PATH_PREFIX = (*stores._GCS_PATH_PREFIX, _S3)
    stores.get_kvstore_for_gcs = spec
    tensorstore._use_gcs_driver = lambda directory: directory.startswith(_S3) or plain_driver(directory)
    tensorstore._normalize_path = normal


def _s3_spec(address: str) -> dict[str, Any]:
    """Return what tensorstore takes for an address, whose driver does not read the variables of another endpoint."""
    bucket, _, key = address.removeprefix(_S3).partition("/")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": key.rstrip("/")}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        spec["endpoint"] = endpoint
    if region:
        spec["aws_region"] = region
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        # Where the usual search would begin too; but that one opens all files first, and logs those that are not there.
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def storable(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves in forms that Orbax can store: random keys as numbers, numbers as arrays, no empty arrays."""
    import jax

    stored = {}
    for name, leaf in leaves.items():
        array = jax.random.key_data(leaf) if is_key(leaf) else leaf
        array = array if isinstance(array, jax.Array) else native(numpy.asarray(array))
        if array.size:
            stored[name] = array
    return stored


def read_verified(storage: Storage, info: CheckpointInfo, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Read the wanted leaves of a step, whose shapes and dtypes are those of its record, and compare their digests.

    Raises:
        DamagedError: files are missing or unreadable, or an array differs from what was saved.
        CheckpointError: this machine cannot read them (no permission, no memory), although they may be intact.
    """
    import jax

    specifications = {name: _specification(leaf, info, name) for name, leaf in wanted.items()}
    present = {name: leaf for name, leaf in specifications.items() if math.prod(leaf.shape)}
    failure: CheckpointError | None = None
    found: dict[str, Any] = {}
    try:
        found = storage.read(info.path, present)
    except CheckpointError as error:
        failure = error
    if not everyone(failure is None):
        raise failure or DamagedError(f"checkpoint {info.path} is damaged: another process cannot read it")
    # A changed byte in the tables of Orbax can give an array of another kind, even one of Python objects.
    alike = {
        name: array
        for name, array in found.items()
        if isinstance(array, jax.Array | numpy.ndarray)
        and (array.shape, array.dtype) == (present[name].shape, present[name].dtype)
    }
    altered = _altered(info, present, alike)
    if not everyone(altered is None):
        raise _not_as_saved(info, altered)
    return {
        name: _as_wanted(leaf, found.get(name), specifications[name], info.key_implementations.get(name))
        for name, leaf in wanted.items()
    }


def verify_on_host(info: CheckpointInfo, advance: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Read every array of a step into the memory of this process, a few at a time, and compare it with its digest.

    No device and no other process takes part, as a thread beside the training needs. `advance` is called before a read.
    """
    import orbax.checkpoint as ocp

    _silence()
    folder = _orbax_path(info.path / ARRAYS_ITEM)
    left = list(info.digests)
    while left:
        names = []
        num_bytes = 0
        while left and num_bytes < _READ_BYTES:
            names.append(left.pop())
            num_bytes += info.bytes_of(names[-1])
        advance(num_bytes)
        arguments = ocp.args.PyTreeRestore(
            item=dict.fromkeys(names, 0),
            restore_args={name: ocp.RestoreArgs(restore_type=numpy.ndarray) for name in names},
            partial_restore=True,
        )
        restore = functools.partial(ocp.PyTreeCheckpointHandler().restore, folder, args=arguments)
        found = _read(info.path, restore)
        arrays = {name: array for name, array in found.items() if isinstance(array, numpy.ndarray)}
        altered = _altered(info, names, {name: array for name, array in arrays.items() if array.dtype != object})
        if altered is not None:
            raise _not_as_saved(info, altered)


def _altered(info: CheckpointInfo, names: Any, arrays: Mapping[str, Any]) -> str | None:
    """The first array that is not what was saved."""
    values = digest.digests(arrays)
    return next((name for name in names if values.get(name, ()) != info.digests.get(name)), None)


def _not_as_saved(info: CheckpointInfo, name: str | None) -> DamagedError:
    what = "an array on another process" if name is None else shown_name(name)
    return DamagedError(f"checkpoint {info.path} is damaged: {what} of step {info.step} differs from what was saved")


def _specification(leaf: Any, info: CheckpointInfo, name: str) -> Any:
    """Return what Orbax reads for a leaf: an abstract array with a sharding, or a NumPy array for one on the host."""
    import jax

    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return native(numpy.asarray(leaf))
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if not is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    implementation = info.key_implementations[name]
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=implementation)))
    return jax.ShapeDtypeStruct((*leaf.shape, *data.shape), data.dtype, sharding=sharding)


def _as_wanted(leaf: Any, found: Any, specification: Any, implementation: str | None) -> Any:
    """What was read (None: an array without elements, which is not stored) as the kind of leaf that the target has."""
    import jax
    import jax.numpy as jnp

    if isinstance(specification, numpy.ndarray):
        found = specification.copy() if found is None else found
        return type(leaf)(found.item()) if isinstance(leaf, bool | int | float | complex) else found
    place = specification.sharding
    if found is None:
        found = jax.jit(lambda: jnp.zeros(specification.shape, specification.dtype), out_shardings=place)()
    if implementation is not None:
        return jax.jit(lambda data: jax.random.wrap_key_data(data, impl=implementation), out_shardings=place)(found)
    return found


def versions() -> dict[str, str]:
    """Return package -> version, of those that write a checkpoint."""
    return {"jaxtrain": __version__, **{name: version(name) for name in ("jax", "orbax-checkpoint")}}


def is_process_0() -> bool:
    """Return whether this process is the one that renames and deletes files."""
    import jax

    return jax.process_index() == 0


def from_process_0(decide: Callable[[], int]) -> int:
    """Return what process 0 decides; other processes may see an older listing of a network file system."""
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(numpy.int32(decide())))


def everyone(succeeded: bool) -> bool:
    """Return whether all processes succeeded; each waits for all others."""
    from jax.experimental import multihost_utils

    return bool(numpy.all(multihost_utils.process_allgather(numpy.asarray([succeeded]))))


def _read(path: Place, read: Callable[[], dict[str, Any]], *, again: bool = False) -> dict[str, Any]:
    """Return what `read` gives through Orbax; what is raised holds no error of Orbax, with its pending reads."""
    try:
        return read()
    except Exception as error:
        if not again:  # a signal that came while TensorStore called Python looks like damage
            free(error)
            return _read(path, read, again=True)
        is_damage = not any(map(_is_of_this_machine, _chain(error)))
        reason = free(error)
    told = f"checkpoint {path} is damaged: {reason}" if is_damage else f"cannot read checkpoint {path}: {reason}"
    raise (DamagedError if is_damage else CheckpointError)(told)


def _is_of_this_machine(error: BaseException) -> bool:
    return (
        isinstance(error, PermissionError | MemoryError)
        or (isinstance(error, OSError) and error.errno in _ERRNOS)
        or any(text in str(error) for text in _TEXTS)
        or type(error).__module__.partition(".")[0] in _CLIENTS
    )


def free(error: BaseException) -> str:
    """Free what a failed call of Orbax left pending, and return the reason at its root as one short phrase."""
    chain = _chain(error)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
        for link in chain:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None
        gc.collect()  # frames and coroutines refer to one another
    reasons = [link.strerror for link in chain if isinstance(link, OSError) and link.strerror]
    text = str(chain[0])
    reasons += [os.strerror(number) for number in _REASONS if os.strerror(number) in text]
    if text.startswith("NOT_FOUND"):
        reasons.append("its directory is gone")
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(chain[0]).__name__)
    return next(iter(reasons), line[:160])


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    while error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    return chain


@functools.cache
def _silence() -> None:
    """Drop what Orbax logs, and what its pending coroutines print when they are freed: each failure is raised too."""
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    hook = sys.unraisablehook

    def without_orbax(unraisable: "sys.UnraisableHookArgs") -> None:
        # Writes beside one that failed end later, in threads of C++, and find their event loop closed.
        closed_loop = isinstance(unraisable.exc_value, RuntimeError) and "loop is closed" in str(unraisable.exc_value)
        code = getattr(unraisable.object, "cr_code", None)
        if not closed_loop and (code is None or "orbax" not in code.co_filename):
            hook(unraisable)

    sys.unraisablehook = without_orbax
