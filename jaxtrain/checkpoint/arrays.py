"""Turns the leaves of a state into what Orbax stores and back: random keys as numbers, empty arrays by shape alone."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.checkpoint import digest
from jaxtrain.checkpoint.directory import FORMAT_VERSION, CheckpointInfo, DamagedError
from jaxtrain.checkpoint.failures import ReadError, store_failures
from jaxtrain.checkpoint.places import Place
from jaxtrain.checkpoint.space import SaveError
from jaxtrain.checkpoint.storage import Storage
from jaxtrain.checkpoint.tree import describe, is_key, shown_name
from jaxtrain.errors import CheckpointError


def is_process_0() -> bool:
    """Return whether this process is the one that renames and deletes files."""
    import jax

    return jax.process_index() == 0


def from_process_0(decide: Callable[[], int]) -> int:
    """Return what process 0 decides; other processes may see an older listing of a network file system."""
    import jax

    if jax.process_count() == 1:
        return decide()
    import numpy
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(numpy.int32(decide())))


def decided(path: Place, decide: Callable[[], bool]) -> bool:
    """Return what process 0 decides before a save; where a store keeps it from that, every process raises.

    Raises:
        SaveError: the store does not let process 0 look.
    """
    failures: list[SaveError] = []

    def look() -> int:
        try:
            with store_failures(path):
                return decide()
        except SaveError as error:
            failures.append(error)
            return -1

    found = from_process_0(look)
    if found < 0:
        raise failures[0] if failures else SaveError(f"cannot save checkpoint {path}: process 0 cannot look there")
    return bool(found)


def everyone(succeeded: bool) -> bool:
    """Return whether all processes succeeded."""
    import jax

    if jax.process_count() == 1:
        return succeeded
    import numpy
    from jax.experimental import multihost_utils

    return bool(numpy.all(multihost_utils.process_allgather(numpy.asarray([succeeded]))))


def barrier(name: str) -> None:
    """Wait for all processes."""
    import jax

    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def versions() -> dict[str, str]:
    """Return package -> version, "unknown" for one that is not installed, for the record of a step."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("jaxtrain", "jax", "orbax-checkpoint"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def step_record(
    step: int,
    leaves: Mapping[str, Any],
    *,
    metadata: Mapping[str, Any],
    eval_loss: float | None,
    score: float | None,
) -> dict[str, Any]:
    """Return the record of a step, without the digests of its arrays.

    Args:
        step: number of the step.
        leaves: path -> array, number or random key.
        metadata: JSON values.
        eval_loss, score: what `keep_best` compares.
    """
    shapes = {name: describe(leaf, name) for name, leaf in leaves.items()}
    return {
        "format_version": FORMAT_VERSION,
        "step": step,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
        "metadata": dict(metadata),
        "eval_loss": eval_loss,
        "score": score,
        "leaves": {name: [list(shape), dtype] for name, (shape, dtype) in shapes.items()},
        "key_implementations": key_implementations(leaves),
    }


