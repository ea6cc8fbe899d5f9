"""Batches by index: batch k is a pure function of (rows, seed, k) on any number of processes and devices."""

import atexit
import math
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.arguments import check_whole, refusal
from jaxtrain.errors import ConfigError, DataError, first_line
from jaxtrain.runtime.devices import usable_cores
from jaxtrain.runtime.tree import check_bits, path_name

if TYPE_CHECKING:
    import grain

# With more threads than this, rows wait for the interpreter lock and not for decoding.
_MAX_WORKERS = 16

# Batches that are prepared ahead, and the bytes that they may take.
_MIN_DEPTH = 2
_MAX_DEPTH = 16
_QUEUE_BYTES = 64 * 2**20
# Closing the iterator does not wait longer than this for a load that is under way: it may never end.
_CLOSING_SECONDS = 2.0

# Entries of a batch: arrays, or nested dicts of them (packed rows, graphs).
Batch = dict[str, Any]


class Batches:
    """Batch k as a pure function of (rows, seed, k); each process loads only rows its devices need.

    In training (`shuffle`) the batches never end: batch k holds positions k * B to k * B + B - 1 of an endless order
    in which each epoch is another permutation of the rows (a mixture has its own order, by weight). A random
    transformation of grain depends on epoch and row only, so it differs between epochs and is the same on every mesh.
    In evaluation batch k holds rows k * B to k * B + B - 1; the last one is filled up with copies of row 0, whose entry
    "weights" is 0. Otherwise "weights" are those of the row or, where it has none, 1 (float32 [B], or in the shape of
    integer targets that have more dimensions).

    Args:
        rows: A finite number of rows in their own order, each a dict of arrays or of nested dicts of arrays.
        global_batch_size: B, the number of rows per batch over all processes.
        seed: Decides the order in training.
        shuffle: True for training, False for evaluation.
        workers: Threads that read rows one by one (images); None: the cores of this process, up to 16. Rows that are
            read a batch at a time (tokens, tables) use none. Batches do not depend on it.

    Raises:
        DataError: `rows` is not a dataset with an index, or is empty.
        ConfigError: The batch size is no number above 0.

    Example:
        >>> batches = jt.Batches(rows, 8, seed=0, shuffle=True)
        >>> {name: leaf.shape for name, leaf in batches.spec().items()}
        {'inputs': (8, 4), 'targets': (8,)}
        >>> batch = step.loader(batches)(1000)  # batch 1000, at once
    """

    def __init__(
        self,
        rows: "grain.MapDataset",
        global_batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        workers: int | None = None,
    ):
        # Imported here because grain takes a quarter of a second that `import jaxtrain.data` need not.
        from jaxtrain.data.rows import Rows, training_order

        check_rows(rows, what="Batches", write="Batches(jaxtrain.ArrayRows({...}), ...)")
        example = "Batches(rows, 32, seed=0, shuffle=True)"
        self._size = check_whole(global_batch_size, what="Batches: global_batch_size", least=1, write=example)
        if len(rows) == 0:
            raise DataError("the data has no rows; give data with at least one row")
        self._rows = rows
        self._read = rows.gather if isinstance(rows, Rows) else self._read_one_by_one
        self._workers = workers or min(usable_cores(), _MAX_WORKERS)
        self._order = training_order(rows, seed) if shuffle else None
        self._example = jax.tree.map(lambda column: column[0], self._read(np.array([0])))

    def __repr__(self) -> str:
        kind = "held-out order" if self._order is None else "shuffled"
        leaves = jax.tree_util.tree_leaves_with_path(self.spec())
        entries = ", ".join(f"{path_name(path)} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves)
        return f"Batches of {self._size:,} of {len(self._rows):,} rows, {kind}: {entries}"

    def __len__(self) -> int:
        return -(-len(self._rows) // self._size)

    @property
    def num_rows(self) -> int:
        """Rows of one pass."""
        return len(self._rows)

    def spec(self) -> dict[str, Any]:
        """Return the global shape and dtype of each entry of a batch, batch dimension first."""

        def batched(value: np.ndarray) -> jax.ShapeDtypeStruct:
            # jax stores 64-bit numbers in 32 bits unless x64 is enabled.
            dtype = jax.dtypes.canonicalize_dtype(value.dtype)
            return jax.ShapeDtypeStruct((self._size, *value.shape), dtype)

        spec = jax.tree.map(batched, self._example)
        if self._order is None:
            spec["weights"] = jax.ShapeDtypeStruct((self._size, *self._weight_shape), np.float32)
        return spec

    def row_numbers(self, k: int) -> np.ndarray:
        """Return which rows batch k holds: int64 [B], -1 where a batch of evaluation is filled up.

        Raises:
            ConfigError: There is no batch of this number.
        """
        k = self._checked(k)
        positions = k * self._size + np.arange(self._size)
        if self._order is not None:
            return self._order(positions) % len(self._rows)
        return np.where(positions < len(self._rows), positions, -1)

    @property
    def _weight_shape(self) -> tuple[int, ...]:
        if "weights" in self._example:
            return self._example["weights"].shape
        targets = self._example.get("targets")
        # Integer targets with a dimension have one weight per token; all other rows have one weight each.
        if isinstance(targets, np.ndarray | np.generic) and np.issubdtype(targets.dtype, np.integer):
            return targets.shape
        return ()

    def load(self, k: int, shardings: Mapping[str, Any], *, check: Callable[[Batch], None] | None = None) -> Batch:
        """Read batch k.

        Args:
            k: Number of the batch, from 0; below `len(self)` in evaluation.
            shardings: The sharding of each entry of `spec()`; one sharding may serve all arrays of a nested entry.
            check: Called with the rows of this process, as NumPy arrays, before they are moved to devices.

        Returns:
            Global arrays in these shardings; this process has read only the rows of its own devices, each once.

        Raises:
            ConfigError: There is no batch of this number.
            DataError: What is read is not what the first row says.
        """
        k = self._checked(k)
        spec = self.spec()
        shardings = jax.tree.broadcast({name: shardings[name] for name in spec}, spec)
        needed = _needed_rows(spec, shardings)
        local = self._load_rows(k, needed)
        if check is not None:
            check(local)
        local = in_dtypes(local, spec, where=f"batch {k} holds", first="the first row")
        if all(len(sharding.device_set) == 1 for sharding in jax.tree.leaves(shardings)):
            return jax.device_put(local, shardings)
        return jax.tree.map(
            lambda column, leaf, sharding: jax.make_array_from_callback(
                leaf.shape, sharding, _Window(column, needed), dtype=column.dtype
            ),
            local,
            spec,
            shardings,
        )

    def _checked(self, k: Any) -> int:
        """Return the number of a batch, once it is known that there is one."""
        k = check_whole(k, what="Batches: k", least=0, write="batches.load(0, shardings)")
        if self._order is None and k >= len(self):
            raise ConfigError(f"there is no batch {k}: the rows make batches 0 to {len(self) - 1}")
        return k

    def _load_rows(self, k: int, needed: np.ndarray) -> Batch:
        positions = k * self._size + needed
        if self._order is not None:
            return self._read(self._order(positions))
        is_real = positions < len(self._rows)
        local = self._read(np.where(is_real, positions, 0))
        weights = local.get("weights", np.ones((len(needed), *self._weight_shape), np.float32))
        is_real = is_real.reshape(-1, *[1] * len(self._weight_shape))
        # Selected and not multiplied: 0 times a weight that is not finite is not 0.
        local["weights"] = np.where(is_real, weights, 0).astype(np.float32)
        return local

    def _read_one_by_one(self, indices: np.ndarray) -> Batch:
        # Image decoders release the interpreter lock; a pool per call leaves no thread behind.
        with ThreadPoolExecutor(max(1, min(len(indices), self._workers))) as pool:
            rows: list[Any] = list(pool.map(self._rows.__getitem__, indices.tolist()))
        return _stacked(rows)


def check_rows(rows: Any, *, what: str, write: str) -> None:
    """Raise a DataError where `rows`, which `what` takes, is not a dataset with an index; `write` is an example."""
    import grain

    if not isinstance(rows, grain.MapDataset):
        raise DataError(
            refusal(what, "rows with an index (a grain.MapDataset)", rows, f"{write} or grain.MapDataset.source(rows)")
        )


def in_dtypes(batch: Batch, spec: Batch, *, where: str, first: str) -> Batch:
    """Return a batch of NumPy arrays in the dtypes of its spec, which `first` (in messages) has.

    Raises:
        DataError: Numbers would be cut (0.5 among rows of which the first holds 0), or do not fit into 32 bits.
    """

    def cast(path: Any, column: np.ndarray, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if column.dtype == leaf.dtype:
            return column
        name = f"{where} {path_name(path)}"
        check_bits(column, name)
        with np.errstate(invalid="ignore", over="ignore"):
            result = column.astype(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, np.inexact):
            lost = column[np.isfinite(column) & ~np.isfinite(result)]
            cause = f"outside the range of {leaf.dtype}; rescale the data"
        else:
            lost = column[result != column]
            cause = f"but those of {first} are {leaf.dtype}; give all of them one dtype"
        if lost.size:
            raise DataError(f"{name} of {lost.flat[0]:.6g}, {cause}")
        return result

    return jax.tree_util.tree_map_with_path(cast, batch, spec)


def check_tokens(inputs: np.ndarray, vocab_size: int, source: str) -> None:
    """Check on the host that every id is in the vocabulary, because jax silently clamps an id that is not.

    Args:
        inputs: Ids, integers of any shape.
        vocab_size: Ids must be from 0 to vocab_size - 1.
        source: Name of their source in the message.

    Raises:
        DataError: An id is out of range; the message names the source, the first position and the id.
    """
    inputs = np.asarray(inputs)
    if inputs.size == 0 or (inputs.min() >= 0 and inputs.max() < vocab_size):
        return
    first = np.argwhere((inputs < 0) | (inputs >= vocab_size))[0]
    position = ", ".join(map(str, first.tolist()))
    raise DataError(
        f"{source}: token {inputs[tuple(first)]} at position {position} is outside the vocabulary of {vocab_size}; "
        "use the tokenizer the data was made with, or a model with a larger vocab_size"
    )


def _stacked(rows: list[Any]) -> Batch:
    """Stack rows, entry by entry."""
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    except ValueError as error:
        raise DataError(
            "rows hold different entries or shapes (those that a filter of grain leaves out are None): "
            f"{first_line(error)}"
        ) from None


def _needed_rows(spec: Mapping[str, Any], shardings: Mapping[str, Any]) -> np.ndarray:
    """Return the rows of a batch that this process's devices hold, sorted, each once."""
    leaves = jax.tree.leaves(spec)
    is_needed = np.zeros(leaves[0].shape[0], bool)
    for leaf, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        for index in sharding.addressable_devices_indices_map(leaf.shape).values():
            is_needed[index[0] if index else slice(None)] = True
    return np.flatnonzero(is_needed)


class _Window:
    """Gives slices of a global array from the rows that this process has read."""

    def __init__(self, column: np.ndarray, rows: np.ndarray):
        self._column = column
        self._rows = rows

    def __call__(self, index: Any) -> np.ndarray:
        start = index[0].start or 0
        stop = int(self._rows[-1]) + 1 if index[0].stop is None else index[0].stop
        first, last = np.searchsorted(self._rows, [start, stop])
        assert last - first == stop - start, "a device asks for rows that were not read"
        return self._column[(slice(first, last), *index[1:])]


def queue_depth(spec: Mapping[str, Any]) -> int:
    """Return how many batches of a spec to prepare ahead: 16, or fewer that take 64 MiB, but at least 2."""
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec))
    return max(_MIN_DEPTH, min(_MAX_DEPTH, _QUEUE_BYTES // max(size, 1)))


def prefetch(load: Callable[[int], Batch], start: int, stop: int, *, depth: int = 2) -> Generator[Batch, None, None]:
    """Yield batches start to stop - 1 in order; a thread loads the next ones meanwhile.

    Closing the iterator stops the thread after the load that is under way; it waits at most two seconds for that.

    Args:
        load: Returns batch k; called on one background thread, in order.
        start: First batch.
        stop: One past the last batch.
        depth: Largest number of batches that are prepared ahead; 0 loads in the consumer, without a thread.

    Yields:
        Batch `start`, `start + 1`, ..., `stop - 1`, as `load` returns them.

    Raises:
        Exception: Whatever `load` raised, when its batch would be next.

    Example:
        >>> for batch in jt.prefetch(step.loader(batches), int(state.step), 3):
        ...     state, metrics = step(state, batch)
        >>> int(state.step)
        3
    """
    if depth == 0:
        for k in range(start, stop):
            yield load(k)
        return
    free = threading.Semaphore(depth)
    ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        for k in range(start, stop):
            free.acquire()
            if stopped.is_set():
                return
            try:
                ready.put((load(k), None))
            except BaseException as error:  # Raised again in the consumer.
                ready.put((None, error))
                return

    # A daemon, so that a consumer that dies without closing the iterator does not keep the process alive.
    thread = threading.Thread(target=work, name="jaxtrain-prefetch", daemon=True)
    waits = _CLOSING_SECONDS

    def end() -> None:
        stopped.set()
        free.release()
        thread.join(waits)

    thread.start()
    # An interpreter that ends while the thread is inside of jax would abort.
    atexit.register(end)
    try:
        for _ in range(start, stop):
            try:
                batch, error = ready.get()
            except BaseException:  # raised by a signal: the batch that is waited for may never come
                waits = 0.0
                raise
            if error is not None:
                raise error
            free.release()
            yield batch
            # Released before the wait for the next one: a batch may be gigabytes of device memory.
            del batch
    finally:
        atexit.unregister(end)
        end()