def key_implementations(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Return path -> name of the generator for each random key, which cannot be read from its numbers."""
    import jax

    return {name: str(jax.random.key_impl(leaf)) for name, leaf in leaves.items() if is_key(leaf)}


def storable(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves in forms that Orbax can store: no typed keys, no empty arrays, no Python numbers.

    Numbers get the byte order of this machine, because Orbax writes other byte orders and cannot read them back.

    Args:
        leaves: path -> array, number or random key.

    Returns:
        Path -> array; leaves without elements are left out.
    """
    import jax
    import numpy

    stored = {}
    for name, leaf in leaves.items():
        array = jax.random.key_data(leaf) if is_key(leaf) else leaf
        array = array if isinstance(array, jax.Array) else _native(numpy.asarray(array))
        if array.size:
            stored[name] = array
    return stored


def _native(array: Any) -> Any:
    """Return a NumPy array in this machine's byte order."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def digests(stored: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return path -> digest of each stored array, as two integers for JSON."""
    return {name: list(value) for name, value in digest.digests(stored).items()}


def on_one_device(entry: tuple[tuple[int, ...], str], info: CheckpointInfo, name: str) -> Any:
    """Return a restore target for a saved leaf on the first device of this process, not sharded.

    Args:
        entry: shape and dtype of the saved leaf.
        info: record of the step.
        name: path of the leaf.

    Returns:
        A `jax.ShapeDtypeStruct` with a sharding, or a NumPy array for a dtype that jax would read with half the bits.
    """
    import jax
    import jax.numpy as jnp

    shape, dtype = entry
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if name in info.key_implementations:
        implementation = info.key_implementations[name]
        kind: Any = jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
    else:
        kind = jnp.dtype(dtype)
        if jax.dtypes.canonicalize_dtype(kind) != kind:
            import numpy

            return numpy.empty(shape, kind)
    return jax.ShapeDtypeStruct(shape, kind, sharding=sharding)


def read_verified(files: Storage, info: CheckpointInfo, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Read the wanted leaves of a step and compare each with its digest.

    Args:
        files: open storage.
        info: record of the step; its shapes and dtypes are those of `wanted`.
        wanted: path -> leaf of the target.

    Returns:
        Path -> restored leaf, in the sharding of the target.

    Raises:
        DamagedError: files are missing or unreadable, or an array differs from what was saved.
        CheckpointError: this machine cannot read them (no permission, no memory), although they may be intact.
    """
    specifications = {name: _specification(leaf, info, name) for name, leaf in wanted.items()}
    present = {name: leaf for name, leaf in specifications.items() if math.prod(leaf.shape)}
    failure: ReadError | None = None
    found: dict[str, Any] = {}
    try:
        found = files.read(info.path, present)
    except ReadError as error:
        failure = error
    if not everyone(failure is None):
        if failure is not None and failure.of_this_machine:
            raise CheckpointError(f"cannot read checkpoint {info.path}: {failure}")
        raise DamagedError(f"checkpoint {info.path} is damaged: {failure or 'another process cannot read it'}")
    # A changed byte in the tables of Orbax can give an array of another kind, even one of Python objects.
    values = digest.digests({name: array for name, array in found.items() if _is_like(array, present[name])})
    altered = [name for name in present if name not in values or values[name] != info.digests.get(name)]
    if not everyone(not altered):
        first = shown_name(altered[0]) if altered else "an array on another process"
        raise DamagedError(f"checkpoint {info.path} is damaged: {first} of step {info.step} is not what was saved")
    return {
        name: _as_wanted(leaf, found.get(name), specifications[name], info.key_implementations.get(name))
        for name, leaf in wanted.items()
    }


def _is_like(array: Any, wanted: Any) -> bool:
    """Whether what was read has the shape and dtype that were asked for."""
    import jax
    import numpy

    known = isinstance(array, jax.Array | numpy.ndarray)
    return known and array.shape == wanted.shape and array.dtype == wanted.dtype


def _specification(leaf: Any, info: CheckpointInfo, name: str) -> Any:
    """Return what Orbax reads for a leaf: an abstract array with a sharding, or a NumPy array for one on the host."""
    import jax
    import numpy

    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return _native(numpy.asarray(leaf))
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if not is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    implementation = info.key_implementations[name]
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=implementation)))
    return jax.ShapeDtypeStruct((*leaf.shape, *data.shape), data.dtype, sharding=sharding)


def _as_wanted(leaf: Any, found: Any, specification: Any, implementation: str | None) -> Any:
    import jax
    import numpy

    if found is None:
        found = _empty(specification)
    if implementation is not None:
        wrap = jax.jit(
            lambda data: jax.random.wrap_key_data(data, impl=implementation), out_shardings=specification.sharding
        )
        return wrap(found)
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(numpy.asarray(found).item())
    return found


def _empty(specification: Any) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy

    if isinstance(specification, numpy.ndarray):
        return specification.copy()
    shape, dtype = specification.shape, specification.dtype
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=specification.sharding)()
